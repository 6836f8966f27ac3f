"""Draws docs/figures/*.{svg,png} from the committed results alone: ``python -m benchmarks.plot``.

A figure whose results do not exist is left out. The same results give the same SVG, byte for byte.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ._harness import RESULTS, load
from .walk import ENTRY, FLOOR, MAIN, OURS, VLLM

FIGURES = Path(__file__).parents[1] / "docs" / "figures"
# Okabe and Ito's palette: told apart with every kind of colour vision.
BLUE, ORANGE, GREEN, PINK, GREY = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#666666"
STYLE: dict[Any, Any] = {
    "svg.hashsalt": "weakref_ext",
    "figure.constrained_layout.use": True,
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
}


def name_of(machine: dict[str, Any]) -> str:
    return str(machine["gpu"] or f"{machine['cpu']} CPU")


def colour(contender: str) -> str:
    return BLUE if contender.startswith("weakref_ext") else GREY if contender == FLOOR else ORANGE


def walk(folder: Path) -> Figure | None:
    """One call, against everyone."""
    results = [result for kind in ("gpu", "cpu") if (result := load(f"walk_{kind}", folder))]
    if not results:
        return None
    counts = [len(result["structures"]["inference mode"][MAIN]) for result in results]
    figure, axes = plt.subplots(
        len(results),
        figsize=(8, 0.9 * len(results) + 0.29 * sum(counts)),
        squeeze=False,
        sharex=True,
        height_ratios=counts,
    )
    for ax, result in zip(axes[:, 0], results, strict=True):
        rows = sorted(result["structures"]["inference mode"][MAIN].items(), key=lambda item: -item[1]["median"])
        for y, (name, row) in enumerate(rows):
            median, low, high = (row[key] / 1e3 for key in ("median", "q1", "q3"))
            ax.plot([low, high], [y, y], color=colour(name), linewidth=2, alpha=0.5, solid_capstyle="butt")
            ax.plot(median, y, "o", color=colour(name), markersize=6)
            ax.annotate(f"{median:.2f}", (high, y), (7, 0), textcoords="offset points", va="center", fontsize=9)
        ax.set_yticks(range(len(rows)), [name for name, _ in rows])
        for label, (name, _) in zip(ax.get_yticklabels(), rows, strict=True):
            label.set_color(colour(name))
        ax.set_xscale("log")
        ax.xaxis.set_major_formatter("{x:g}")
        ax.margins(x=0.15)
        ax.grid(axis="y", visible=False)
        ax.set_title(f"{name_of(result['machine'])}: one call for {MAIN}")
    axes[-1, 0].set_xlabel("µs a call: median and quartiles (log scale)")
    return figure


def ends(ax: Axes, labels: dict[str, tuple[Any, Any, str]], gap: float) -> None:
    """Name each line at its right end, in its colour: `labels` maps a name to x, y and colour, `gap` is their least
    distance in y."""
    below = float("-inf")
    for name, (x, y, shade) in sorted(labels.items(), key=lambda item: item[1][1]):
        below = max(y, below + gap)
        ax.annotate(
            name, (x, below), (8, 0), textcoords="offset points", va="center", color=shade, annotation_clip=False
        )


def memory(folder: Path) -> Figure | None:
    """Pool memory by number of aux outputs, four ways."""
    result = load("memory_gpu", folder)
    if result is None:
        return None
    first = result["rows"][0]["sizes"]
    chosen = [
        row for row in result["rows"] if (row["sizes"], row["order"], row["hidden"]) == (first, "largest first", 4096)
    ]
    styles = {
        "strong": (ORANGE, "o", "-"),
        "one level weak": (PINK, "s", "-"),
        "nested weak": (BLUE, "D", "-"),
        "dropped (floor)": (GREY, "x", "--"),
    }
    figure, ax = plt.subplots(figsize=(7, 4))
    labels = {}
    for way, (shade, marker, line) in styles.items():
        points = [(row["num_aux"], row["pool_mib"]) for row in chosen if row["way"] == way]
        ax.plot(*zip(*points, strict=True), color=shade, marker=marker, linestyle=line, markersize=6)
        labels[way] = (*points[-1], shade)
    top = max(row["pool_mib"] for row in chosen)
    ends(ax, labels, gap=0.055 * top)
    ax.set_xlabel("aux hidden states that the model returns")
    ax.set_ylabel("graph pool, MiB")
    ax.set_ylim(bottom=0)
    ax.grid(axis="x", visible=False)
    ax.set_title(f"Pool for sizes {first} tokens, hidden 4096, bf16, on {name_of(result['machine'])}")
    return figure


def width(folder: Path) -> Figure | None:
    """Cost a tensor, by how many there are."""
    results = [load(f"walk_{kind}", folder) for kind in ("gpu", "cpu")]
    result = next((r for r in results if r and len(r["ns_per_tensor_by_width"]) > 1), None)
    if result is None:
        return None
    styles = {VLLM: (ORANGE, "s"), OURS: (GREEN, "^"), ENTRY: (BLUE, "o"), FLOOR: (GREY, "x")}
    figure, ax = plt.subplots(figsize=(8, 4.4))
    labels = {}
    for name, (shade, marker) in styles.items():
        rows = result["ns_per_tensor_by_width"][name]
        widths, medians = [int(w) for w in rows], [row["median"] for row in rows.values()]
        ax.fill_between(
            widths, [r["q1"] for r in rows.values()], [r["q3"] for r in rows.values()], color=shade, alpha=0.15
        )
        ax.plot(widths, medians, color=shade, marker=marker, markersize=6)
        labels[name] = (widths[-1], medians[-1], shade)
    ax.set_xscale("log")
    ax.xaxis.set_major_formatter("{x:,.0f}")
    ax.set_ylim(bottom=0)
    ends(ax, labels, gap=0.055 * ax.get_ylim()[1])
    ax.set_xlabel("tensors in a flat list (log scale)")
    ax.set_ylabel("ns a tensor: median and quartiles")
    ax.set_title(f"Cost of a weak ref by width, on {name_of(result['machine'])}")
    return figure


DRAWN: tuple[Callable[[Path], Figure | None], ...] = (walk, memory, width)


def main(results: Path = RESULTS, figures: Path = FIGURES) -> list[Path]:
    """Draw what the results allow; returns the files written."""
    written = []
    figures.mkdir(parents=True, exist_ok=True)
    for draw in DRAWN:
        with plt.rc_context(STYLE):
            figure = draw(results)
            if figure is None:
                continue
            for kind, metadata in (("svg", {"Date": None, "Creator": None}), ("png", {"Software": None})):
                written.append(figures / f"{draw.__name__}.{kind}")
                figure.savefig(written[-1], metadata=metadata, dpi=150)
            plt.close(figure)
    return written


if __name__ == "__main__":
    print(*(["nothing to draw: no results"] if not (files := main()) else files), sep="\n")
    sys.exit(not files)
