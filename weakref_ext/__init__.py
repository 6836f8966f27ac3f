"""Non-owning aliases of every tensor in a model's captured output, for CUDA graph wrappers.

``torch.ops.weakref_ext.weak_ref_tensors(out)`` and :func:`weak_ref_tensors` are the same walk: the first is an operator
(it breaks a compiled graph cleanly and is seen by dispatch modes and the profiler), the second a plain C function.
"""

import os as _os
from importlib.metadata import version as _version

from . import _load, _op  # noqa: F401
from ._containers import register_container, register_passthrough
from ._inspect import nbytes, own, pinned
from ._layer_name import LayerName

_C = _load.native()

weak_ref_tensors = _C.weak_ref_tensors
is_weak_ref = _C.is_weak_ref
owner_alive = _C.owner_alive
describe = _C.describe

__version__ = _version("weakref_ext")

if _os.environ.get("WEAKREF_EXT_SANITIZER", "0") not in ("", "0"):
    from . import sanitizer as _sanitizer

    _sanitizer._hooks.switch_on(_sanitizer.CAPACITY)

__all__ = [
    "LayerName",
    "__version__",
    "describe",
    "is_weak_ref",
    "nbytes",
    "own",
    "owner_alive",
    "pinned",
    "register_container",
    "register_passthrough",
    "weak_ref_tensors",
]
