"""What the engines' released weak ref functions return today, and what they return with the integrations.

usage: python -m benchmarks.peer_faults     writes docs/peer_faults.md and benchmarks/results/peer_faults.json

Needs scripts/fetch_peers.py. With a GPU the tensors are CUDA tensors; without one they are meta tensors, which have
shapes, strides and storages but no values, and Transformer Engine's rows about tensors are left out: it returns any but
CUDA tensors unchanged. The engines' per-tensor operators are real where their libraries are loaded, else
`from_blob` of tests/engines.py: the table says which.
"""

import collections
import dataclasses
import importlib
import json
import platform
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from weakref_ext import integrations

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))
import engines  # noqa: E402

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "meta"
Pair = collections.namedtuple("Pair", "hidden aux")


@dataclasses.dataclass
class Output:
    hidden: torch.Tensor
    aux: list[torch.Tensor]


def new(*shape: int, **options: Any) -> torch.Tensor:
    return torch.empty(*shape, device=DEVICE, **options)


def leaves(value: object) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    elif dataclasses.is_dataclass(value):
        value = [getattr(value, field.name) for field in dataclasses.fields(value)]
    return [leaf for part in value for leaf in leaves(part)] if isinstance(value, (list, tuple)) else []


def kept(function: Callable[[Any], Any], make: Callable[[], Any]) -> str:
    """How many of the input's storages outlive the input because of what the function returned."""
    source = make()
    storages = {storage._cdata: storage for storage in (leaf.untyped_storage() for leaf in leaves(source))}
    sizes = [storage.nbytes() for storage in storages.values()]
    watched = [StorageWeakRef(storage) for storage in storages.values()]
    out = function(source)
    del source, storages
    alive = [size for size, storage in zip(sizes, watched, strict=True) if not storage.expired()]
    del out
    if not alive:
        return "nothing pinned"
    return f"pins {len(alive)} of {len(watched)} storages, {sum(alive):,} bytes"


def kind(function: Callable[[Any], Any], make: Callable[[], Any]) -> str:
    return type(function(make())).__name__


def layout(function: Callable[[Any], Any], make: Callable[[], Any]) -> str:
    out = function(make())
    return f"strides {out.stride()}, offset {out.storage_offset()}, storage of {out.untyped_storage().nbytes()} bytes"


def sharing(function: Callable[[Any], Any], make: Callable[[], Any]) -> str:
    a, b = (tensor.untyped_storage()._cdata for tensor in leaves(function(make())))
    return "one storage" if a == b else "two storages"


def lazy_bits(function: Callable[[Any], Any], make: Callable[[], Any]) -> str:
    return f"is_conj() is {function(make()).is_conj()}"


def grad(function: Callable[[Any], Any], make: Callable[[], Any]) -> str:
    return f"requires_grad is {function(make()).requires_grad}"


def values(function: Callable[[Any], Any], make: Callable[[], Any]) -> str:
    source = make()
    return "equal values" if torch.equal(function(source), source) else "wrong values"


def dtype(function: Callable[[Any], Any], make: Callable[[], Any]) -> str:
    return str(function(make()).dtype)


Row = tuple[str, Callable[[], Any], Callable[..., str]]
HIDDEN = (8192, 4096)


def hidden() -> torch.Tensor:
    return new(*HIDDEN, dtype=torch.bfloat16)


def one_level(engine: str) -> list[Row]:
    intermediate = getattr(sys.modules.get("vllm.sequence"), "IntermediateTensors", None)
    return [
        ("`(hidden, [aux x 3])`, bf16 8192 x 4096", lambda: (hidden(), [hidden() for _ in range(3)]), kept),
        ("`[hidden, (k, v)]`", lambda: [new(4), (new(4), new(4))], kept),
        ("`(hidden, {'aux': t})`", lambda: (new(4), {"aux": new(4)}), kept),
        ("`(hidden, None)`", lambda: (new(4), None), kept),
        ("`{'hidden': t}`", lambda: {"hidden": new(4)}, kept),
        ("namedtuple `Pair(t, t)`", lambda: Pair(new(4), new(4)), kind),
        ("dataclass `Output(t, [t])`", lambda: Output(new(4), [new(4)]), kept),
        ("`(x, x[2:])`, one storage", lambda: (lambda x: (x, x[2:]))(new(8)), sharing),
        ("`x[2:]` of 8 float32", lambda: new(8)[2:], layout),
        ("`big[3:3]`, an empty view of 4 MiB", lambda: new(1 << 20)[3:3], kept),
        ("complex `x.conj()`", lambda: new(4, dtype=torch.complex64).conj(), lazy_bits),
        ("a leaf that requires grad, grad mode on", lambda: new(4, requires_grad=True), grad),
        ("the same", lambda: new(4, requires_grad=True), kept),
        *(
            [
                ("`(IntermediateTensors({'h': t}), t)`", lambda: (intermediate({"h": new(4)}), new(4)), kept),
                ("`IntermediateTensors({'aux': [t, t]})`", lambda: intermediate({"aux": [new(4), new(4)]}), kept),
            ]
            if engine == "vLLM"
            else []
        ),
    ]


