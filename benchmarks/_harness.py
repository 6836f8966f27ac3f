"""Side-by-side timing, machine facts, JSON and the command line of every benchmark.

A benchmark is a module with a question as its docstring and three names: `NEEDS_GPU`, `measure(quick)`, which returns
the sections of its JSON, and `report(sections)`, which returns the tables to print. A section "claims" lists what the
project promises about the figures, made by `claim`.
"""

import argparse
import gc
import importlib
import json
import os
import platform
import statistics
import time
import timeit
import traceback
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import torch

import weakref_ext

RESULTS = Path(__file__).parent / "results"
NAMES = ("walk", "growth", "capture", "memory", "replay", "pool_cost", "wrappers", "sanitizer")
CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"

Summary = dict[str, float]
Name = TypeVar("Name", bound=Hashable)


def machine() -> dict[str, Any]:
    """What a figure depends on besides the code."""
    model = "unknown"
    if Path("/proc/cpuinfo").exists():
        names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
        model = names[0].split(":", 1)[1].strip() if names else platform.machine()
    return dict(
        cpu=model,
        cores=os.cpu_count(),
        gpu=torch.cuda.get_device_name() if CUDA else None,
        gpus=torch.cuda.device_count(),
        torch=torch.__version__,
        cuda=torch.version.cuda,
        python=platform.python_version(),
        weakref_ext=weakref_ext.__version__,
        date=datetime.now(UTC).date().isoformat(),
    )


def effort(quick: bool) -> dict[str, Any]:
    """Keyword arguments of `compare` and `samples`: enough for a median, or only for the code to have run."""
    return dict(rounds=2, round_s=1e-5) if quick else dict(rounds=11, round_s=0.005)


def samples(
    contenders: Mapping[Name, Callable[[], object]],
    rounds: int,
    round_s: float,
    between: Callable[[], object] = lambda: None,
) -> dict[Name, list[float]]:
    """Nanoseconds a call of every contender in each of `rounds`, `round_s` seconds long.

    Measured in turns, so that a slow moment of the machine falls on all of them; the order turns too. `between` runs
    before each one's turn. A contender with a `timeit` method of its own is timed by that. No garbage is collected
    meanwhile.
    """
    timers = {name: call if hasattr(call, "timeit") else timeit.Timer(call) for name, call in contenders.items()}
    loops = {name: max(1, int(round_s / max(timer.timeit(3) / 3, 1e-9))) for name, timer in timers.items()}
    for name, timer in timers.items():
        timer.timeit(loops[name])
    taken: dict[Name, list[float]] = {name: [] for name in contenders}
    gc.collect()
    names = list(contenders)
    for _ in range(rounds):
        for name in names:
            between()
            taken[name].append(timers[name].timeit(loops[name]) / loops[name] * 1e9)
        names.append(names.pop(0))
    return taken


def compare(contenders: Mapping[Name, Callable[[], object]], **options: Any) -> dict[Name, Summary]:
    """The `samples` of every contender, summed up."""
    return {name: summary(values) for name, values in samples(contenders, **options).items()}


def ratio(slow: Sequence[float], fast: Sequence[float]) -> Summary:
    """How many times longer `slow` took, round by round: a moment in which the machine is slow hits both."""
    return summary([a / b for a, b in zip(slow, fast, strict=True)])


def summary(values: Sequence[float]) -> Summary:
    """Median and quartiles."""
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return dict(median=round(median, 3), q1=round(low, 3), q3=round(high, 3))


def claim(what: str, value: float, *, least: float | None = None, most: float | None = None) -> dict[str, Any]:
    """A promise about a figure, as JSON."""
    holds = (least is None or value >= least) and (most is None or value <= most)
    bound = f"at least {least:g}" if least is not None else f"at most {most:g}"
    return dict(what=what, value=round(value, 4), bound=bound, holds=holds)


def save(folder: Path, name: str, sections: Mapping[str, Any]) -> Path:
    """Write FOLDER/NAME_{cpu,gpu}.json with the machine's facts."""
    file = folder / f"{name}_{'gpu' if CUDA else 'cpu'}.json"
    folder.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(dict(machine=machine(), **sections), indent=1) + "\n")
    return file


def load(name: str, folder: Path = RESULTS) -> dict[str, Any] | None:
    """What FOLDER/NAME.json holds, or None where it does not exist."""
    file = folder / f"{name}.json"
    return json.loads(file.read_text()) if file.exists() else None


def table(title: str, rows: Mapping[str, Summary], unit: str = "ns", reference: str | None = None) -> str:
    """One line a contender; `reference` is the one that the last column divides by."""
    lines = [title]
    for name, row in rows.items():
        ratio = f"{row['median'] / rows[reference]['median']:9.2f}x" if reference else ""
        spread = f"[{row['q1']:,.0f} .. {row['q3']:,.0f}]"
        lines.append(f"  {name:34} {row['median']:12,.0f} {unit}  {spread:26} {ratio}")
    return "\n".join(lines)


def grid(rows: Iterable[Mapping[str, Any]]) -> str:
    """Rows of equal keys as columns, right-aligned."""
    rows = list(rows)
    cells = [list(rows[0])] + [[f"{v:,.2f}" if isinstance(v, float) else str(v) for v in row.values()] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join("  " + "  ".join(c.rjust(w) for c, w in zip(line, widths, strict=True)) for line in cells)


def main(*argv: str) -> int:
    """Run the benchmarks named in `argv`, or all that this machine can. Returns 0 if each of them finished."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(NAMES)}; none: all that can run here")
    parser.add_argument("--quick", action="store_true", help="run every line once; the figures mean nothing")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the JSON files (default: %(default)s)")
    parser.add_argument("--strict", action="store_true", help="exit with 1 where a claim does not hold")
    options = parser.parse_args(argv)
    if unknown := set(options.names) - set(NAMES):
        parser.error(f"unknown: {', '.join(unknown)}")
    failed: list[str] = []
    for name in options.names or NAMES:
        module = importlib.import_module(f"benchmarks.{name}")
        if module.NEEDS_GPU and not CUDA:
            print(f"== {name} needs a GPU")
            failed += options.names and [name]
            continue
        print(f"== {name}: {str(module.__doc__).splitlines()[0]}", flush=True)
        start = time.perf_counter()
        try:
            sections = module.measure(options.quick)
        except Exception:  # the others' figures are worth having all the same
            traceback.print_exc()
            failed.append(name)
            continue
        took = time.perf_counter() - start
        print(module.report(sections))
        for each in sections.get("claims", ()):
            print(f"  {'holds' if each['holds'] else 'FAILS'}: {each['what']}: {each['value']:g}, {each['bound']}")
            if options.strict and not each["holds"]:
                failed.append(name)
        print(f"{name} took {took:.1f} s; wrote {save(options.out, name, sections)}", flush=True)
    return 1 if failed else 0
