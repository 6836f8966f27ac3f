"""What does the sanitizer cost? Capture time with a trace on, memory of its events, and what is left of it when off.

``python -m benchmarks.sanitizer`` (without a GPU: what is left on the alias path)
"""

import json
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from typing import Any

import torch

from weakref_ext import sanitizer
from weakref_ext.sanitizer._trace import _EVENT, parsed

from ._harness import claim, compare, effort, ratio, summary, table

NEEDS_GPU = False

ALIAS_PATHS = {
    "never imported": "",
    "imported": "import weakref_ext.sanitizer",
    "on and off again": "from weakref_ext import sanitizer\nwith sanitizer.trace(): pass",
}


def alias_ns(setup: str, quick: bool) -> dict[str, float]:
    """In a fresh process: ns a call for (2:T,[3:T])."""
    code = f"""
import json, torch, weakref_ext
from benchmarks._harness import compare, effort
{setup}
out = (torch.ones(4), [torch.ones(4) for _ in range(3)])
function, op = weakref_ext.weak_ref_tensors, torch.ops.weakref_ext.weak_ref_tensors
rows = compare(dict(function=lambda: function(out), operator=lambda: op(out)), **effort({quick}))
print(json.dumps({{name: row["median"] for name, row in rows.items()}}))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def alias_path(quick: bool) -> dict[str, dict[str, float]]:
    """Processes take turns, so that a slow moment of the machine falls on all of them."""
    samples: dict[str, list[float]] = {}
    for _ in range(2 if quick else 3):
        for name, setup in ALIAS_PATHS.items():
            for entry, ns in alias_ns(setup, quick).items():
                samples.setdefault(f"{entry}, {name}", []).append(ns)
    return {name: summary(values) for name, values in sorted(samples.items())}


def capture_time(quick: bool) -> dict[str, Any]:
    """Seconds to capture six sizes of a Llama, with and without a trace, and with a guard; ratios within a round."""
    from .wrappers import CAPTURE_BATCHES, Config, Llama, random_weights, seconds, wrapped

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
    for way in ways.values():
        seconds(way)
    took: dict[str, list[float]] = {name: [] for name in ways}
    for i in range(2 if quick else 5):
        for name in sorted(ways, reverse=bool(i % 2)):
            took[name].append(seconds(ways[name]))
    return dict(
        seconds={name: summary(values) for name, values in took.items()},
        times_off={name: ratio(took[name], took["off"]) for name in ("trace", "guard")},
        events=events,
    )


def event_bytes() -> dict[str, float]:
    """Bytes per million events: in the ring, and as Python keeps them until the trace ends."""
    count = 50_000
    ring = b"".join(_EVENT.pack(2**40 + i, 2**20, 0, 0, 1, -1, 0) for i in range(count))
    tracemalloc.start()
    events = parsed(0, ring)
    python = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return {"ring": len(ring) / len(events) * 1e6, "python": python / len(events) * 1e6}


def allocation(quick: bool) -> dict[str, Any]:
    """ns to allocate and free 4 KiB: before anything is attached, during a trace, and after it (the callback stays)."""

    def timed(name: str) -> dict[str, Any]:
        return compare({name: lambda: torch.empty(4096, dtype=torch.uint8, device="cuda")}, **effort(quick))

    before = timed("never attached")
    x = torch.zeros(8, device="cuda")
    with sanitizer.trace():
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            x.add(1)
        during = timed("trace on")
    return {**before, **during, **timed("trace off again")}


def measure(quick: bool) -> dict[str, Any]:
    sections: dict[str, Any] = dict(bytes_per_million_events=event_bytes())
    if torch.cuda.is_available():
        with torch.inference_mode():
            sections |= dict(allocation_ns=allocation(quick), capture=capture_time(quick))
    sections["alias_path_ns"] = alias_path(quick)
    rows = sections["alias_path_ns"]
    imported = rows["function, imported"]["median"] / rows["function, never imported"]["median"]
    return dict(
        sections, claims=[claim("sanitizer imported and off: a call, times one without it", imported, most=1.05)]
    )


def report(result: dict[str, Any]) -> str:
    parts = [table("weak_ref_tensors((2:T,[3:T]))", result["alias_path_ns"], reference="function, never imported")]
    if "capture" in result:
        parts.append(table("allocate and free 4 KiB", result["allocation_ns"], reference="never attached"))
        ratios = ", ".join(f"{name} {row['median']:.3f}" for name, row in result["capture"]["times_off"].items())
        parts.append(f"  capture, times the time without: {ratios}; {result['capture']['events']} events")
    sizes = result["bytes_per_million_events"]
    parts.append(f"  MB a million events: ring {sizes['ring'] / 1e6:.0f}, Python {sizes['python'] / 1e6:.0f}")
    return "\n".join(parts)


if __name__ == "__main__":
    from ._harness import main

    sys.exit(main("sanitizer", *sys.argv[1:]))
