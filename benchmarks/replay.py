"""Do weak outputs add anything to a replay, or to reading what was stored? Beside strong outputs, and none.

``python -m benchmarks.replay``. Without a GPU only the reading is measured.
"""

import sys
from typing import Any

import torch

import weakref_ext

from ._harness import CUDA, DEVICE, claim, compare, ratio, samples, summary, table

NEEDS_GPU = False
WAYS = {"none": lambda out: None, "strong": lambda out: out, "weak": weakref_ext.weak_ref_tensors}


def model(x: torch.Tensor) -> Any:
    return x * 2, [x * 3, x * 4, x * 5]


def captured(x: torch.Tensor, way: str) -> tuple[torch.cuda.CUDAGraph, Any]:
    """A graph and what is kept of its output."""
    model(x)  # warm-up
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = WAYS[way](model(x))
    graph.replay()
    return graph, kept


def wait() -> None:
    if CUDA:
        torch.cuda.synchronize()  # a full launch queue would be what is measured


@torch.inference_mode()
def measure(quick: bool) -> dict[str, Any]:
    options: dict[str, Any] = dict(rounds=3, round_s=1e-5) if quick else dict(rounds=41, round_s=0.002)
    x = torch.randn(16, 64, device=DEVICE)
    sections: dict[str, Any] = {"claims": []}
    if CUDA:
        entries = {way: captured(x, way) for way in WAYS}
        outputs = {way: {16: out} for way, (_, out) in entries.items() if way != "none"}
        taken = samples({way: graph.replay for way, (graph, _) in entries.items()}, between=wait, **options)
        sections["replay"] = {way: summary(ns) for way, ns in taken.items()}
        sections["replay_added_ns"] = {
            f"weak - {other}": summary([a - b for a, b in zip(taken["weak"], taken[other], strict=True)])
            for other in ("none", "strong")
        }
        added = ratio(taken["weak"], taken["strong"])["median"]
        sections["claims"] = [claim("a replay with weak outputs kept, of one with strong outputs", added, most=1.02)]
    else:
        source = model(x)  # owns what the weak outputs read
        outputs = {way: {16: WAYS[way](source)} for way in ("strong", "weak")}
    sections["read"] = compare({way: lambda kept=kept: kept[16][1][0] for way, kept in outputs.items()}, **options)
    sections["use"] = compare(
        {way: lambda kept=kept: kept[16][0] + 1 for way, kept in outputs.items()}, between=wait, **options
    )
    return sections


def report(result: dict[str, Any]) -> str:
    titles = {
        "replay": "graph.replay(), by what is kept of the output",
        "read": "looking the stored output up",
        "use": "an operation on the stored output",
    }
    lines = [table(title, result[name], reference="strong") for name, title in titles.items() if name in result]
    lines += [
        f"  added to a replay, {name}: {row['median']:.0f} ns [{row['q1']:.0f} .. {row['q3']:.0f}]"
        for name, row in result.get("replay_added_ns", {}).items()
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    from ._harness import main

    sys.exit(main("replay", *sys.argv[1:]))
