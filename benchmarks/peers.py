"""How others make non-owning tensors: the engines' released functions where they are at hand, else restated.

vLLM's needs an installed vLLM, with its operator; Transformer Engine's and SGLang's their Python in .peers/
(scripts/fetch_peers.py). SGLang's operator is restated in any case, TensorRT-LLM's way is Transformer Engine's.
"""

import fcntl
import importlib.util
import os
import sys
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch.utils import cpp_extension

ROOT = Path(__file__).parents[1]
Function = Callable[[Any], Any]


@cache
def baseline() -> Any:
    """The compiled part: torch.ops.weakref_bench.per_tensor, floor_of and OpLoop."""
    start = time.perf_counter()
    scripts = str(Path(sys.executable).parent)  # where pip puts ninja, on PATH only in an activated environment
    os.environ["PATH"] = os.pathsep.join([scripts, os.environ.get("PATH", "")])
    folder = ROOT / "build" / f"benchmarks-{torch.__version__}-{sys.implementation.cache_tag}"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "in use").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        (folder / "lock").unlink(missing_ok=True)  # torch's own, which a killed build leaves, to be waited for for ever
        native = cpp_extension.load(
            "weakref_bench",
            [str(Path(__file__).parent / "baseline.cpp")],
            extra_cflags=["-O3"],
            build_directory=str(folder),
        )
    print(f"baseline.cpp built, or loaded, in {time.perf_counter() - start:.1f} s", flush=True)
    return native


def recursion(leaf: Function) -> Function:
    """The plain walk in Python that calls `leaf` for every tensor."""

    def walk(out: Any) -> Any:
        if isinstance(out, torch.Tensor):
            return leaf(out)
        if isinstance(out, list | tuple):
            return type(out)([walk(element) for element in out])
        if isinstance(out, dict):
            return {key: walk(value) for key, value in out.items()}
        return out

    return walk


@cache
def _engines() -> ModuleType:
    sys.path.insert(0, str(ROOT / "tests"))
    return importlib.import_module("engines")


@cache
def vllm() -> tuple[Function, str]:
    """vLLM's function for one tensor, and where it is from."""
    if torch.cuda.is_available() and importlib.util.find_spec("vllm"):
        engines = _engines()
        module = engines.vllm(engines.VLLM[0])
        if not hasattr(engines.vllm, "library"):  # no operator had to stand in
            return module.weak_ref_tensor, f"vLLM {sys.modules['vllm'].__version__}"

    def weak_ref_tensor(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.numel() > 0:
            return torch.ops.weakref_bench.per_tensor(value)
        return value

    return weak_ref_tensor, "restated"


@cache
def sglang() -> tuple[Function, str]:
    """SGLang's weak_ref_tensors, of one level."""
    op, engines = torch.ops.weakref_bench.per_tensor, _engines()
    if (engines.FOLDER / engines.SGLANG).exists():
        module = engines.sglang().weak_ref_tensor
        module.weak_ref_tensor = op
        return module.weak_ref_tensors, f"{engines.SGLANG}, its operator restated"

    def weak_ref_tensors(out: Any) -> Any:
        if isinstance(out, torch.Tensor):
            return op(out)
        if isinstance(out, list):
            return [op(element) for element in out]
        if isinstance(out, tuple):
            return tuple(op(element) for element in out)
        raise ValueError("Invalid type for tensors")

    return weak_ref_tensors, "restated"


@cache
def transformer_engine() -> tuple[Function, str]:
    """Transformer Engine's make_weak_ref: CUDA tensors only, through __cuda_array_interface__, strides lost."""
    engines = _engines()
    if (engines.FOLDER / engines.TRANSFORMER_ENGINE).exists():
        return engines.transformer_engine().make_weak_ref, engines.TRANSFORMER_ENGINE
    return recursion(_through_cuda_array), "restated"


def sources() -> dict[str, str]:
    """Where each peer's function is from: for the results."""
    return dict(vllm=vllm()[1], sglang=sglang()[1], transformer_engine=transformer_engine()[1])


def vllm_recursion() -> Function:
    """The recursion over vLLM's function for one tensor, which would repair its one level."""
    return recursion(vllm()[0])


TYPE_STRINGS = {torch.float32: "<f4", torch.float16: "<f2", torch.bfloat16: "<f2", torch.int64: "<i8"}


class _CudaArray:
    """A tensor known by address, type string and shape alone, as TensorRT-LLM and Transformer Engine describe one."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.__cuda_array_interface__ = dict(
            data=(tensor.data_ptr(), False), typestr=TYPE_STRINGS[tensor.dtype], shape=tuple(tensor.shape), version=3
        )
        self.dtype = tensor.dtype


def _through_cuda_array(tensor: torch.Tensor) -> torch.Tensor:
    array = _CudaArray(tensor)
    return torch.as_tensor(array, device="cuda").view(array.dtype)


def pytree_map(out: Any) -> Any:
    """torch's pytree over the per-tensor op."""
    op = torch.ops.weakref_bench.per_tensor
    return torch.utils._pytree.tree_map_only(torch.Tensor, op, out)


def optree_map(out: Any) -> Any:
    """optree's C++ walk over the per-tensor op."""
    import optree

    op = torch.ops.weakref_bench.per_tensor
    return optree.tree_map(lambda leaf: op(leaf) if isinstance(leaf, torch.Tensor) else leaf, out)
