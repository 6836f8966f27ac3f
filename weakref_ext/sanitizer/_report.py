"""Verdicts as a table and as a picture."""

import importlib
import os
from collections.abc import Sequence
from typing import Any

from ._verdict import Kind, Span, Verdict, merged

# Okabe and Ito's palette, which colour-blind readers can tell apart; the hatch tells it without any colour.
_STYLES = {
    Kind.EXCLUSIVE: ("#009E73", ""),
    Kind.PINNED: ("#56B4E9", ""),
    Kind.SHARED: ("#E69F00", "///"),
    Kind.OVERWRITTEN: ("#D55E00", "xxx"),
    Kind.OUTSIDE: ("#CC79A7", "..."),
    Kind.UNKNOWN: ("#999999", "+++"),
}
_BLOCK: dict[str, Any] = dict(facecolor="#DDDDDD", edgecolor="#777777")
_OVER: dict[str, Any] = dict(facecolor="black", edgecolor="white")


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
        its outputs. Black, at the bottom of a row: where its blocks overwrite an output, another capture's or its own.
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
        outputs = [(verdict, verdict.address, verdict.address + verdict.nbytes) for verdict in self if verdict.nbytes]
        blocks = {(span.capture, b.address, b.address + b.size) for span in self._spans for b in span.blocks}
        scale = _Addresses([(begin, end) for _, begin, end in [*blocks, *outputs]])
        figure = figures.Figure(figsize=(12, 2.2 + 0.5 * max(len(names), 2)), layout="constrained")
        axes = figure.subplots()

        def draw(begin: int, end: int, low: float, high: float, **look: Any) -> None:
            at = scale(begin), low
            axes.add_patch(patches.Rectangle(at, scale(end) - scale(begin), high - low, linewidth=0.6, **look))

        for name, begin, end in sorted(blocks):
            draw(begin, end, row[name] - 0.4, row[name] + 0.4, **_BLOCK)
        for name in names:
            own = [(begin, end, verdict) for verdict, begin, end in outputs if verdict.capture == name]
            lanes = _lanes([(begin, end) for begin, end, _ in own])
            height = 0.44 / max([1, *(lane + 1 for lane in lanes)])
            for lane, (begin, end, verdict) in zip(lanes, own, strict=True):
                low = row[name] - 0.22 + lane * height
                draw(begin, end, low, low + height, **_look(verdict.kind))
                middle = (scale(begin) + scale(end)) / 2
                if scale(end) - scale(begin) > 0.006 * len(verdict.path) * scale.total:
                    box = dict(facecolor="white", edgecolor="none", alpha=0.8, pad=0.8)
                    place = dict(ha="center", va="center", fontsize=7, bbox=box)
                    axes.text(middle, low + height / 2, verdict.path, **place)
        for name in names:
            written = [piece for span in self._spans if span.capture == name for piece in span.ranges]
            hits = [(low, high, v) for v in self if name in v.captures for low, high in written]
            hits += [(b.address, b.address + b.size, v) for v in self if v.capture == name and (b := v.allocation)]
            ranges = [(max(low, v.address), min(high, v.address + v.nbytes)) for low, high, v in hits]
            for low, high in merged([(low, high) for low, high in ranges if low < high]):
                draw(low, high, row[name] + 0.26, row[name] + 0.4, **_OVER)
        axes.set(xlim=(0, max(scale.total, 1)), ylim=(max(len(names), 1) - 0.5, -0.5), yticks=range(len(names)))
        axes.set_yticklabels([name if len(name) < 40 else name[:37] + "..." for name in names])
        axes.set_ylabel("captures, in order")
        axes.set_xticks(scale.ticks, scale.labels, fontsize=7)
        axes.set_xlabel(f"address, of {scale.used / 2**20:,.4g} MiB that captures were handed or outputs lie in")
        legend = [
            patches.Patch(label="block handed out", **_BLOCK),
            patches.Patch(label="overwrites an output", **_OVER),
        ]
        for kind in (kind for kind in _STYLES if any(verdict.kind is kind for verdict in self)):
            legend.append(patches.Patch(label=str(kind).removesuffix(" by").removesuffix(" with"), **_look(kind)))
        axes.legend(handles=legend, loc="lower left", bbox_to_anchor=(0, 1), ncols=6, frameon=False, fontsize=8)
        figure.savefig(file, dpi=150)


class _Addresses:
    """Addresses without the stretches that nobody uses, as distances from the left. ``used``: bytes that are left."""

    def __init__(self, ranges: Sequence[tuple[int, int]]) -> None:
        pieces = merged(ranges)
        self.used = sum(end - begin for begin, end in pieces)
        self.total = 0
        self._pieces: list[tuple[int, int, int]] = []
        self.ticks: list[int] = []
        self.labels: list[str] = []
        for begin, end in pieces:
            if not self.ticks or self.total - self.ticks[-1] > self.used // 10:
                self.ticks.append(self.total)
                self.labels.append(f"{begin:#x}")
            self._pieces.append((begin, end, self.total))
            self.total += end - begin + self.used // 50

    def __call__(self, address: int) -> int:
        return next(at + address - begin for begin, end, at in self._pieces if begin <= address <= end)


def _lanes(ranges: Sequence[tuple[int, int]]) -> list[int]:
    """For each range a lane in which it overlaps no earlier one."""
    lanes: list[int] = []
    for i, (begin, end) in enumerate(ranges):
        taken = {lanes[j] for j in range(i) if ranges[j][0] < end and begin < ranges[j][1]}
        lanes.append(next(lane for lane in range(i + 1) if lane not in taken))
    return lanes


def _look(kind: Kind) -> dict[str, Any]:
    colour, hatch = _STYLES[kind]
    return dict(facecolor=colour, edgecolor="black", hatch=hatch, alpha=0.85)
