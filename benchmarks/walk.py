"""How long is one call? Ours and the peers' over the structures that engines capture, by depth and by width.

``python -m benchmarks.walk``. Peers' functions are the released ones where they are at hand (`peers.py`).
"""

import importlib.util
import sys
from collections.abc import Callable
from typing import Any

import torch

import weakref_ext

from . import peers
from ._harness import CUDA, DEVICE, Summary, claim, compare, effort, ratio, samples, summary, table

NEEDS_GPU = False
OP = torch.ops.weakref_ext.weak_ref_tensors
# "inference mode" is how engines call it. In grad mode the peers' aliases of tensors that require grad are not weak.
MODES = {"inference mode": torch.inference_mode, "grad mode": torch.enable_grad}
DEPTHS = (1, 10, 100, 500)
WIDTHS = (1, 4, 16, 64, 256, 1000, 10_000, 100_000)

ENTRY, OURS = "weakref_ext: Python entry", "weakref_ext: op"
VLLM, TE = "vLLM way (recursion over an op)", "TensorRT-LLM and TE way"
FLOOR = "floor (three objects a tensor)"
MAIN = "(2:T,[3:T])"  # hidden states and three aux hidden states, as EAGLE3 targets return


def tensor() -> torch.Tensor:
    return torch.randn(16, 64, device=DEVICE)


def structures() -> dict[str, Any]:
    """By signature: what engines return."""
    t = tensor
    made = (
        t(),
        [t() for _ in range(6)],
        tuple(t() for _ in range(6)),
        {f"layer {i}": t() for i in range(6)},
        (t(), [t() for _ in range(3)]),
        [*(t() for _ in range(5)), 3],
    )
    return {weakref_ext.describe(out): out for out in made}


def nested(depth: int) -> Any:
    """One tensor inside `depth` lists."""
    out: Any = tensor()
    for _ in range(depth):
        out = [out]
    return out


def contenders(out: Any) -> dict[str, Callable[[], object]]:
    """Name -> call of everything that can take `out` on this machine.

    Nothing but `out` holds its tensors or their storages, as a capture's output is held: what needs a reference gets
    clones, and nobody asks for a storage (its Python object would stay, and make the walk look for sharing).
    """
    leaves = torch.utils._pytree.tree_leaves(out)
    flat = [leaf.clone() for leaf in leaves if isinstance(leaf, torch.Tensor)]
    tensors_only = len(flat) == len(leaves)
    del leaves
    floor_of, vllm_way = peers.baseline().floor_of, peers.vllm_recursion()
    detach = peers.recursion(torch.Tensor.detach)  # not weak at all: what one dispatched call a tensor costs
    calls = {
        ENTRY: lambda: weakref_ext.weak_ref_tensors(out),
        OURS: lambda: OP(out),
        "weakref_ext: op.default": lambda: OP.default(out),
        VLLM: lambda: vllm_way(out),
        "pytree over an op": lambda: peers.pytree_map(out),
        "detach() recursion (not weak)": lambda: detach(out),
        FLOOR: lambda: floor_of(flat),
    }
    if tensors_only:  # a list of tensors and ints has no IValue type
        calls["weakref_ext: op.ivalue from Python"] = lambda: OP.ivalue(out)
        calls["weakref_ext: op.ivalue from C++"] = peers.baseline().OpLoop(
            torch.utils._pytree.tree_map(torch.clone, out)
        )
    level = out if isinstance(out, list | tuple) else [out]
    if all(isinstance(element, torch.Tensor) for element in level):
        sglang, _ = peers.sglang()
        calls["SGLang way (one level)"] = lambda: sglang(out)
    if CUDA:
        make_weak_ref, _ = peers.transformer_engine()
        calls[TE] = lambda: make_weak_ref(out)
    if importlib.util.find_spec("optree"):
        calls["optree over an op"] = lambda: peers.optree_map(out)
    return calls


