"""torch's opaque value types: a private interface whose names and rules differ between torch releases."""

import importlib
from typing import Any

_torch: Any = importlib.import_module("torch._library.opaque_object")

if hasattr(_torch, "register_custom_class"):  # torch 2.14: "constant" for "value"; the old names log warnings
    Meta: Any = type
    is_value_type = _torch.is_opaque_constant_type
    _register, _VALUE = _torch.register_custom_class, "constant"
else:
    Meta = importlib.import_module("torch._opaque_base").OpaqueBaseMeta  # torch 2.11 takes no other classes
    is_value_type = _torch.is_opaque_value_type
    _register, _VALUE = _torch.register_opaque_type, "value"


def register_hoisted(cls: type) -> None:
    """Register `cls` as an opaque value type whose objects are inputs of a compiled graph, not constants in it."""
    _register(cls, typ=_VALUE, hoist=True)
