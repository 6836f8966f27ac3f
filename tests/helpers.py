"""What several test files share: a reference walker, and storages whose death can be seen."""

import gc
import sys

import torch

import weakref_ext


def reference(out):
    """The whole walk over lists and tuples in Python; a strong tensor of the same geometry stands in for an alias."""
    if isinstance(out, torch.Tensor):
        return out.detach()
    if type(out) in (list, tuple):
        return type(out)(reference(element) for element in out)
    if isinstance(out, int | weakref_ext.LayerName):
        return out
    raise ValueError(f"Invalid type for tensors: {type(out)}")


def geometry(tensor):
    """All that an alias must share with its source."""
    storage = tensor.untyped_storage()
    return (
        (tensor.data_ptr(), storage.data_ptr(), storage.nbytes(), tensor.storage_offset()),
        (tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device, tensor.layout),
        (tensor.is_conj(), tensor.is_neg()),
    )


def assert_same(got, expected):
    """Same structure, types, geometry and pass-through objects."""
    assert type(got) is type(expected)
    if isinstance(got, torch.Tensor):
        assert geometry(got) == geometry(expected)
    elif type(got) in (list, tuple):
        assert len(got) == len(expected)
        for one, other in zip(got, expected, strict=True):
            assert_same(one, other)
    else:
        assert got is expected


def tensors(out):
    if isinstance(out, torch.Tensor):
        return [out]
    return [t for element in out for t in tensors(element)] if isinstance(out, list | tuple) else []


def use_count(tensor):
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


class Buffers:
    """CPU tensors over bytearrays: a buffer's reference count tells whether its storage still holds the memory."""

    def __init__(self):
        self._buffers = []

    def tensor(self, *shape, dtype=torch.float32):
        buffer = bytearray(torch.Size(shape).numel() * dtype.itemsize or 1)
        self._buffers.append(buffer)
        return torch.frombuffer(buffer, dtype=dtype, count=torch.Size(shape).numel()).view(shape)

    def held(self):
        """How many of the buffers a storage still holds."""
        gc.collect()
        # references when free: the list, the loop variable, getrefcount's argument
        return sum(sys.getrefcount(buffer) > 3 for buffer in self._buffers)
