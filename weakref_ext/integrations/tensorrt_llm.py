"""TensorRT-LLM: a drop-in for ``make_weak_ref``.

Leaves as in TensorRT-LLM: int, float and bool, and None, which older versions refuse; TypeError for the rest,
unless the caller asks to preserve it.
"""

import dataclasses
import logging
from typing import Any

from ._contract import Contract
from ._patch import Patch

log = logging.getLogger("weakref_ext.tensorrt_llm")

CONTRACT = Contract("TensorRT-LLM", (type(None), float), False, TypeError, log)
PRESERVING = dataclasses.replace(CONTRACT, keep_foreign=True)


def make_weak_ref(x: Any, preserve_unsupported: bool = False) -> Any:
    """Return the structure with its device tensors weak, and their strides, dtypes and offsets kept.

    Raises:
        TypeError: for a leaf that is no tensor, int, float, bool or None, unless ``preserve_unsupported``; for tensors
            that cannot be aliased.
    """
    return (PRESERVING if preserve_unsupported else CONTRACT).weaken(x)


_patch = Patch("TensorRT-LLM", "tensorrt_llm._torch.utils", log, make_weak_ref)


def install() -> bool:
    """Replace the function where it is defined and wherever it was imported; by the rules of the vLLM one."""
    return _patch.install()


def uninstall() -> bool:
    """Put the original back; return whether there was anything to undo."""
    return _patch.uninstall()
