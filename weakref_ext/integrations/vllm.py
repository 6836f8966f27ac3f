"""vLLM: drop-ins for ``weak_ref_tensor`` and ``weak_ref_tensors`` of ``vllm.utils.torch_utils``.

vLLM itself calls :func:`install` in each of its processes, through the entry point group ``vllm.general_plugins``.
Leaves as in vLLM: at the top of a structure only tensors and what holds tensors, inside it anything passes.
"""

import logging
import sys
import threading
from typing import Any

import torch

from ._contract import SCALARS, Contract, Pool, holds_fields
from ._patch import Patch

# Below "vllm", whose handler and level vLLM sets up: a logger outside of it prints nothing in an engine process.
log = logging.getLogger("vllm.weakref_ext")

CONTRACT = Contract("vLLM", SCALARS, True, ValueError, log)

# Per thread: what weak_ref_tensors returned inside the breakable capture that is not yet over.
_inside = threading.local()


def breakable_capture() -> Any | None:
    """The breakable capture that this thread is in the middle of."""
    module = sys.modules.get("vllm.compilation.breakable_cudagraph")
    return module.BreakableCUDAGraphCapture.current() if module is not None else None


def weak_ref_tensor(tensor: Any) -> Any:
    """Return ``tensor`` as a weak ref, a list or tuple with its tensors weak, and anything else as the same object.

    vLLM calls it for each argument of an eager break. The capture's graph pool keeps no memory but its own, so an
    argument from elsewhere stays strong. Dicts and objects keep their identity: metadata that is read on replay.
    """
    if not isinstance(tensor, (torch.Tensor, list, tuple)):
        return tensor
    capture = breakable_capture()
    pool: Pool | None = None if capture is None else capture.pool
    return CONTRACT.weaken(tensor, pool)


def weak_ref_tensors(tensors: Any) -> Any:
    """Return the structure of a capture's output with its tensors weak, to any depth.

    In a breakable capture what the graph pool does not own, such as an eager break's own result, stays strong.

    Raises:
        ValueError: for None and other objects without tensors at the top, as vLLM does, and for tensors that cannot be
            aliased.
    """
    _patch.announce()
    # The wrapper passes the result of its call inside the capture once more, after it: all that may be weak is weak.
    if tensors is getattr(_inside, "result", _inside):
        del _inside.result
        return tensors
    if not isinstance(tensors, (torch.Tensor, list, tuple, dict)) and not holds_fields(tensors):
        raise ValueError(f"Invalid type for tensors: {type(tensors)} at out")
    capture = breakable_capture()
    if capture is None:
        return CONTRACT.weaken(tensors)
    _inside.result = CONTRACT.weaken(tensors, capture.pool)
    return _inside.result


_patch = Patch("vLLM", "vllm.utils.torch_utils", log, weak_ref_tensor, weak_ref_tensors)


def install() -> bool:
    """Replace vLLM's two functions, in ``vllm.utils.torch_utils`` and wherever they were imported before.

    Safe to call again. Logs one line with vLLM's version and the places; where vLLM sets up its logging later, at the
    first capture. An unknown vLLM is left as it is, with one warning; without vLLM, or with ``WEAKREF_EXT_DISABLE=1``,
    nothing happens.

    Returns:
        Whether the drop-ins are in place.
    """
    return _patch.install()


def uninstall() -> bool:
    """Put vLLM's own functions back, also in modules that loaded since; return whether there was anything to undo."""
    return _patch.uninstall()
