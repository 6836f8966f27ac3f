"""One engine's rules for what a structure may hold, kept over our walk."""

import copy
import dataclasses
import logging
from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch.utils import _pytree as pytree

import weakref_ext

SCALARS = (type(None), float, complex, str, bytes, torch.dtype, torch.device, torch.layout, torch.memory_format)

Pool = tuple[int, int]


def holds_fields(value: object) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def fields(value: Any) -> list[tuple[str, Any]]:
    """The fields of a dataclass instance that are set."""
    names = [field.name for field in dataclasses.fields(value)]
    return [(name, getattr(value, name)) for name in names if hasattr(value, name)]


def tensors(value: object) -> Iterator[torch.Tensor]:
    """The tensors in what pytree and dataclass fields open."""
    for leaf in pytree.tree_leaves(value):
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif holds_fields(leaf):
            for _, item in fields(leaf):
                yield from tensors(item)


@dataclasses.dataclass(frozen=True)
class Contract:
    """What an engine lets through its weak ref function.

    ``leaves`` pass in silence (int, bool and layer names always do). Any other leaf raises ``error``, or with
    ``foreign="keep"`` comes back as the same object, with one warning per type. Host tensors stay strong: no graph pool
    keeps their memory, so a weak ref would dangle.
    """

    engine: str
    leaves: tuple[type, ...]
    foreign: Literal["keep", "raise"]
    error: type[Exception]
    log: logging.Logger
    warned: set[object] = dataclasses.field(default_factory=set, compare=False)

    def weaken(self, out: Any, pool: Pool | None = None) -> Any:
        """``out`` with every device tensor weak; with ``pool``, only those whose memory that graph pool owns.

        Raises:
            error: for a leaf that the engine refuses, and for a tensor that cannot be aliased, with its path.
        """
        host = any(tensor.device.type == "cpu" for tensor in tensors(out))
        if not host:
            try:
                return self._alias(out, pool)
            except ValueError as error:
                if self.foreign == "raise":
                    raise self.error(str(error)) from error
        return self._by_parts(out, "out", pool)

    def _alias(self, value: Any, pool: Pool | None) -> Any:
        if pool is not None:
            try:
                return weakref_ext.weak_ref_tensors(value, passthrough=self.leaves, pool=pool, outside="keep")
            except RuntimeError as error:  # an allocator that cannot tell, or a build without its CUDA part
                self.warn_once("pool", "cannot tell what graph pool %s owns (%s): all of it is weakened", pool, error)
        return weakref_ext.weak_ref_tensors(value, passthrough=self.leaves)

    def _by_parts(self, value: Any, path: str, pool: Pool | None) -> Any:
        """The same, part by part, for a structure that the walk does not take whole. Sharing between parts is lost."""
        if isinstance(value, torch.Tensor) and value.device.type == "cpu":
            return value
        if isinstance(value, (list, tuple)):
            parts = [self._by_parts(item, f"{path}[{i}]", pool) for i, item in enumerate(value)]
            return parts if isinstance(value, list) else getattr(value, "_make", tuple)(parts)
        if isinstance(value, dict):
            out = copy.copy(value)
            for key, item in value.items():  # not update(), which Hugging Face's ModelOutput refuses
                out[key] = self._by_parts(item, f"{path}[{key!r}]", pool)
            return out
        if holds_fields(value):
            out = copy.copy(value)
            for name, item in fields(value):
                object.__setattr__(out, name, self._by_parts(item, f"{path}.{name}", pool))  # a frozen one too
            return out
        try:
            return self._alias(value, pool)
        except ValueError as error:
            if self.foreign == "raise" or isinstance(value, torch.Tensor):
                raise self.error(f"{path}: {error}") from error
            kind = type(value)
            self.warn_once(kind, "%s is a %s: it stays as it is, and so strong any tensor in it", path, kind)
            return value

    def warn_once(self, reason: object, message: str, *args: object) -> None:
        if reason not in self.warned:
            self.warned.add(reason)
            self.log.warning("weakref_ext, %s: " + message, self.engine, *args)
