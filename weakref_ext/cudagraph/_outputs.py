"""What graphs leave behind: buffers to copy results to, and what an entry costs."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ._inputs import Signature, constant, difference, meta, paths


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
