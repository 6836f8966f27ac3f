"""What does a CUDAGraphWrapper cost beside bare torch.cuda.graph? Pool, time to capture, time per call.

``python -m benchmarks.wrappers`` (needs a GPU)
"""

import functools
import gc
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import weakref_ext
from weakref_ext.cudagraph import BreakableCUDAGraphWrapper, CUDAGraphWrapper

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

from llama import Config, Llama, random_weights
from llm import POOL_SIZES, measure_pool

from ._harness import claim, ratio, samples, summary

NEEDS_GPU = True
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


def seconds_in_turns(ways: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """Seconds that each way takes in every round, without the time to free what it made."""
    made: list[Any] = []

    def between() -> None:
        made.clear()
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()

    def run(way: Callable[[], Any]) -> None:
        made.append(way())
        torch.cuda.synchronize()

    turns = {name: functools.partial(run, way) for name, way in ways.items()}
    taken = samples(turns, rounds=rounds, round_s=0, between=between)
    made.clear()
    return {name: [ns / 1e9 for ns in values] for name, values in taken.items()}


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


def tokens(size: int) -> list[torch.Tensor]:
    return [torch.zeros(size, dtype=torch.int64, device="cuda") for _ in range(2)]


def hidden_states(size: int) -> list[torch.Tensor]:
    return [torch.zeros(size, HIDDEN, device="cuda", dtype=torch.bfloat16)]


@torch.inference_mode()
def measure(quick: bool) -> dict[str, Any]:
    batches, pool_sizes = (CAPTURE_BATCHES[-1:], POOL_SIZES[:2]) if quick else (CAPTURE_BATCHES, POOL_SIZES)
    pool = measure_pool(Decoder(), hidden_states, pool_sizes)
    model = Llama(Config(), random_weights(Config()), max(CAPTURE_BATCHES), 64, "cuda")
    inputs = [tokens(size) for size in batches]
    ways = {"bare": lambda: bare(model, inputs), "wrapper": lambda: wrapped(model, inputs)}
    took = seconds_in_turns(ways, 2 if quick else 40)
    capture = {name: summary(values) for name, values in took.items()}
    capture["wrapper over bare"] = ratio(took["wrapper"], took["bare"])
    above = max(pool["nested"], pool["wrapper"]) - pool["floor"]
    return dict(
        pool=f"{AUX} aux of {HIDDEN}, {len(pool_sizes)} sizes to {max(pool_sizes)}",
        pool_mib=pool,
        capture_of=f"{len(batches)} sizes of a {model.config.layers}-layer Llama",
        capture_s=capture,
        call_us=call_time(),
        claims=[
            claim("pool of nested weak refs and of the wrapper, MiB above the floor", above, most=2),
            claim(
                "captures by the wrapper, of the time of bare ones", capture["wrapper over bare"]["median"], most=1.02
            ),
        ],
    )


def report(result: dict[str, Any]) -> str:
    lines = [f"pool, MiB, {result['pool']}"]
    lines += [f"  {name:<28}{mib:>10.1f}" for name, mib in result["pool_mib"].items()]
    lines += [f"capture of {result['capture_of']}, s"]
    lines += [
        f"  {name:<28}{row['median']:>10.4f}  [{row['q1']} .. {row['q3']}]" for name, row in result["capture_s"].items()
    ]
    lines += ["host time per call, us"]
    lines += [f"  {name:<28}{us:>10.2f}" for name, us in result["call_us"].items()]
    return "\n".join(lines)


if __name__ == "__main__":
    from ._harness import main

    sys.exit(main("wrappers", *sys.argv[1:]))
