"""What graphs leave behind: buffers to copy results to, clones for the caller, and what an entry costs."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
from torch.utils import _pytree as pytree

import weakref_ext

from ._inputs import Signature, constant, difference, meta, paths

T = TypeVar("T")


@dataclass(frozen=True)
class EntryReport:
    """One captured signature. Sizes in bytes; a storage that several tensors share counts once.

    Attributes:
        signature: every argument with its path.
        output_bytes: the memory that the stored output refers to.
        pinned_bytes: the part of it that the output, or another holder, keeps allocated, so that no other capture can
            use it. 0 when every output tensor is weak and its source is gone.
        pool_bytes: by how much the pool grew while this entry was captured: 0 when it fitted into what was there.
        segments: captured graphs; one more than the eager breaks.
    """

    signature: str
    output_bytes: int
    pinned_bytes: int
    pool_bytes: int
    segments: int


def output_bytes(out: Any) -> tuple[int, int]:
    """Bytes that a structure's tensors refer to, and those of them that are pinned."""
    sizes: dict[int, int] = {}
    pinned: dict[int, int] = {}
    for leaf in pytree.tree_leaves(out):
        if isinstance(leaf, torch.Tensor):
            storage = leaf.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
            if not weakref_ext.is_weak_ref(leaf) or weakref_ext.owner_alive(leaf):
                pinned[storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values()), sum(pinned.values())


def outline(leaves: Sequence[Any], spec: pytree.TreeSpec, device_type: str) -> Signature:
    """The signature of a result, strides left out: what was captured after it fits any result with the same one.

    A 0-dim tensor elsewhere than on the device counts as its value: kernels take it by value.
    """

    def described(i: int, leaf: Any) -> object:
        if isinstance(leaf, torch.Tensor):
            if leaf.dim() == 0 and leaf.device.type != device_type:
                return constant(leaf.item(), str)
            return meta(leaf)._replace(strides=None)
        return constant(leaf, lambda: f"in a result, {paths(spec, ())[i]}")

    return Signature(spec, tuple(described(i, leaf) for i, leaf in enumerate(leaves)))


def buffers_for(leaves: Sequence[Any], positions: Iterable[int]) -> dict[int, torch.Tensor]:
    """A new dense tensor like the leaf at each position; one for a leaf that stands at several."""
    made: dict[int, torch.Tensor] = {}
    for i in positions:
        if id(leaves[i]) not in made:
            made[id(leaves[i])] = torch.empty_like(leaves[i], requires_grad=False)
    return {i: made[id(leaves[i])] for i in positions}


def own(out: T) -> T:
    """The same structure with a clone of every tensor, one for a tensor that occurs twice.

    Raises:
        TypeError: for a value that may hold tensors and that torch's pytree does not know.
    """
    leaves, spec = pytree.tree_flatten(out)
    clones: dict[int, torch.Tensor] = {}
    for i, leaf in enumerate(leaves):
        if not isinstance(leaf, torch.Tensor):
            constant(leaf, lambda i=i: f"in a result, {paths(spec, ())[i]}")  # type: ignore[misc]
        elif id(leaf) not in clones:
            clones[id(leaf)] = leaf.clone()
    return cast(T, pytree.tree_unflatten([clones.get(id(leaf), leaf) for leaf in leaves], spec))


def buffers_of(out: Any, device_type: str) -> tuple[Signature, dict[int, torch.Tensor]]:
    """The outline of a result, and a buffer for each of its tensors on the device."""
    leaves, spec = pytree.tree_flatten(out)
    on_device = [i for i, t in enumerate(leaves) if isinstance(t, torch.Tensor) and t.device.type == device_type]
    with torch.inference_mode(False):
        return outline(leaves, spec, device_type), buffers_for(leaves, on_device)


def into(expected: Signature, buffers: dict[int, torch.Tensor], device_type: str, out: Any) -> Any:
    """Copy a result's tensors to the buffers that were made for another run's; the same structure over the buffers."""
    leaves, spec = pytree.tree_flatten(out)
    changed = difference(expected, outline(leaves, spec, device_type), ())
    if changed is not None:
        raise RuntimeError(f"the output changed between the warm-up and the capture: {changed}")
    for i, buffer in buffers.items():
        leaves[i] = buffer.copy_(leaves[i].detach())
    return pytree.tree_unflatten(leaves, spec)
