"""What a CUDAGraphWrapper costs beside bare torch.cuda.graph: pool, time to capture, time per call. Needs a GPU.

    python -m benchmarks.wrappers --json benchmarks/results/wrappers.json

Exits with 1 where the wrapper's pool is more than 2 MiB above the floor or a capture more than 2 % slower.
"""

import argparse
import gc
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

import weakref_ext
from weakref_ext.cudagraph import BreakableCUDAGraphWrapper, CUDAGraphWrapper

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

from llama import Config, Llama, random_weights
from llm import POOL_SIZES, measure_pool

HIDDEN, AUX = 4096, 3
CAPTURE_BATCHES = (32, 16, 8, 4, 2, 1)


class Decoder:
    """Layers of one product each; returns ``(hidden, [aux, aux, aux])``, bf16 [tokens, 4096]."""

    def __init__(self, layers: int = 8) -> None:
        self.weights = [
            torch.randn(HIDDEN, HIDDEN, device="cuda", dtype=torch.bfloat16) / HIDDEN**0.5 for _ in range(layers)
        ]

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        aux = []
        for i, weight in enumerate(self.weights):
            x = torch.relu(x @ weight) + x
            if i % 2 and len(aux) < AUX:
                aux.append(x)
        return x * 1, aux


def bare(fn: Callable[..., Any], inputs: Sequence[Sequence[torch.Tensor]]) -> list[Any]:
    """What a careful user writes: static inputs, warm-up on a side stream, capture, weak outputs, a first replay."""
    pool, kept, stream = torch.cuda.graph_pool_handle(), [], torch.cuda.Stream()
    for args in inputs:
        static = [torch.empty_like(arg).copy_(arg) for arg in args]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            fn(*static)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            out = fn(*static)
            weak = weakref_ext.weak_ref_tensors(out)
            del out
        graph.replay()
        kept.append((graph, static, weak))
    return kept


def wrapped(fn: Callable[..., Any], inputs: Sequence[Sequence[torch.Tensor]]) -> list[Any]:
    wrapper = CUDAGraphWrapper(fn)
    for args in inputs:
        wrapper(*args)
    return [wrapper]


def seconds(function: Callable[..., Any], *args: Any) -> float:
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    start = time.perf_counter()
    made = function(*args)
    torch.cuda.synchronize()
    took = time.perf_counter() - start
    del made
    return took


def capture_time(fn: Callable[..., Any], inputs: Sequence[Sequence[torch.Tensor]], rounds: int) -> dict[str, float]:
    """Seconds to capture all inputs, the median of rounds that alternate, and the median ratio within a round."""
    seconds(bare, fn, inputs)
    seconds(wrapped, fn, inputs)
    pairs = []
    for i in range(rounds):  # alternate which one goes first
        order = [bare, wrapped] if i % 2 else [wrapped, bare]
        took = {way: seconds(way, fn, inputs) for way in order}
        pairs.append((took[bare], took[wrapped]))
    return {
        "bare_s": statistics.median(b for b, _ in pairs),
        "wrapper_s": statistics.median(w for _, w in pairs),
        "ratio": statistics.median(w / b for b, w in pairs),
    }


def microseconds(call: Callable[[], Any], calls: int = 2000, rounds: int = 7) -> float:
    """Host time per call, the least of the rounds; the device is drained in between."""
    best = float("inf")
    for _ in range(rounds):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        best = min(best, (time.perf_counter() - start) / calls)
    torch.cuda.synchronize()
    return best * 1e6


def call_time() -> dict[str, float]:
    """µs per call of a graph of one small kernel: what is left is the host's work."""

    def fn(x: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        y = x + 1
        return y, [y]

    x = torch.zeros(64, device="cuda")
    ((graph, static, _),) = bare(fn, [[x]])
    figures = {
        "graph.replay()": microseconds(graph.replay),
        "copy and graph.replay()": microseconds(lambda: (static[0].copy_(x), graph.replay())),
    }
    ways: dict[str, CUDAGraphWrapper] = {
        "wrapper": CUDAGraphWrapper(fn),
        "wrapper, key": CUDAGraphWrapper(fn, key=len),
        "wrapper, copy_inputs=False": CUDAGraphWrapper(fn, copy_inputs=False),
        "breakable, no break": BreakableCUDAGraphWrapper(fn),
    }
    for name, wrapper in ways.items():
        wrapper(x)
        figures[name] = microseconds(lambda wrapper=wrapper: wrapper(x))
    return figures


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9, help="pairs of timed captures")
    parser.add_argument("--json", help="write the results to this file")
    options = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("bench_wrappers needs a GPU")
        return 1

    def tokens(size: int) -> list[torch.Tensor]:
        return [torch.zeros(size, dtype=torch.int64, device="cuda") for _ in range(2)]

    with torch.inference_mode():
        pool = measure_pool(
            Decoder(), lambda size: [torch.zeros(size, HIDDEN, device="cuda", dtype=torch.bfloat16)], POOL_SIZES
        )
        model = Llama(Config(), random_weights(Config()), max(CAPTURE_BATCHES), 64, "cuda")
        capture = capture_time(model, [tokens(size) for size in CAPTURE_BATCHES], options.rounds)
        call = call_time()
    result = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "pool_mib": pool,
        "capture": capture,
        "call_us": call,
    }
    print(f"{result['device']}, torch {result['torch']}, Python {result['python']}")
    print(f"\npool, MiB, {AUX} x {HIDDEN} aux, {len(POOL_SIZES)} sizes to {max(POOL_SIZES)}")
    for name, mib in pool.items():
        print(f"  {name:<28}{mib:>10.1f}")
    print(f"\ncapture of {len(CAPTURE_BATCHES)} sizes of a {model.config.layers}-layer Llama, s")
    for name, value in capture.items():
        print(f"  {name:<28}{value:>10.4f}")
    print("\nhost time per call, us")
    for name, us in call.items():
        print(f"  {name:<28}{us:>10.2f}")
    if options.json:
        Path(options.json).write_text(json.dumps(result, indent=1) + "\n")
    return not (max(pool["nested"], pool["wrapper"]) <= pool["floor"] + 2 and capture["ratio"] <= 1.02)


if __name__ == "__main__":
    sys.exit(main())
