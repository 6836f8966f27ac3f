"""The types that pass through the walk unchanged, and the layer name that comes with the package."""

import torch

from . import _opaque
from ._load import native

_C = native()


class LayerName(metaclass=_opaque.Meta):  # type: ignore[metaclass]
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


_opaque.register_hoisted(LayerName)


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


_C.set_resolver(_opaque.is_value_type)
register_passthrough(LayerName)


@torch.library.register_fake("weakref_ext::weak_ref_tensors")
def _(out: object) -> object:
    # torch.compile turns this exception into a graph break at the call, and into an error under fullgraph=True.
    from torch._subclasses.fake_tensor import UnsupportedFakeTensorException

    raise UnsupportedFakeTensorException(
        "weak_ref_tensors belongs outside compiled and traced regions: a weak ref aliases memory that exists, and a "
        "traced tensor has none. Call it on the compiled function's output."
    )