def transformer_engine_rows() -> list[Row]:
    rows: list[Row] = [
        ("namedtuple `Pair(1, None)`", lambda: Pair(1, None), kind),
        ("`OrderedDict(k=1)`", lambda: collections.OrderedDict(k=1), kind),
        ("dataclass `Output(t, [t])`", lambda: Output(new(4), [new(4)]), kept),
    ]
    if not CUDA:  # the function returns any other tensor unchanged
        return rows
    return [
        *rows,
        ("`x.t()`, 4 x 6 float32", lambda: torch.arange(24.0, device="cuda").view(4, 6).t(), values),
        ("the same", lambda: new(4, 6).t(), layout),
        *((f"{name} tensor", lambda name=name: new(4, dtype=getattr(torch, name)), dtype) for name in
          ("float64", "uint8", "complex64", "float8_e5m2")),
    ]  # fmt: skip


Engine = tuple[str, str, Callable[[], tuple[Any, str]], Callable[[], list[Row]]]


def vllm() -> tuple[Any, str]:
    module = engines.vllm(engines.VLLM[0])
    importlib.import_module("vllm.sequence")
    return module, "stand-in operator" if hasattr(engines.vllm, "library") else "its own operator"


def sglang() -> tuple[Any, str]:
    return engines.sglang().weak_ref_tensor, "stand-in operator"


def transformer_engine() -> tuple[Any, str]:
    return engines.transformer_engine(), "nothing stood in"


ENGINES: list[Engine] = [
    ("vLLM", "weak_ref_tensors", vllm, lambda: one_level("vLLM")),
    ("SGLang", "weak_ref_tensors", sglang, lambda: one_level("SGLang")),
    ("Transformer Engine", "make_weak_ref", transformer_engine, transformer_engine_rows),
]


def outcome(function: Callable[[Any], Any], make: Callable[[], Any], probe: Callable[..., str]) -> str:
    try:
        return probe(function, make)
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0][:90]}"


def run() -> list[dict[str, str]]:
    faults = []
    for (
        engine,
        name,
        load,
        rows,
    ) in ENGINES:
        module, operator = load()
        version = sys.modules[module.__name__.partition(".")[0]].__version__
        integration = getattr(integrations, engine.lower().replace(" ", "_"))
        today = [outcome(getattr(module, name), make, probe) for _, make, probe in rows()]
        if not integration.install():
            raise SystemExit(f"{engine}: the integration did not install")
        fixed = [outcome(getattr(module, name), make, probe) for _, make, probe in rows()]
        integration.uninstall()
        fault = {"function": f"{engine} {version} `{name}`", "how": f"{DEVICE}, {operator}"}
        for (text, _, _), before, after in zip(rows(), today, fixed, strict=True):
            if before != after:
                faults.append(fault | {"input": text, "today": before, "with": after})
    return faults


def main() -> None:
    faults = run()
    machine = dict(torch=torch.__version__, python=platform.python_version(), device=DEVICE)
    machine["gpu"] = torch.cuda.get_device_name() if CUDA else None
    result = json.dumps(dict(machine=machine, faults=faults), indent=1, ensure_ascii=False)
    (ROOT / "benchmarks/results").mkdir(exist_ok=True)
    (ROOT / f"benchmarks/results/peer_faults{'_cuda' if CUDA else ''}.json").write_text(result + "\n")
    cells = [["released function", "run on", "input", "today", "with the integration"]]
    cells += [list(fault.values()) for fault in faults]
    lines = ["| " + " | ".join(row) + " |" for row in cells]
    lines.insert(1, "|---" * len(cells[0]) + "|")
    text = "\n".join(
        [
            "# Faults of the engines' own functions that the integrations repair",
            "",
            f"Written by `python -m benchmarks.peer_faults` on torch {machine['torch']}, {machine['gpu'] or 'no GPU'}:"
            f" {len(faults)} inputs for which the two differ. The released Python is unchanged; where an engine's"
            " compiled operator is not loaded, one stands in that builds a tensor from pointer, sizes and strides,"
            " as it does.",
            "Meta tensors stand for device tensors on a machine without a GPU.",
            "",
            *lines,
            "",
        ]
    )
    (ROOT / f"docs/peer_faults{'_cuda' if CUDA else ''}.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
