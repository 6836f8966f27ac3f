"""The types that pass through the walk unchanged, and the layer name that comes with the package."""

import torch
from torch._library import opaque_object

from ._load import native

_C = native()


class LayerName:
    """A layer's name as an opaque value: passes through :func:`weak_ref_tensors` and torch.compile unchanged.

    A compiled graph that takes a plain ``str`` bakes it in and recompiles for every layer. A hoisted opaque value type
    (torch >= 2.11) is lifted to an input instead, so that all layers share one graph; vLLM names layers the same way.
    """

    __slots__ = ("value",)

    def __init__(self, value: str) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LayerName) and self.value == other.value

    def __hash__(self) -> int:
        return hash(self.value)

    def __str__(self) -> str:
        return self.value

    def __repr__(self) -> str:
        return f"LayerName({self.value!r})"

    def __fx_repr__(self) -> tuple[str, dict[str, type]]:
        return repr(self), {"LayerName": LayerName}


opaque_object.register_opaque_type(LayerName, typ="value", hoist=True)


def register_passthrough(*types: type) -> None:
    """Let objects of exactly these types pass through :func:`weak_ref_tensors` as the same object.

    For types that hold no tensor: a tensor inside would stay strong, and its memory pinned.

    Raises:
        TypeError: for anything but a class, and for tensor types and the containers that the walk knows.
    """
    for kind in types:
        if not isinstance(kind, type):
            raise TypeError(f"register_passthrough takes classes, got {kind!r}")
        if issubclass(kind, (torch.Tensor, list, tuple, dict)):
            raise TypeError(f"{kind} holds tensors: passing it through would keep their memory")
    for kind in types:
        _C.register_passthrough(kind)


_C.set_resolver(opaque_object.is_opaque_value_type)
register_passthrough(LayerName)