def by_width(widths: tuple[int, ...], options: dict[str, Any]) -> dict[str, dict[int, Summary]]:
    """Nanoseconds a tensor for flat lists, by contender."""
    rows: dict[str, dict[int, Summary]] = {name: {} for name in (ENTRY, OURS, VLLM, FLOOR)}
    for width in widths:
        calls = contenders([tensor() for _ in range(width)])
        for name, row in compare({name: calls[name] for name in rows}, **options).items():
            rows[name][width] = {key: round(value / width, 3) for key, value in row.items()}
    return rows


Samples = dict[str, list[float]]  # contender -> ns a call, by round

FASTER = ((OURS, VLLM), (ENTRY, VLLM), (ENTRY, OURS), (OURS, TE), (ENTRY, TE), (ENTRY, FLOOR))


def claims(faster: dict[str, dict[str, dict[str, Summary]]]) -> list[dict[str, Any]]:
    made = []
    for mode, by_structure in faster.items():
        figures = {name: row["median"] for name, row in by_structure[MAIN].items()}
        here = f"in {mode}, {MAIN}"
        made.append(claim(f"{here}: the op, times faster than the vLLM way", figures[f"{OURS} / {VLLM}"], least=5))
        entry = figures[f"{ENTRY} / {VLLM}"]
        made.append(claim(f"{here}: the Python entry, times faster than the vLLM way", entry, least=13))
        made.append(claim(f"{here}: the Python entry over the floor", 1 / figures[f"{ENTRY} / {FLOOR}"], most=1.3))
        if CUDA:
            made.append(claim(f"{here}: the op, times faster than the TE way", figures[f"{OURS} / {TE}"], least=10))
        entry = by_structure["{6:T}"][f"{ENTRY} / {VLLM}"]["median"]
        made.append(claim(f"in {mode}, {{6:T}}: the Python entry, times faster than the vLLM way", entry, least=8))
    return made


def measure(quick: bool) -> dict[str, Any]:
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(20_000)  # for the peers' recursion at depth 500
    depths, widths = ((1, 100), (1, 10)) if quick else (DEPTHS, WIDTHS)
    try:
        taken: dict[str, dict[str, Samples]] = {}
        for mode, context in MODES.items():
            with context():
                taken[mode] = {name: samples(contenders(out), **effort(quick)) for name, out in structures().items()}
        with torch.inference_mode():
            depth = {levels: compare(contenders(nested(levels)), **effort(quick)) for levels in depths}
            width = by_width(widths, effort(quick) if quick else dict(rounds=9, round_s=0.01))
    finally:
        sys.setrecursionlimit(limit)
    faster = {
        mode: {
            name: {f"{a} / {b}": ratio(rows[b], rows[a]) for a, b in FASTER if b in rows}
            for name, rows in by_structure.items()
        }
        for mode, by_structure in taken.items()
    }
    return dict(
        peers=peers.sources(),
        structures={
            mode: {name: {c: summary(values) for c, values in rows.items()} for name, rows in by_structure.items()}
            for mode, by_structure in taken.items()
        },
        times_faster=faster,
        by_depth=depth,
        ns_per_tensor_by_width=width,
        claims=claims(faster),
    )


def report(result: dict[str, Any]) -> str:
    parts = [
        table(f"{name} on {DEVICE}, {mode}", rows, reference=ENTRY)
        for mode, by_structure in result["structures"].items()
        for name, rows in by_structure.items()
    ]
    parts += [table(f"depth {depth}", rows, reference=ENTRY) for depth, rows in result["by_depth"].items()]
    for name, rows in result["ns_per_tensor_by_width"].items():
        parts.append(f"ns a tensor by width, {name}: " + ", ".join(f"{w}: {r['median']:.0f}" for w, r in rows.items()))
    return "\n".join(parts)


if __name__ == "__main__":
    from ._harness import main

    sys.exit(main("walk", *sys.argv[1:]))
