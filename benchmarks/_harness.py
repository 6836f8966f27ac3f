"""Side-by-side timing, machine facts and JSON for every benchmark."""

import gc
import json
import os
import platform
import statistics
import timeit
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

import weakref_ext

RESULTS = Path(__file__).parent / "results"


def machine() -> dict[str, Any]:
    """What a figure depends on besides the code."""
    model = "unknown"
    if Path("/proc/cpuinfo").exists():
        names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
        model = names[0].split(":", 1)[1].strip() if names else platform.machine()
    return dict(
        cpu=model,
        cores=os.cpu_count(),
        gpu=torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        torch=torch.__version__,
        cuda=torch.version.cuda,
        python=platform.python_version(),
        weakref_ext=weakref_ext.__version__,
        date=datetime.now(UTC).date().isoformat(),
    )


def compare(contenders: Mapping[str, Callable[[], object]], rounds: int = 15, round_s: float = 0.02) -> dict[str, Any]:
    """Nanoseconds a call of every contender, measured in turns: median and quartiles over `rounds`.

    Turns, so that a slow moment of the machine falls on all of them; ratios of medians are what to read.
    """
    timers, loops = {}, {}
    for name, call in contenders.items():
        timers[name] = timeit.Timer(call)
        once = max(timers[name].timeit(3) / 3, 1e-9)
        loops[name] = max(1, int(round_s / once))
        timers[name].timeit(loops[name])
    samples: dict[str, list[float]] = {name: [] for name in contenders}
    gc.collect()
    for _ in range(rounds):
        for name, timer in timers.items():
            samples[name].append(timer.timeit(loops[name]) / loops[name] * 1e9)
    return {name: summary(values) for name, values in samples.items()}


def summary(values: list[float]) -> dict[str, float]:
    """Median and quartiles."""
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return dict(median=round(median, 3), q1=round(low, 3), q3=round(high, 3))


def save(name: str, **sections: Any) -> Path:
    """Write benchmarks/results/NAME_{cpu,gpu}.json with the machine's facts."""
    file = RESULTS / f"{name}_{'gpu' if torch.cuda.is_available() else 'cpu'}.json"
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(dict(machine=machine(), **sections), indent=1) + "\n")
    return file


def table(title: str, rows: Mapping[str, Mapping[str, float]], unit: str = "ns", reference: str | None = None) -> str:
    """One line a contender; `reference` is the one that the last column divides by."""
    lines = [title]
    for name, row in rows.items():
        ratio = f"{row['median'] / rows[reference]['median']:9.2f}x" if reference else ""
        spread = f"[{row['q1']:,.0f} .. {row['q3']:,.0f}]"
        lines.append(f"  {name:34} {row['median']:12,.0f} {unit}  {spread:26} {ratio}")
    return "\n".join(lines)
