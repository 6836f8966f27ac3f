"""What is in a structure, what still pins memory, and the way back to owning tensors."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from . import _load

_C = _load.native()

T = TypeVar("T")
Passthrough = tuple[type, ...] | Callable[[type, str], bool]


def nbytes(out: Any, *, passthrough: Passthrough = ()) -> int:
    """Return the bytes of the distinct storages under every tensor of `out`.

    A storage counts whole and once, however small or many the views of it. `passthrough` as in
    :func:`weak_ref_tensors`.

    Raises:
        ValueError: for a value that is not understood, with its path: it could hold tensors that were not counted.
    """
    storages = (tensor.untyped_storage() for _, tensor in _C.leaves(out, passthrough))
    return sum({_key(storage): storage.nbytes() for storage in storages}.values())


def pinned(out: Any, *, passthrough: Passthrough = ()) -> list[tuple[str, int]]:
    """Return ``[(path, nbytes)]`` of what still pins memory: one row for each distinct storage that is still owned.

    A weak ref is listed while the owner that it was made from is alive, and a strong tensor always, since it owns its
    memory itself; the path is that of the first tensor over the storage, the bytes are the whole storage's. An empty
    list says that nothing keeps the memory of `out` but its graph pool.

    Raises:
        ValueError: as :func:`nbytes`.
    """
    rows: dict[Any, tuple[str, int]] = {}
    for path, tensor in _C.leaves(out, passthrough):
        if _C.owner_alive(tensor):
            storage = tensor.untyped_storage()
            rows.setdefault(_key(storage), (path, storage.nbytes()))
    return list(rows.values())


def own(out: T, *, passthrough: Passthrough = ()) -> T:
    """Return the same structure with every tensor replaced by an owning clone: the way back from weak refs.

    Clones have the sizes and strides of their sources (gaps between elements come along, an expanded dimension stays
    one) and no autograd history. Tensors that share memory give clones that share it in the same way, a tensor that
    occurs twice gives one clone. Only the range of a storage that the tensors reach is copied, on the current stream.
    Reads the memory: call it while the weak refs are valid, for instance after the replay that wrote them and before
    another capture's.

    Raises:
        ValueError: as :func:`nbytes`.
    """
    ranges: dict[Any, tuple[int, int]] = {}
    for _, tensor in _C.leaves(out, passthrough):
        begin, end = _extent(tensor)
        low, high = ranges.get(_key(tensor.untyped_storage()), (begin, end))
        ranges[_key(tensor.untyped_storage())] = min(low, begin), max(high, end)
    storages: dict[Any, torch.UntypedStorage] = {}

    def clone(path: str, tensor: torch.Tensor) -> torch.Tensor:
        key = _key(tensor.untyped_storage())
        begin, end = ranges[key]
        begin -= begin % 16  # stays a whole number of elements of every dtype
        if key not in storages:
            storages[key] = _clone_bytes(tensor, begin, end)
        new = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        offset = tensor.storage_offset() - begin // tensor.element_size()
        new.set_(storages[key], offset, tensor.shape, tensor.stride())
        new = new.conj() if tensor.is_conj() else new
        return torch._neg_view(new) if tensor.is_neg() else new

    with torch.no_grad():
        owned: T = _C.map_tensors(out, clone, passthrough)
    return owned


def _clone_bytes(tensor: torch.Tensor, begin: int, end: int) -> torch.UntypedStorage:
    if tensor.is_meta:  # no bytes, and set_() would want to resize the weak storage
        return torch.UntypedStorage(end - begin, device="meta")
    source = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return source.set_(tensor.untyped_storage(), begin, (end - begin,), (1,)).clone().untyped_storage()


def _key(storage: torch.UntypedStorage) -> Any:
    """Equal for storages over the same memory, whoever owns it."""
    return (storage.device, storage.data_ptr(), storage.nbytes()) if storage.data_ptr() else storage._cdata


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """First and last-plus-one byte of its storage that the tensor reaches."""
    begin = int(tensor.storage_offset()) * tensor.element_size()
    if tensor.numel() == 0:
        return begin, begin
    last = sum((size - 1) * int(stride) for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return begin, begin + (last + 1) * tensor.element_size()
