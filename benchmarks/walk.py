"""How long is one call? Ours and the peers' over the structures that engines capture, and cost per tensor by width.

``python -m benchmarks.walk``
"""

import importlib.util
from typing import Any

import torch

import weakref_ext

from . import peers
from ._harness import compare, save, table

OP = torch.ops.weakref_ext.weak_ref_tensors
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def tensor() -> torch.Tensor:
    return torch.randn(16, 64, device=DEVICE)


def structures() -> dict[str, Any]:
    t = tensor
    return {
        "T": t(),
        "[6:T]": [t() for _ in range(6)],
        "(2:T,[3:T])": (t(), [t() for _ in range(3)]),
        "[6:T,int]": [*(t() for _ in range(5)), 3],
    }


def contenders(out: Any) -> dict[str, Any]:
    """Name -> call of everything that can take `out` on this machine."""
    flat = [leaf for leaf in torch.utils._pytree.tree_leaves(out) if isinstance(leaf, torch.Tensor)]
    floor_of = peers.baseline().floor_of
    calls = {
        "weakref_ext: Python entry": lambda: weakref_ext.weak_ref_tensors(out),
        "weakref_ext: op": lambda: OP(out),
        "weakref_ext: op.default": lambda: OP.default(out),
        "weakref_ext: op.ivalue": lambda: OP.ivalue(out),
        "vLLM way (recursion over an op)": lambda: peers.vllm_recursion(out),
        "pytree over an op": lambda: peers.pytree_map(out),
        "detach() recursion (not weak)": lambda: peers.detach_recursion(out),
        "floor (three objects a tensor)": lambda: floor_of(flat),
    }
    if DEVICE == "cuda":
        calls["Transformer Engine way"] = lambda: peers.transformer_engine_recursion(out)
    if importlib.util.find_spec("optree"):
        calls["optree over an op"] = lambda: peers.optree_map(out)
    if any(type(leaf) is int for leaf in torch.utils._pytree.tree_leaves(out)):
        del calls["weakref_ext: op.ivalue"]  # a Python list of tensors and ints has no IValue type
    return calls


def by_width(widths: tuple[int, ...] = (1, 4, 16, 64, 256, 1000, 10_000, 100_000)) -> dict[int, dict[str, float]]:
    """Nanoseconds a tensor of the Python entry, for flat lists."""
    rows = {}
    for width in widths:
        out = [tensor() for _ in range(width)]
        row = compare({"entry": lambda out=out: weakref_ext.weak_ref_tensors(out)}, rounds=9)["entry"]
        rows[width] = {key: round(value / width, 3) for key, value in row.items()}
    return rows


def main() -> None:
    with torch.inference_mode():  # as engines call it, and the peers' ops stay weak
        results = {name: compare(contenders(out)) for name, out in structures().items()}
        widths = by_width()
    for name, rows in results.items():
        print(table(f"{name} on {DEVICE}", rows, reference="weakref_ext: Python entry"))
    rows = results["(2:T,[3:T])"]
    vllm = rows["vLLM way (recursion over an op)"]["median"]
    ratios = {name: round(vllm / rows[f"weakref_ext: {name}"]["median"], 2) for name in ("op", "Python entry")}
    print(f"(2:T,[3:T]): times faster than the vLLM way: {ratios}")
    print("ns a tensor by width:", {width: row["median"] for width, row in widths.items()})
    print("wrote", save("walk", structures=results, faster_than_vllm_way=ratios, ns_per_tensor_by_width=widths))


if __name__ == "__main__":
    main()
