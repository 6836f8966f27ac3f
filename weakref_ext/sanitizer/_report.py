"""Verdicts as a table and as a picture."""

import importlib
import os
from collections.abc import Sequence
from typing import Any

from ._verdict import Kind, Span, Verdict

# Okabe and Ito's palette, which colour-blind readers can tell apart; the hatch tells it without any colour.
_STYLES = {
    Kind.EXCLUSIVE: ("#009E73", ""),
    Kind.PINNED: ("#56B4E9", ""),
    Kind.SHARED: ("#E69F00", "///"),
    Kind.OVERWRITTEN: ("#D55E00", "xxx"),
    Kind.OUTSIDE: ("#CC79A7", "..."),
    Kind.UNKNOWN: ("#999999", "+++"),
}


class Report(list[Verdict]):
    """One :class:`Verdict` per registered output tensor, in the order of registration; prints as a table.

    Attributes:
        lost: events that the ring had no room for. If there are any, no verdict is ``exclusive``.
    """

    def __init__(self, verdicts: Sequence[Verdict], spans: Sequence[Span], lost: int) -> None:
        super().__init__(verdicts)
        self.lost = lost
        self._spans = spans

    def __str__(self) -> str:
        rows = [("capture", "output", "bytes", "verdict")]
        rows += [(verdict.capture, verdict.path, f"{verdict.nbytes:,}", str(verdict)) for verdict in self]
        wide = [max(len(row[column]) for row in rows) for column in range(3)]
        lines = [f"{row[0]:{wide[0]}}  {row[1]:{wide[1]}}  {row[2]:>{wide[2]}}  {row[3]}" for row in rows]
        if self.lost:
            lines.append(f"The ring was full: {self.lost} events are lost, so nothing is called exclusive.")
        return "\n".join(lines)

    def picture(self, file: str | os.PathLike[str]) -> None:
        """Draw which capture used which addresses, to a file of a format that matplotlib knows by its ending.

        A row per capture in their order, the first on top. Grey: the blocks that it was handed. Coloured by verdict:
        its outputs; a dotted line from each through the rows of the other captures meets the blocks that overwrite it.
        Stretches of addresses that nobody used are cut out.

        Raises:
            ImportError: without matplotlib, which ``pip install weakref_ext[bench]`` brings.
        """
        try:
            figures, patches = (importlib.import_module(f"matplotlib.{name}") for name in ("figure", "patches"))
        except ImportError as error:
            raise ImportError("the picture needs matplotlib: pip install 'weakref_ext[bench]'") from error
        names = list(
            dict.fromkeys([*(span.capture for span in self._spans if span.blocks), *(v.capture for v in self)])
        )
        row = {name: at for at, name in enumerate(names)}
        blocks = [(span.capture, b.address, b.address + b.size) for span in self._spans for b in span.blocks]
        outputs = [(verdict, verdict.address, verdict.address + verdict.nbytes) for verdict in self if verdict.nbytes]
        scale = _Addresses([(begin, end) for _, begin, end in [*blocks, *outputs]])

        figure = figures.Figure(figsize=(12, 2.2 + 0.5 * max(len(names), 2)), layout="constrained")
        axes = figure.subplots()
        for name, begin, end in dict.fromkeys(blocks):
            axes.add_patch(
                _box(patches, scale, begin, end, row[name] - 0.4, 0.8, facecolor="#DDDDDD", edgecolor="#777777")
            )
        for verdict, begin, end in outputs:
            colour, hatch = _STYLES[verdict.kind]
            at = row[verdict.capture]
            look: dict[str, Any] = dict(facecolor=colour, edgecolor="black", hatch=hatch, alpha=0.85)
            axes.add_patch(_box(patches, scale, begin, end, at - 0.22, 0.44, **look))
            middle = (scale(begin) + scale(end)) / 2
            if verdict.captures:
                axes.plot([middle, middle], [-0.5, len(names) - 0.5], color=colour, linestyle=":", linewidth=1)
            if len(outputs) <= 40:
                box = dict(facecolor="white", edgecolor="none", alpha=0.8, pad=0.8)
                axes.text(middle, at, verdict.path, ha="center", va="center", fontsize=7, bbox=box)
        axes.set(xlim=(0, max(scale.total, 1)), ylim=(max(len(names), 1) - 0.5, -0.5), yticks=range(len(names)))
        axes.set_yticklabels([name if len(name) < 40 else name[:37] + "..." for name in names])
        axes.set_ylabel("captures, in order")
        axes.set_xticks(scale.ticks, scale.labels, fontsize=7)
        axes.set_xlabel("address; MiB of memory in use from left to right: " + f"{scale.total / 2**20:,.1f}")
        used = [kind for kind in _STYLES if any(verdict.kind is kind for verdict in self)]
        legend = [patches.Patch(facecolor="#DDDDDD", edgecolor="#777777", label="block handed out")]
        for kind in used:
            colour, hatch = _STYLES[kind]
            label = str(kind).replace(" by", "") if kind is Kind.OVERWRITTEN else str(kind)
            legend.append(patches.Patch(facecolor=colour, edgecolor="black", hatch=hatch, label=label))
        axes.legend(handles=legend, loc="lower left", bbox_to_anchor=(0, 1), ncols=4, frameon=False, fontsize=8)
        figure.savefig(file, dpi=150)


class _Addresses:
    """Addresses without the stretches that nobody uses, as distances from the left."""

    def __init__(self, ranges: Sequence[tuple[int, int]]) -> None:
        self._pieces: list[tuple[int, int, int]] = []
        self.total = 0
        begin = end = None
        for low, high in [*sorted(ranges), (None, None)]:
            if end is not None and begin is not None and (low is None or low > end):
                self._pieces.append((begin, end, self.total))
                self.total += end - begin
                begin = None
            if begin is None:
                begin, end = low, high
            elif high is not None and end is not None:
                end = max(end, high)
        shown = self._pieces[:: len(self._pieces) // 8 + 1]
        self.ticks = [at for _, _, at in shown]
        self.labels = [f"{begin:#x}" for begin, _, _ in shown]

    def __call__(self, address: int) -> int:
        return next(at + address - begin for begin, end, at in self._pieces if begin <= address <= end)


def _box(patches: Any, scale: _Addresses, begin: int, end: int, low: float, height: float, **look: Any) -> Any:
    return patches.Rectangle((scale(begin), low), scale(end) - scale(begin), height, linewidth=0.6, **look)
