"""What do weak refs add to the time of a capture? Ours and the peers', called once in every capture as wrappers do.

``python -m benchmarks.capture`` (needs a GPU). The time of a capture is capture_begin to capture_end, without the
synchronization and the emptying of caches that torch.cuda.graph does first: the share of the walk is the larger for it.
Every call is cold: a model was just traced through, and each way has its turn at each size.
"""

import gc
import importlib.util
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

import weakref_ext
from weakref_ext import _demo

from . import peers
from ._harness import claim, ratio, summary, table
from .memory import LISTS
from .walk import ENTRY, FLOOR, OP, OURS, TE, VLLM

NEEDS_GPU = True
NONE, STRONG = "no weak refs, outputs dropped", "no weak refs, outputs strong"
HIDDEN = 2048

Way = Callable[[Any], Any]
Times = dict[str, list[int]]  # way -> ns, one for each size of each round


def ways() -> dict[str, Way]:
    floor_of = peers.baseline().floor_of
    made: dict[str, Way] = {
        NONE: lambda out: None,
        STRONG: lambda out: out,
        ENTRY: weakref_ext.weak_ref_tensors,
        OURS: OP,
        FLOOR: lambda out: floor_of([out[0], *out[1]]),
        VLLM: peers.vllm_recursion(),
        TE: peers.transformer_engine()[0],
        "pytree over an op": peers.pytree_map,
    }
    if importlib.util.find_spec("optree"):
        made["optree over an op"] = peers.optree_map
    return made


def capture(model: _demo.Decoder, x: torch.Tensor, way: Way, pool: Any) -> tuple[int, int, Any]:
    """Nanoseconds of one capture and of the walk in it, and what has to be kept alive."""
    clock, graph = time.perf_counter_ns, torch.cuda.CUDAGraph()
    start = clock()
    graph.capture_begin(pool=pool)
    out = model(x)
    before = clock()
    kept = way(out)
    after = clock()
    del out
    graph.capture_end()
    return clock() - start, after - before, (graph, kept)


def captures(model: _demo.Decoder, x: torch.Tensor, sizes: list[int], pieces: int, rounds: int) -> tuple[Times, Times]:
    """Capture every size in `pieces` graphs, each way in turn into its own pool: times of captures and of walks."""
    turns = ways()
    if pieces > 1:
        del turns[STRONG]  # only the first piece's output is kept below
    names = list(turns)
    total: Times = {name: [] for name in names}
    walk: Times = {name: [] for name in names}
    with torch.cuda.stream(_demo.warm_stream(model, x)):
        for size in sizes:
            model(x[:size])
        torch.cuda.synchronize()
        for _ in range(rounds):
            pools = {name: torch.cuda.graph_pool_handle() for name in names}
            alive = []
            for size in sorted(sizes, reverse=True):
                names.append(names.pop(0))
                for name in names:
                    whole = walks = 0
                    for piece in range(pieces):
                        took, walked, made = capture(model, x[:size], turns[name], pools[name])
                        whole, walks = whole + took, walks + walked
                        if piece == 0:  # one graph is enough to keep the pool
                            alive.append(made)
                    total[name].append(whole)
                    walk[name].append(walks)
            del alive, made
            gc.collect()
            torch.cuda.empty_cache()
    return total, walk


def figures(total: Times, called: Times, sizes: list[int]) -> dict[str, Any]:
    clock = statistics.median(called[NONE])  # of which a call of nothing takes so much
    walk = {name: [t - clock for t in times] for name, times in called.items() if name not in (NONE, STRONG)}
    descending = sorted(sizes, reverse=True)

    def by_size(times: Sequence[float]) -> dict[int, float]:
        return {size: summary(times[i :: len(sizes)])["median"] / 1e3 for i, size in enumerate(descending)}

    return dict(
        capture_us={name: summary([t / 1e3 for t in times]) for name, times in total.items()},
        times_without={name: ratio(times, total[NONE]) for name, times in total.items() if name != NONE},
        clock_us=clock / 1e3,
        walk_us={name: summary([t / 1e3 for t in times]) for name, times in walk.items()},
        share_percent={
            name: summary([100 * w / t for w, t in zip(times, total[name], strict=True)])
            for name, times in walk.items()
        },
        capture_us_by_size={name: by_size(times) for name, times in total.items()},
        walk_us_by_size=by_size(walk[ENTRY]),
    )


@torch.inference_mode()
def measure(quick: bool) -> dict[str, Any]:
    sizes = [1, 2] if quick else list(LISTS.values())[1]
    hidden = 64 if quick else HIDDEN
    plan = {  # title -> layers, pieces, rounds
        "4 layers": (4, 1, 9),
        "32 layers": (32, 1, 5),
        "60 pieces of 1 layer": (1, 60, 2),
    }
    results = {}
    gc.freeze()
    gc.disable()
    try:
        for title, (layers, pieces, rounds) in plan.items():
            with torch.device("cuda"):
                model = _demo.Decoder(hidden, layers).to(torch.bfloat16)
                x = torch.randn(max(sizes), hidden, dtype=torch.bfloat16)
            results[title] = figures(*captures(model, x, sizes, pieces, 2 if quick else rounds), sizes)
    finally:
        gc.enable()
        gc.unfreeze()
    shares = {title: result["share_percent"][ENTRY]["median"] for title, result in results.items()}
    return dict(
        peers=peers.sources(),
        sizes=sizes,
        hidden=hidden,
        captures=results,
        claims=[
            claim("the Python entry's share of a 4-layer model's capture, %", shares["4 layers"], most=1),
            claim("the Python entry's share of a 32-layer model's capture, %", shares["32 layers"], most=0.1),
        ],
    )


def report(result: dict[str, Any]) -> str:
    parts = []
    for title, each in result["captures"].items():
        here = f"{title}, {len(result['sizes'])} sizes, hidden {result['hidden']}"
        parts.append(table(f"{here}: a capture", each["capture_us"], "us", reference=NONE))
        parts.append(table(f"{here}: the walk in it, cold", each["walk_us"], "us", reference=ENTRY))
        shares = ", ".join(f"{name} {row['median']:.3f}" for name, row in each["share_percent"].items())
        parts.append(f"  share of the capture, %: {shares}")
    return "\n".join(parts)


if __name__ == "__main__":
    from ._harness import main

    sys.exit(main("capture", *sys.argv[1:]))
