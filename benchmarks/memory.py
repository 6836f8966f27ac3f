"""How much memory does a graph pool take? Outputs kept strong, one level weak, nested weak, or not at all (the floor).

``python -m benchmarks.memory``. On a GPU the pool is measured; without one, the output bytes that stay allocated.

Every row adds up: pool = expected + rounding + free. Expected is arithmetic: (strong hidden + strong aux) * tokens *
hidden * bytes, over all sizes; the allocator's own account of requested bytes must equal it. Rounding is what its
blocks are larger than that: it splits no remainder of 1 MiB or less off a large block. Free is memory that no output
pins: the captures' working memory, which every capture reuses. At the floor the pool is all free, and has room for the
largest size's own outputs, which is why strong outputs cost less than the floor and their own bytes together.
"""

import gc
import itertools
import sys
from collections.abc import Iterator
from typing import Any

import torch

from weakref_ext import _demo

from ._harness import CUDA, claim, grid

NEEDS_GPU = False
MIB = 2**20
LISTS = {
    "1, 2, 4, 8..512 by 8": [1, 2, 4, *range(8, 513, 8)],
    "1, 2, 4, 8..256 by 8, 272..512 by 16": [1, 2, 4, *range(8, 257, 8), *range(272, 513, 16)],
    "1..8192, doubling": [2**i for i in range(14)],
}
STRONG_HIDDEN = {"strong": 1, "one level weak": 0, "nested weak": 0, "dropped (floor)": 0}
STRONG_AUX = {"strong": 1, "one level weak": 1, "nested weak": 0, "dropped (floor)": 0}

Case = tuple[str, list[int], int, int, str]  # list's name, sizes, num_aux, hidden, order


def cases(quick: bool) -> Iterator[Case]:
    """Every list, num_aux and order at hidden 4096; every num_aux of the first list, and the longest, at the others."""
    if not CUDA:
        sizes = [1, 2, 4] if quick else [1, 2, 4, *range(8, 65, 8)]
        for num_aux in range(6):
            yield f"{sizes[0]}..{sizes[-1]}", sizes, num_aux, 32 if quick else 256, "largest first"
        return
    lists = {"1, 2": [1, 2]} if quick else LISTS
    first, last = next(iter(lists)), list(lists)[-1]
    for name, sizes in lists.items():
        for order in ("largest first", "smallest first"):
            for hidden in (2048, 4096, 8192):
                for num_aux in range(6):
                    chosen = order == "largest first" and (name == first or (name == last and num_aux == 3))
                    if hidden == 4096 or chosen:
                        yield name, sizes, num_aux, hidden, order


def hidden_of(case: Case) -> int:
    return case[3]


def expected_bytes(way: str, sizes: list[int], num_aux: int, hidden: int, itemsize: int) -> int:
    """What the outputs that are kept strong add up to."""
    return (STRONG_HIDDEN[way] + num_aux * STRONG_AUX[way]) * sum(sizes) * hidden * itemsize


def on_gpu(model: _demo.Decoder, x: torch.Tensor, sizes: list[int], way: str, stream: Any) -> dict[str, float]:
    """MiB of the pool after all captures: in all, in blocks that outputs pin, and what of those was asked for."""
    with _demo.fresh_pool() as pool:
        kept = _demo.capture_all(model, x, sizes, way, pool, stream)
        segments = _demo.segments_of(pool)
        del kept
    blocks = [block for segment in segments for block in segment["blocks"] if block["state"] != "inactive"]
    return dict(
        pool_mib=sum(segment["total_size"] for segment in segments) / MIB,
        pinned_mib=sum(block["size"] for block in blocks) / MIB,
        requested_mib=sum(block["requested_size"] for block in blocks) / MIB,
    )


def on_cpu(model: _demo.Decoder, x: torch.Tensor, sizes: list[int], way: str, _stream: Any) -> dict[str, float]:
    row = _demo.on_cpu(model, x, sizes, way)
    return dict(pool_mib=row.pool_mib, pinned_mib=row.pinned_mib, requested_mib=row.pinned_mib)


@torch.inference_mode()
def measure(quick: bool) -> dict[str, Any]:
    device, dtype = ("cuda", torch.bfloat16) if CUDA else ("cpu", torch.float32)
    run = on_gpu if CUDA else on_cpu
    rows: list[dict[str, Any]] = []
    gc.freeze()  # every pool is taken down with a collection
    for hidden, group in itertools.groupby(sorted(cases(quick), key=hidden_of), hidden_of):
        batch = list(group)
        with torch.device(device):
            model = _demo.Decoder(hidden, layers=5).to(dtype)
            x = torch.randn(max(max(sizes) for _, sizes, *_ in batch), hidden, dtype=dtype)
        stream = _demo.warm_stream(model, x) if CUDA else None
        for (name, sizes, num_aux, _, order), way in itertools.product(batch, _demo.WAYS):
            model.num_aux = num_aux
            got = run(model, x, sorted(sizes, reverse=order == "largest first"), way, stream)
            expected = expected_bytes(way, sizes, num_aux, hidden, dtype.itemsize) / MIB
            rows.append(
                dict(
                    sizes=name,
                    order=order,
                    hidden=hidden,
                    num_aux=num_aux,
                    way=way,
                    pool_mib=got["pool_mib"],
                    expected_mib=expected,
                    rounding_mib=got["pinned_mib"] - got["requested_mib"],
                    free_mib=got["pool_mib"] - got["pinned_mib"],
                    unexplained_mib=got["requested_mib"] - expected,
                )
            )
    gc.unfreeze()
    for four in range(0, len(rows), len(_demo.WAYS)):
        floor = rows[four + list(_demo.WAYS).index("dropped (floor)")]["pool_mib"]
        for row in rows[four : four + len(_demo.WAYS)]:
            row["above_floor_mib"] = row["pool_mib"] - floor
    nested = max(row["above_floor_mib"] for row in rows if row["way"] == "nested weak")
    unexplained = max(abs(row["unexplained_mib"]) for row in rows)
    return dict(
        notes=__doc__.split("\n\n")[-1].strip(),
        bytes_per_element=dtype.itemsize,
        rows=rows,
        claims=[
            claim("nested weak refs, MiB above the floor in the worst row", nested, most=_demo.TOLERANCE_MIB),
            claim("requested bytes beyond the arithmetic, MiB in the worst row", unexplained, most=0),
        ],
    )


def report(result: dict[str, Any]) -> str:
    return str(result["notes"]) + "\n" + grid(result["rows"])


if __name__ == "__main__":
    from ._harness import main

    sys.exit(main("memory", *sys.argv[1:]))
