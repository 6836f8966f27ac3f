"""What does a call cost by number of tensors, depth, sizes captured before, and devices? Slopes with intervals.

``python -m benchmarks.growth``. A slope is ordinary least squares over all rounds; its interval holds the middle 95 %
of 1000 bootstrap resamples of the rounds' points, in plain Python. The exponent is the slope of log(ns) over log(x): 1
is linear, 0 no growth.
"""

import math
import random
import statistics
import sys
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

import weakref_ext

from ._harness import CUDA, effort, samples
from .walk import ENTRY, OP, OURS, nested, tensor

NEEDS_GPU = False
RESAMPLES = 1000

CALLS = {ENTRY: weakref_ext.weak_ref_tensors, OURS: OP}

Points = list[tuple[float, float]]


def slope(points: Points) -> float:
    return statistics.linear_regression(*zip(*points, strict=True)).slope


def interval(points: Points) -> dict[str, float]:
    """The slope and the middle 95 % of its bootstrap distribution."""
    draw = random.Random(0)
    slopes: list[float] = []
    while len(slopes) < RESAMPLES:
        drawn = draw.choices(points, k=len(points))
        if len({x for x, _ in drawn}) > 1:
            slopes.append(slope(drawn))
    cuts = statistics.quantiles(slopes, n=40)
    return dict(slope=round(slope(points), 4), low=round(cuts[0], 4), high=round(cuts[-1], 4))


Taken = dict[int, list[float]]  # x -> ns a call, by round


def fit(taken: Taken) -> dict[str, Any]:
    """Medians by x; slope and exponent where there is more than one x."""
    points = [(float(x), ns) for x, all_ns in taken.items() for ns in all_ns]
    medians = {x: round(statistics.median(all_ns), 1) for x, all_ns in taken.items()}
    if len(taken) == 1:
        return dict(ns=medians)
    return dict(
        ns=medians,
        ns_per_step=interval(points),
        exponent=interval([(math.log(x), math.log(ns)) for x, ns in points]),
    )


def by_structure(outputs: Mapping[int, Any], quick: bool) -> dict[str, dict[str, Any]]:
    """The fit of each of our entries over x, where `outputs` maps x to a structure of that size."""
    fits = {}
    for name, call in CALLS.items():
        taken = samples({x: partial(call, out) for x, out in outputs.items()}, **effort(quick))
        fits[name] = fit(taken)
    return fits


def by_sizes_kept(counts: tuple[int, ...], quick: bool) -> dict[str, dict[str, Any]]:
    """The same structure, while weak outputs of so many earlier sizes and their owners are kept."""
    taken: dict[str, Taken] = {name: {} for name in CALLS}
    kept: list[Any] = []
    for count in counts:
        for _ in range(count - len(kept)):
            owner = structure()
            kept.append((owner, weakref_ext.weak_ref_tensors(owner)))
        out = structure()
        calls = {name: partial(call, out) for name, call in CALLS.items()}
        for name, all_ns in samples(calls, **effort(quick)).items():
            taken[name][count] = all_ns
    return {name: fit(rounds) for name, rounds in taken.items()}


def structure() -> Any:
    return tensor(), [tensor() for _ in range(3)]


def over_devices(count: int = 12) -> dict[int, Any]:
    """The same number of tensors over one device, two, ...: every GPU, then the CPU."""
    devices = ["cpu"]
    if CUDA:
        devices = [f"cuda:{i}" for i in range(torch.cuda.device_count())] + devices
    return {
        used: [torch.randn(16, 64, device=devices[i % used]) for i in range(count)]
        for used in range(1, len(devices) + 1)
    }


@torch.inference_mode()
def measure(quick: bool) -> dict[str, Any]:
    few = (1, 3) if quick else None
    return dict(
        method=__doc__.split("``. ")[-1].strip(),
        over={
            "tensors": by_structure(
                {n: [tensor() for _ in range(n)] for n in few or (1, 8, 64, 256, 512, 1000)}, quick
            ),
            "levels": by_structure({n: nested(n) for n in few or (1, 10, 50, 100, 250, 500)}, quick),
            "sizes kept": by_sizes_kept(few or (1, 8, 16, 32, 51, 67), quick),
            "devices": by_structure(over_devices(), quick),
        },
    )


def report(result: dict[str, Any]) -> str:
    lines = []
    for what, entries in result["over"].items():
        for name, row in entries.items():
            text = f"  {name} over {what}: "
            if "ns_per_step" in row:
                step, power = row["ns_per_step"], row["exponent"]
                text += f"{step['slope']:.1f} ns each [{step['low']:.1f} .. {step['high']:.1f}], exponent "
                text += f"{power['slope']:.2f} [{power['low']:.2f} .. {power['high']:.2f}]; "
            lines.append(text + ", ".join(f"{x}: {ns:,.0f} ns" for x, ns in row["ns"].items()))
    return "\n".join(lines)


if __name__ == "__main__":
    from ._harness import main

    sys.exit(main("growth", *sys.argv[1:]))
