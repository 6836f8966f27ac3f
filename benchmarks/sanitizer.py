"""What does the sanitizer cost? Capture time with a trace on, memory of its events, and what is left of it when off.

``python -m benchmarks.sanitizer`` (without a GPU: what is left on the alias path)
"""

import contextlib
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from typing import Any

import torch

from weakref_ext import sanitizer
from weakref_ext.sanitizer._trace import _EVENT, Packed

from ._harness import CUDA, claim, ratio, samples, summary, table

NEEDS_GPU = False

PROCESSES = {
    "never imported": "",
    "imported": "import weakref_ext.sanitizer",
    "trace on": "trace = sanitizer.trace()\ntrace.__enter__()",  # until the process ends
    "on and off again": "with sanitizer.trace(): pass",  # torch keeps a callback once it is attached
}
WORKER = """
import os, sys, timeit, torch, weakref_ext
os.sched_setaffinity(0, {{max(os.sched_getaffinity(0))}})  # one core for all: cores differ in speed
out = (torch.ones(4), [torch.ones(4) for _ in range(3)])
function, operator = weakref_ext.weak_ref_tensors, torch.ops.weakref_ext.weak_ref_tensors
timers = dict(function=timeit.Timer(lambda: function(out)), operator=timeit.Timer(lambda: operator(out)))
if torch.cuda.is_available():
    torch.cuda.init()  # a trace attaches itself to an allocator that exists
    timers["allocation"] = timeit.Timer(lambda: torch.empty(4096, dtype=torch.uint8, device="cuda"))
if "sanitizer" in {setup!r}:
    from weakref_ext import sanitizer
{setup}
for line in sys.stdin:
    name, number = line.split()
    print(timers[name].timeit(int(number)), flush=True)
"""


class Timer:
    """A timer in another process."""

    def __init__(self, process: Any, name: str) -> None:
        self.process, self.name = process, name

    def __call__(self) -> float:
        return self.timeit(1)

    def timeit(self, number: int) -> float:
        print(self.name, number, file=self.process.stdin, flush=True)
        return float(self.process.stdout.readline())


def in_processes(quick: bool) -> dict[str, dict[str, list[float]]]:
    """ns a call for (2:T,[3:T]) and to allocate and free 4 KiB, by what the process has done with the sanitizer; the
    processes live side by side and take turns, so that a slow moment of the machine falls on all of them. Several of
    each in turn, since where a process happens to lie in memory is worth some percent."""
    pipes: dict[str, Any] = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    setups = {title: setup for title, setup in PROCESSES.items() if title != "trace on" or CUDA}
    taken: dict[str, dict[str, list[float]]] = {
        name: {title: [] for title in setups} for name in ["function", "operator", "allocation"][: 3 if CUDA else 2]
    }
    for _ in range(1 if quick else 5):
        with contextlib.ExitStack() as stack:
            processes = {
                title: stack.enter_context(
                    subprocess.Popen([sys.executable, "-c", WORKER.format(setup=setup)], **pipes)
                )
                for title, setup in setups.items()
            }
            for name, rows in taken.items():
                timers = {title: Timer(process, name) for title, process in processes.items()}
                for title, values in samples(timers, rounds=2 if quick else 41, round_s=0.001).items():
                    rows[title] += values
    return taken


def capture_time(quick: bool) -> dict[str, Any]:
    """Seconds to capture six sizes of a Llama, with and without a trace, and with a guard; ratios within a round."""
    from .wrappers import CAPTURE_BATCHES, Config, Llama, random_weights, seconds_in_turns, wrapped

    model = Llama(Config(), random_weights(Config()), max(CAPTURE_BATCHES), 64, "cuda")
    inputs = [[torch.zeros(n, dtype=torch.int64, device="cuda") for _ in range(2)] for n in CAPTURE_BATCHES]
    events = 0

    def within(context: Callable[[], Any]) -> list[Any]:
        nonlocal events
        with context() as trace:
            made = wrapped(model, inputs)
            events = trace.history.end
        return made

    ways: dict[str, Callable[[], Any]] = {
        "off": lambda: wrapped(model, inputs),
        "trace": lambda: within(sanitizer.trace),
        "guard": lambda: within(sanitizer.guard),
    }
    took = seconds_in_turns(ways, 2 if quick else 20)
    return dict(
        seconds={name: summary(values) for name, values in took.items()},
        times_off={name: ratio(took[name], took["off"]) for name in ("trace", "guard")},
        events=events,
    )


def event_bytes() -> dict[str, float]:
    """Bytes per million events: in the ring and in Python, and in Python once somebody has asked for a report."""
    count = 50_000
    ring = b"".join(_EVENT.pack(2**40 + i, 2**20, 0, 0, 1, -1, 0) for i in range(count))
    tracemalloc.start()
    events = list(Packed(0, ring))
    unpacked = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return {"packed": len(ring) / count * 1e6, "unpacked": unpacked / len(events) * 1e6}


def measure(quick: bool) -> dict[str, Any]:
    sections: dict[str, Any] = dict(bytes_per_million_events=event_bytes())
    if CUDA:
        with torch.inference_mode():
            sections["capture"] = capture_time(quick)
    taken = in_processes(quick)
    sections["ns"] = {name: {title: summary(v) for title, v in row.items()} for name, row in taken.items()}
    imported = ratio(taken["function"]["imported"], taken["function"]["never imported"])["median"]
    return dict(
        sections, claims=[claim("sanitizer imported and off: a call, times one without it", imported, most=1.05)]
    )


def report(result: dict[str, Any]) -> str:
    titles = {
        "function": "weak_ref_tensors((2:T,[3:T]))",
        "operator": "torch.ops, the same",
        "allocation": "allocate and free 4 KiB",
    }
    parts = [table(titles[name], rows, reference="never imported") for name, rows in result["ns"].items()]
    if "capture" in result:
        ratios = ", ".join(f"{name} {row['median']:.3f}" for name, row in result["capture"]["times_off"].items())
        parts.append(f"  capture, times the time without: {ratios}; {result['capture']['events']} events")
    sizes = result["bytes_per_million_events"]
    parts.append("  MB a million events: " + ", ".join(f"{name} {size / 1e6:.0f}" for name, size in sizes.items()))
    return "\n".join(parts)


if __name__ == "__main__":
    from ._harness import main

    sys.exit(main("sanitizer", *sys.argv[1:]))
