"""How others make non-owning tensors, restated: each engine's walk over its per-tensor way, without the engine."""

import os
import sys
import time
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch.utils import cpp_extension


@cache
def baseline() -> Any:
    """The compiled part: torch.ops.weakref_bench.per_tensor, floor_of and OpLoop."""
    start = time.perf_counter()
    scripts = str(Path(sys.executable).parent)  # where pip puts ninja, on PATH only in an activated environment
    os.environ["PATH"] = os.pathsep.join([scripts, os.environ.get("PATH", "")])
    native = cpp_extension.load("weakref_bench", [str(Path(__file__).parent / "baseline.cpp")], extra_cflags=["-O3"])
    print(f"baseline.cpp built, or loaded, in {time.perf_counter() - start:.1f} s", flush=True)
    return native


def vllm_recursion(out: Any) -> Any:
    """vLLM's per-tensor op under the plain recursion that would repair its one level."""
    if isinstance(out, torch.Tensor):
        return torch.ops.weakref_bench.per_tensor(out) if out.numel() > 0 else out
    if isinstance(out, list | tuple):
        return type(out)([vllm_recursion(element) for element in out])
    if isinstance(out, dict):
        return {key: vllm_recursion(value) for key, value in out.items()}
    return out


def sglang_one_level(out: Any) -> Any:
    """SGLang's: the per-tensor op for a tensor or each element of a list or tuple; raises for all else inside."""
    op = torch.ops.weakref_bench.per_tensor
    if isinstance(out, torch.Tensor):
        return op(out)
    if isinstance(out, list):
        return [op(element) for element in out]
    if isinstance(out, tuple):
        return tuple(op(element) for element in out)
    raise ValueError("Invalid type for tensors")


TYPE_STRINGS = {torch.float32: "<f4", torch.float16: "<f2", torch.bfloat16: "<f2", torch.int64: "<i8"}


class _CudaArray:
    """A tensor known by address, type string and shape alone, as TensorRT-LLM and Transformer Engine describe one."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.__cuda_array_interface__ = dict(
            data=(tensor.data_ptr(), False), typestr=TYPE_STRINGS[tensor.dtype], shape=tuple(tensor.shape), version=3
        )
        self.dtype = tensor.dtype


def transformer_engine_recursion(out: Any) -> Any:
    """CUDA tensors only: through __cuda_array_interface__, strides lost."""
    if isinstance(out, torch.Tensor):
        array = _CudaArray(out)
        return torch.as_tensor(array, device="cuda").view(array.dtype)
    if isinstance(out, list | tuple):
        return type(out)([transformer_engine_recursion(element) for element in out])
    if isinstance(out, dict):
        return {key: transformer_engine_recursion(value) for key, value in out.items()}
    return out


def pytree_map(out: Any) -> Any:
    """torch's pytree over the per-tensor op."""
    op = torch.ops.weakref_bench.per_tensor
    return torch.utils._pytree.tree_map_only(torch.Tensor, op, out)


def detach_recursion(out: Any) -> Any:
    """Not weak at all: what one dispatched call a tensor costs, as a yardstick."""
    if isinstance(out, torch.Tensor):
        return out.detach()
    if isinstance(out, list | tuple):
        return type(out)([detach_recursion(element) for element in out])
    if isinstance(out, dict):
        return {key: detach_recursion(value) for key, value in out.items()}
    return out


def optree_map(out: Any) -> Any:
    """optree's C++ walk over the per-tensor op."""
    import optree

    op = torch.ops.weakref_bench.per_tensor
    return optree.tree_map(lambda leaf: op(leaf) if isinstance(leaf, torch.Tensor) else leaf, out)
