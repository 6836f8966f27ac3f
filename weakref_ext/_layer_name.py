"""The layer name that comes with the package."""

from . import _opaque


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
