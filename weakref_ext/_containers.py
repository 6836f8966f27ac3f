"""Which types the walk takes apart, passes through or refuses. C++ asks once per exact type and keeps the answer."""

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch.utils import _pytree

from . import _load, _opaque
from ._layer_name import LayerName

_C = _load.native()

T = TypeVar("T")
Flat = tuple[Iterable[str] | None, Iterable[Any], Any]  # how the path to each child is written, the children, a context
Pair = tuple[Callable[[Any], Flat], Callable[[Any, tuple[Any, ...], Any], Any]]


def _flatten_dataclass(obj: Any) -> Flat:
    names = [field.name for field in dataclasses.fields(obj) if hasattr(obj, field.name)]
    return [f".{name}" for name in names], [getattr(obj, name) for name in names], names


def _unflatten_dataclass(obj: Any, children: tuple[Any, ...], names: list[str]) -> Any:
    """A copy whose fields are `children`; neither __init__ nor __post_init__ runs, and other attributes come along."""
    new = object.__new__(type(obj))
    slots = [name for base in type(obj).__mro__ for name in _slots(base)]
    values = {name: getattr(obj, name) for name in slots if hasattr(obj, name)} | getattr(obj, "__dict__", {})
    for name, value in (values | dict(zip(names, children, strict=True))).items():
        object.__setattr__(new, name, value)  # frozen classes forbid it to their own __setattr__ only
    return new


def _slots(base: type) -> Iterable[str]:
    slots = base.__dict__.get("__slots__", ())
    names = (slots,) if isinstance(slots, str) else tuple(slots)
    mangle = f"_{base.__name__.lstrip('_')}"
    return [
        mangle + name if name.startswith("__") and not name.endswith("__") else name
        for name in names
        if name not in ("__dict__", "__weakref__")
    ]


def _pytree_pair(node: _pytree.NodeDef) -> Pair:
    with_keys = node.flatten_with_keys_fn

    def flatten(obj: Any) -> Flat:
        if with_keys is None:
            children, context = node.flatten_fn(obj)
            return None, children, context
        pairs, context = with_keys(obj)
        return [str(key) for key, _ in pairs], [child for _, child in pairs], context

    return flatten, lambda obj, children, context: node.unflatten_fn(children, context)


def _flatten_wrapper(tensor: Any) -> Flat:
    names, context = tensor.__tensor_flatten__()
    return [f".{name}" for name in names], [getattr(tensor, name) for name in names], (names, context)


def _unflatten_wrapper(tensor: Any, children: tuple[Any, ...], context: Any) -> Any:
    names, inner_context = context
    inner = dict(zip(names, children, strict=True))
    return type(tensor).__tensor_unflatten__(inner, inner_context, tensor.size(), tensor.stride())


def _resolve(cls: type) -> str | Pair | None:
    """What objects of exactly this type are: the name of a kind that C++ knows, a pair of functions, or None."""
    if _opaque.is_value_type(cls):
        return "passthrough"
    if issubclass(cls, torch.Size):
        return "size" if cls is torch.Size else None
    node = _pytree.SUPPORTED_NODES.get(cls)
    if node is not None:
        return _pytree_pair(node)
    if issubclass(cls, tuple):
        fields = getattr(cls, "_fields", None)
        if isinstance(fields, tuple) and all(isinstance(name, str) for name in fields):
            return "namedtuple"
        # One with fields beyond the sequence (time.struct_time) could not be rebuilt from it.
        lengths = {getattr(cls, name, None) for name in ("n_fields", "n_sequence_fields")}
        return "structseq" if cls.__mro__[1:] == (tuple, object) and len(lengths) == 1 and None not in lengths else None
    if issubclass(cls, list | dict):
        return None
    if issubclass(cls, torch.Tensor):
        from torch.nested._internal.nested_tensor import NestedTensor

        # A jagged tensor's offsets name its symbolic size: with aliases of them it would be another size.
        wrapper = hasattr(cls, "__tensor_flatten__") and not issubclass(cls, NestedTensor)
        return (_flatten_wrapper, _unflatten_wrapper) if wrapper else None
    if dataclasses.is_dataclass(cls):
        return _flatten_dataclass, _unflatten_dataclass
    return None


_registered: set[type] = set()


def _check_new(kind: type) -> None:
    if not isinstance(kind, type):
        raise TypeError(f"expected a class, got {kind!r}")
    if issubclass(kind, torch.Tensor):
        raise TypeError(f"{kind} is a tensor type: tensors always become weak refs")
    if kind in (list, tuple, dict, int, bool, torch.Size) or kind in _registered:
        raise ValueError(f"{kind} is registered already")


def register_passthrough(*types: type) -> None:
    """Let objects of exactly these types pass through every traversal as the same object.

    For types that hold no tensor: a tensor inside would stay strong, and its memory pinned.

    Raises:
        TypeError: for anything but a class, and for tensor types, lists, tuples and dicts, which hold tensors.
        ValueError: for a type that is registered already.
    """
    for kind in types:
        _check_new(kind)
        if issubclass(kind, list | tuple | dict):
            raise TypeError(f"{kind} holds tensors: passing it through would keep their memory")
    for kind in types:
        _C.register_type(kind, "passthrough")
        _registered.add(kind)


def register_container(
    kind: type[T],
    flatten: Callable[[T], tuple[Sequence[Any] | Mapping[str, Any], Any]],
    unflatten: Callable[[Any, Any], T],
) -> None:
    """Take objects of exactly this type apart in every traversal, and put mapped ones together again.

    Args:
        kind: the class. Registering overrules what would be done otherwise with a dataclass or pytree node.
        flatten: ``flatten(obj) -> (children, context)``. Children are a sequence, or a mapping of names, with which
            errors and :func:`pinned` then write the path (``out.name``).
        unflatten: ``unflatten(children, context) -> obj`` of the same class; children of the kind that flatten gave:
            a tuple, or a dict.

    Raises:
        TypeError: for anything but a class, and for tensor types.
        ValueError: for a type that is registered already.
    """
    _check_new(kind)

    def flat(obj: T) -> Flat:
        children, context = flatten(obj)
        if isinstance(children, Mapping):
            return [f".{name}" for name in children], children.values(), (tuple(children), context)
        return None, children, (None, context)

    def unflat(obj: T, children: tuple[Any, ...], context: Any) -> T:
        names, inner = context
        return unflatten(children if names is None else dict(zip(names, children, strict=True)), inner)

    _C.register_type(kind, (flat, unflat))
    _registered.add(kind)


_C.set_resolver(_resolve)
_C.register_type(defaultdict, "defaultdict")
_registered.add(defaultdict)
register_passthrough(LayerName)
