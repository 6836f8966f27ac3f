"""A call's arguments: their signature, what differs between two of them, and the static buffers that a graph reads."""

import enum
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch.utils import _pytree as pytree

import weakref_ext

_CONSTANTS = (type(None), int, str, bytes, enum.Enum, torch.dtype, torch.device, torch.layout, torch.memory_format)


class Meta(NamedTuple):
    """What a captured kernel knows of a tensor, apart from its address. ``strides``: None where contiguous."""

    shape: torch.Size
    strides: tuple[int, ...] | None
    dtype: torch.dtype
    device: torch.device


def meta(tensor: torch.Tensor) -> Meta:
    return Meta(tensor.shape, None if tensor.is_contiguous() else tensor.stride(), tensor.dtype, tensor.device)


def constant(value: Any, path: Callable[[], str]) -> object:
    """A leaf that is no tensor, as part of a signature: equal only to a value of the same type.

    Raises:
        TypeError: for an object that may hold tensors, whose contents a capture would silently keep.
    """
    if isinstance(value, float | complex):
        return type(value), repr(value)  # nan equals nan, 0.0 differs from -0.0
    if not isinstance(value, _CONSTANTS):
        try:
            weakref_ext.weak_ref_tensors(value)  # a layer name, or a type the caller registered
        except ValueError:
            raise TypeError(
                f"{path()} is a {type(value)}: captured code takes and returns tensors, plain values, layer names, and "
                "lists, tuples, dicts and pytree nodes of them. Pass the tensors that it holds instead, or register "
                "its type as a pytree node; close over what never changes."
            ) from None
    return type(value), value


class Signature(NamedTuple):
    """Hashable: what two calls must share to replay the same graph."""

    spec: pytree.TreeSpec
    leaves: tuple[object, ...]

    def __hash__(self) -> int:
        return hash(self.leaves)  # that of the spec, in Python, takes ten times as long


def paths(spec: pytree.TreeSpec, roots: Sequence[str] = ("args", "kwargs")) -> list[str]:
    """Where each leaf of a tree stands: ``args[0][1]['aux']``. ``roots`` name the outermost tuple's items."""
    numbered = pytree.tree_unflatten(range(spec.num_leaves), spec)
    found = pytree.tree_flatten_with_path(numbered)[0]
    if not roots:
        return [f"out{pytree.keystr(path)}" for path, _ in found]
    return [roots[cast(Any, path[0]).idx] + pytree.keystr(path[1:]) for path, _ in found]


_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter, type(None), bool, int, float, str})


@functools.lru_cache(maxsize=256)
def _plain_spec(args: int, names: tuple[str, ...]) -> pytree.TreeSpec:
    return pytree.tree_structure(((0,) * args, dict.fromkeys(names, 0)))


def _flatten(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], pytree.TreeSpec]:
    """``pytree.tree_flatten((args, kwargs))``, faster where no argument is a container."""
    leaves = [*args, *kwargs.values()]
    if _PLAIN.issuperset(map(type, leaves)):
        return leaves, _plain_spec(len(args), tuple(kwargs))
    return pytree.tree_flatten((args, kwargs))


