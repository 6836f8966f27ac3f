"""The engines' released Python, from .peers/ (scripts/fetch_peers.py), on machines where they do not import whole.

The modules that hold the weak ref functions are the released files. Around them stand: parent packages that run no
``__init__``, stubs for what those modules import and a CPU-only machine lacks, and for the engines' CUDA operator
:func:`from_blob`, which does to a tensor what ``torch::from_blob(data, sizes, strides, options)`` does.
"""

import ast
import contextlib
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

FOLDER = Path(__file__).parents[1] / ".peers"
# of what vLLM's compilation modules import, what is rarely there already; all of it is the extra "peers"
VLLM_IMPORTS = ("cbor2", "openai", "openai_harmony", "regex", "transformers")
SGLANG, TRANSFORMER_ENGINE, MEGATRON = "sglang-0.5.23", "transformer_engine-2.20.2", "megatron_core-0.19.2"
VLLM = ["vllm-0.33.0", "vllm-0.26.0"]
PACKAGES = ("megatron", "sgl_kernel", "sglang", "tensorrt_llm", "transformer_engine")


def need(release: str, *modules: str) -> None:
    """Skip the test (with WEAKREF_EXT_REQUIRE_PEERS=1, fail it) without the release or the modules it imports."""
    absent = [module for module in modules if importlib.util.find_spec(module) is None]
    if not (FOLDER / release).exists():
        reason = f"{release} is not unpacked: run scripts/fetch_peers.py"
    elif absent:
        reason = f"{release} imports {', '.join(absent)}: pip install 'weakref_ext[peers]'"
    else:
        return
    if os.environ.get("WEAKREF_EXT_REQUIRE_PEERS") == "1":
        pytest.fail(reason)
    pytest.skip(reason)


def from_blob(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor over the same memory with a storage of its own: no offset, as long as the view, without lazy bits."""
    if tensor.device.type == "meta" or tensor.numel() == 0:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    storage = torch._C._construct_storage_from_data_pointer(
        tensor.data_ptr(), tensor.device, extent * tensor.element_size()
    )
    return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(storage, 0, tensor.shape, tensor.stride())


def parents(release: str, module: str) -> None:
    names = module.split(".")[:-1]
    for depth in range(1, len(names) + 1):
        package = ModuleType(".".join(names[:depth]))
        package.__path__ = [str(FOLDER.joinpath(release, *names[:depth]))]
        package.__version__ = release.rpartition("-")[2]
        sys.modules.setdefault(package.__name__, package)


def stub(name: str, **members: object) -> None:
    module = ModuleType(name)
    module.__path__ = []
    vars(module).update(members)
    sys.modules[name] = module


def vllm(release: str) -> ModuleType:
    """``vllm.utils.torch_utils``, which imports anywhere: an installed one with its operator, else that of .peers."""
    if importlib.util.find_spec("vllm") is None:
        sys.path.insert(0, str(FOLDER / release))
    for library in ("vllm._C", "vllm._C_stable_libtorch"):
        with contextlib.suppress(ImportError):
            importlib.import_module(library)
    if not hasattr(torch.ops._C, "weak_ref_tensor"):
        library = torch.library.Library("_C", "FRAGMENT")
        library.define("weak_ref_tensor(Tensor input) -> Tensor")
        for key in ("CUDA", "Meta"):  # registered for the backend alone, as vLLM's is
            library.impl("weak_ref_tensor", from_blob, key)
        vllm.library = library
    return importlib.import_module("vllm.utils.torch_utils")


def sglang() -> SimpleNamespace:
    """The modules ``weak_ref_tensor`` and ``breakable_cuda_graph``."""
    folder = "sglang.srt.model_executor.runner_backend_utils"
    names = [f"{folder}.weak_ref_tensor", f"{folder}.breakable_cuda_graph.breakable_cuda_graph"]
    for name in names:
        parents(SGLANG, name)
    platform = dict(is_cuda=lambda: True) | {f"is_{kind}": lambda: False for kind in ("hip", "musa", "npu", "xpu")}
    stub("sglang.srt.utils", get_device_module=lambda: torch.cuda, **platform)
    stub("sglang.srt.utils.common", **platform)
    library = torch.library.Library("sgl_kernel_stood_in", "DEF")
    library.define("weak_ref_tensor(Tensor tensor) -> Tensor")
    for key in ("CUDA", "Meta"):
        library.impl("weak_ref_tensor", from_blob, key)
    stub("sgl_kernel", weak_ref_tensor=torch.ops.sgl_kernel_stood_in.weak_ref_tensor.default, library=library)
    weak_ref_tensor, breakable = map(importlib.import_module, names)
    return SimpleNamespace(weak_ref_tensor=weak_ref_tensor, breakable=breakable)


def transformer_engine() -> ModuleType:
    """``transformer_engine.pytorch.utils``."""
    name = "transformer_engine.pytorch.utils"
    parents(TRANSFORMER_ENGINE, name)
    stub("transformer_engine.common", decode_cudnn_version=None)
    stub("transformer_engine.debug")
    stub("transformer_engine.debug.pytorch")
    stub("transformer_engine.debug.pytorch.debug_quantization", DebugQuantizedTensor=type("Debug", (), {}))
    return importlib.import_module(name)


def megatron(make_weak_ref: Callable[..., object]) -> ModuleType:
    """``megatron.core.transformer.cuda_graphs`` cut down to its ``make_weakref``: the rest needs Triton to import."""
    name = "megatron.core.transformer.cuda_graphs"
    source = FOLDER.joinpath(MEGATRON, *name.split(".")).with_suffix(".py")
    (function,) = [node for node in ast.parse(source.read_text()).body if getattr(node, "name", None) == "make_weakref"]
    stub(name, torch=torch, HAVE_TE_GRAPHS=True, make_weak_ref=make_weak_ref)
    exec(compile(ast.Module([function], []), source, "exec"), vars(sys.modules[name]))
    return sys.modules[name]
