"""What does asking the graph pool cost? ``weak_ref_tensors(out, pool=...)`` in a capture, by blocks in the process.

``python -m benchmarks.pool_cost`` (needs a GPU)
"""

import sys
from typing import Any

import torch

import weakref_ext

from ._harness import compare, effort, table

NEEDS_GPU = True


def measure(quick: bool) -> dict[str, Any]:
    x = torch.randn(16, 64, device="cuda")
    results = {}
    kept = []
    for blocks in (0, 1000):
        kept += [torch.empty(4 * 2**20, dtype=torch.uint8, device="cuda") for _ in range(blocks)]
        pool = torch.cuda.graph_pool_handle()
        with torch.cuda.graph(torch.cuda.CUDAGraph(), pool=pool):
            out = (x * 2, [x * 3, x * 4, x * 5])
            calls = {
                "every tensor": lambda out=out: weakref_ext.weak_ref_tensors(out),
                "the pool's": lambda out=out, pool=pool: weakref_ext.weak_ref_tensors(out, pool=pool),
                "torch.cuda.memory_snapshot()": torch.cuda.memory_snapshot,
            }
            results[f"{blocks} other live blocks"] = compare(calls, **effort(quick))
    return dict(calls=results)


def report(result: dict[str, Any]) -> str:
    return "\n".join(table(name, rows, reference="every tensor") for name, rows in result["calls"].items())


if __name__ == "__main__":
    from ._harness import main

    sys.exit(main("pool_cost", *sys.argv[1:]))
