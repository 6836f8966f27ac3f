"""SGLang: a drop-in for ``weak_ref_tensors``.

Leaves as in SGLang: at the top only tensors and what holds tensors. Inside, where SGLang's operator refuses whatever is
no tensor, nested containers, numbers, strings and None are fine, and other objects raise.
"""

import logging
import sys
from typing import Any

import torch

from ._contract import SCALARS, Contract, Pool, holds_fields
from ._patch import Patch

log = logging.getLogger("sglang.weakref_ext")

CONTRACT = Contract("SGLang", SCALARS, False, ValueError, log)

_FOLDER = "sglang.srt.model_executor.runner_backend_utils"


def breakable_pool() -> Pool | None:
    """The pool that the segments of the breakable capture under way share; None without one."""
    module = sys.modules.get(f"{_FOLDER}.breakable_cuda_graph.breakable_cuda_graph")
    capture = module._current_capture_var.get() if module is not None else None
    return None if capture is None or capture._pool == (0, 0) else capture._pool


def weak_ref_tensors(tensors: Any) -> Any:
    """Return the structure with its tensors weak, to any depth.

    In a breakable capture, where SGLang calls it for each argument of an eager break, a tensor that the graph pool does
    not own stays strong.

    Raises:
        ValueError: for None and other objects without tensors at the top, as SGLang does; for an object inside that is
            no tensor, container or scalar; for tensors that cannot be aliased.
    """
    if not isinstance(tensors, (torch.Tensor, list, tuple, dict)) and not holds_fields(tensors):
        raise ValueError(f"Invalid type for tensors: {type(tensors)} at out")
    return CONTRACT.weaken(tensors, breakable_pool())


_patch = Patch("SGLang", f"{_FOLDER}.weak_ref_tensor", log, weak_ref_tensors)


def install() -> bool:
    """Replace SGLang's function where it is defined and wherever it was imported; by the rules of the vLLM one."""
    return _patch.install()


def uninstall() -> bool:
    """Put SGLang's own function back; return whether there was anything to undo."""
    return _patch.uninstall()
