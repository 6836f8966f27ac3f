"""What does the sanitizer cost? Capture time with a trace on, memory of its events, and what is left of it when off.

``python -m benchmarks.sanitizer`` (without a GPU: what is left on the alias path)
"""

import argparse
import json
import statistics
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from typing import Any

import torch

import weakref_ext
from weakref_ext import sanitizer
from weakref_ext.sanitizer._trace import Allocator

from ._harness import compare, save, summary, table

ALIAS_PATHS = {
    "never imported": "",
    "imported": "import weakref_ext.sanitizer",
    "on and off again": "from weakref_ext import sanitizer\nwith sanitizer.trace(): pass",
}


def alias_ns(setup: str) -> dict[str, float]:
    """In a fresh process: ns a call on (T,[3:T])."""
    code = f"""
import json, torch, weakref_ext
from benchmarks._harness import compare
{setup}
out = (torch.ones(4), [torch.ones(4) for _ in range(3)])
function, op = weakref_ext.weak_ref_tensors, torch.ops.weakref_ext.weak_ref_tensors.default
rows = compare(dict(function=lambda: function(out), operator=lambda: op(out)), rounds=9)
print(json.dumps({{name: row["median"] for name, row in rows.items()}}))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def alias_path(rounds: int) -> dict[str, dict[str, float]]:
    """Processes take turns, so that a slow moment of the machine falls on all of them."""
    samples: dict[str, list[float]] = {}
    for _ in range(rounds):
        for name, setup in ALIAS_PATHS.items():
            for entry, ns in alias_ns(setup).items():
                samples.setdefault(f"{entry}, {name}", []).append(ns)
    return {name: summary(values) for name, values in sorted(samples.items())}


def capture_time(rounds: int) -> dict[str, Any]:
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
    for i in range(rounds):
        for name in sorted(ways, reverse=bool(i % 2)):
            took[name].append(seconds(ways[name]))
    figures: dict[str, Any] = {f"{name}_s": statistics.median(values) for name, values in took.items()}
    for name in ("trace", "guard"):
        figures[f"{name}_ratio"] = statistics.median(a / b for a, b in zip(took[name], took["off"], strict=True))
    return {**figures, "events": events}


def event_bytes() -> dict[str, float]:
    """Bytes per million events: in the ring, and as Python keeps them until the trace ends."""
    source, x = Allocator(), torch.zeros(64, device="cuda")
    source.start(2**17)
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        for _ in range(50_000):
            x.add(1)
    source.stop()
    _, data = weakref_ext._C.trace_read(0)
    tracemalloc.start()
    _, events = source.read(0)
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return {"events": len(events), "ring": len(data) / len(events) * 1e6, "python": held / len(events) * 1e6}


def allocation() -> dict[str, Any]:
    """ns to allocate and free 4 KiB: before anything is attached, during a trace, and after it (the callback stays)."""
    before = compare({"never attached": lambda: torch.empty(4096, dtype=torch.uint8, device="cuda")})
    x = torch.zeros(8, device="cuda")
    with sanitizer.trace():
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            x.add(1)
        during = compare({"trace on": lambda: torch.empty(4096, dtype=torch.uint8, device="cuda")})
    after = compare({"trace off again": lambda: torch.empty(4096, dtype=torch.uint8, device="cuda")})
    return {**before, **during, **after}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    sections: dict[str, Any] = {"alias_path_ns": alias_path(rounds)}
    print(table("weak_ref_tensors((T,[3:T]))", sections["alias_path_ns"], reference="function, never imported"))
    if torch.cuda.is_available():
        with torch.inference_mode():
            sections["allocation_ns"] = allocation()
            sections["capture"] = capture_time(rounds)
        sections["bytes_per_million_events"] = event_bytes()
        print(table("allocate and free 4 KiB", sections["allocation_ns"], reference="never attached"))
        for name in ("capture", "bytes_per_million_events"):
            print(name, {key: round(value, 4) for key, value in sections[name].items()})
    print("wrote", save("sanitizer", **sections))


if __name__ == "__main__":
    main()