@dataclass(slots=True)
class Call:
    """One call's arguments, taken apart: ``tensors`` stand at ``positions`` among ``leaves``."""

    leaves: list[Any]
    positions: list[int]
    tensors: list[torch.Tensor]
    signature: Signature

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> "Call":
        leaves, spec = _flatten(args, kwargs)
        positions: list[int] = []
        tensors: list[torch.Tensor] = []
        described: list[object] = []
        for i, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor):
                positions.append(i)
                # a source that requires grad would make the buffer that it is copied to part of its graph
                tensors.append(leaf.detach() if leaf.requires_grad else leaf)
                described.append(meta(leaf))
            else:
                described.append(constant(leaf, lambda i=i: paths(spec)[i]))  # type: ignore[misc]
        return cls(leaves, positions, tensors, Signature(spec, tuple(described)))

    def with_tensors(self, tensors: Sequence[torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The same arguments over other tensors."""
        leaves = list(self.leaves)
        for position, tensor in zip(self.positions, tensors, strict=True):
            leaves[position] = tensor
        return cast(tuple[tuple[Any, ...], dict[str, Any]], pytree.tree_unflatten(leaves, self.signature.spec))

    def require_device(self, device_type: str) -> None:
        """Raise ValueError for a tensor that kernels cannot read."""
        for i, tensor in zip(self.positions, self.tensors, strict=True):
            if tensor.device.type != device_type:
                raise ValueError(
                    f"{paths(self.signature.spec)[i]} is a {tensor.device} tensor: a graph would keep the values that "
                    "it has now. Move it to the device, or pass a plain number."
                )

    def require_addresses(self, captured: Sequence[torch.Tensor]) -> None:
        """Raise ValueError for a tensor that is not where the capture's was."""
        for i, given, tensor in zip(self.positions, self.tensors, captured, strict=True):
            if given.data_ptr() != tensor.data_ptr():
                raise ValueError(
                    f"{paths(self.signature.spec)[i]} is at address {given.data_ptr():#x}, was at "
                    f"{tensor.data_ptr():#x}: with copy_inputs=False every call passes the tensors of the capture"
                )


def show(leaf: object) -> str:
    """One leaf of a signature for a reader: ``bfloat16[8, 4096] cuda:0``."""
    if isinstance(leaf, Meta):
        layout = "" if leaf.strides is None else f" strides {list(leaf.strides)}"
        return f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)}{layout} {leaf.device}"
    return str(cast(tuple[type, object], leaf)[1])


def describe(signature: Signature) -> str:
    """Every leaf with its path, in one line."""
    rows = zip(paths(signature.spec), signature.leaves, strict=True)
    return ", ".join(f"{path}: {show(leaf)}" for path, leaf in rows)


def difference(captured: Signature, called: Signature, roots: Sequence[str] = ("args", "kwargs")) -> str | None:
    """What differs between two signatures and where; None if nothing does."""
    if captured == called:
        return None
    old = dict(zip(paths(captured.spec, roots), captured.leaves, strict=True))
    new = dict(zip(paths(called.spec, roots), called.leaves, strict=True))
    for path, leaf in new.items():
        if path not in old:
            return f"{path} ({show(leaf)}) was not there"
        if old[path] != leaf:
            return f"{path} is {show(leaf)}, was {show(old[path])}"
    for path in old:
        if path not in new:
            return f"{path} ({show(old[path])}) is missing"
    return f"the containers are {called.spec}, were {captured.spec}"


class StaticInputs:
    """The buffers that captured graphs read their arguments from, shared by the calls of all sizes.

    An argument's leading slice serves a smaller size: buffers are told apart by everything but the first dimension.
    One call is in flight at a time, so calls need not have buffers of their own.
    """

    def __init__(self) -> None:
        self._buffers: dict[object, torch.Tensor] = {}
        self._storages: set[int] = set()

    def bind(self, call: Call) -> list[torch.Tensor]:
        """A static tensor for each tensor of the call; allocates where no buffer is large enough."""
        with torch.inference_mode(False):  # calls copy to them in any mode
            return [self._slot(i, tensor) for i, tensor in zip(call.positions, call.tensors, strict=True)]

    def _slot(self, position: int, tensor: torch.Tensor) -> torch.Tensor:
        described = meta(tensor)
        key: object
        shared = described.strides is None and tensor.dim() > 0
        key = (position, described._replace(shape=tensor.shape[1:])) if shared else (position, described)
        buffer = self._buffers.get(key)
        if buffer is None or (shared and buffer.shape[0] < tensor.shape[0]):
            # Graphs that read a smaller buffer keep it: their entries hold its slices.
            buffer = torch.empty_like(tensor)
            self._buffers[key] = buffer
            self._storages.add(buffer.untyped_storage().data_ptr())
        return buffer[: tensor.shape[0]] if shared else buffer

    def sources(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The same values, none of them in our own buffers: a graph may return its input, and a caller feed it back."""
        return [t.clone() if t.untyped_storage().data_ptr() in self._storages else t for t in tensors]

    def clear(self) -> None:
        self._buffers.clear()
        self._storages.clear()
