"""Transformer Engine: a drop-in for ``make_weak_ref``, and with it for Megatron-LM, which imports that function.

Leaves as in Transformer Engine: None, int, float and bool; TypeError for the rest.
"""

import logging
from typing import Any

from ._contract import Contract
from ._patch import Patch

log = logging.getLogger("weakref_ext.transformer_engine")

CONTRACT = Contract("Transformer Engine", (type(None), float), False, TypeError, log)


def make_weak_ref(x: Any) -> Any:
    """Return the structure with its device tensors weak, and their strides, dtypes and offsets kept.

    Raises:
        TypeError: for a leaf that is no tensor, int, float, bool or None, and for tensors that cannot be aliased.
    """
    return CONTRACT.weaken(x)


_patch = Patch("Transformer Engine", "transformer_engine.pytorch.utils", log, make_weak_ref)


def install() -> bool:
    """Replace the function where it is defined and wherever it was imported; by the rules of the vLLM one.

    Call it after or before importing Megatron-LM: its ``make_weakref`` calls the function through its own globals.
    """
    return _patch.install()


def uninstall() -> bool:
    """Put the original back, also in Megatron-LM; return whether there was anything to undo."""
    return _patch.uninstall()
