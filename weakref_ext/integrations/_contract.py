"""One engine's rules for what a structure may hold, kept over our walk."""

import dataclasses
import logging
from typing import Any

import torch

import weakref_ext

SCALARS = (type(None), float, complex, str, bytes, torch.dtype, torch.device, torch.layout, torch.memory_format)

Pool = tuple[int, int]


def holds_fields(value: object) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


@dataclasses.dataclass(frozen=True)
class Contract:
    """What an engine lets through its weak ref function.

    ``leaves`` pass in silence (int, bool and layer names always do). Any other leaf raises ``error``, or with
    ``keep_foreign`` comes back as the same object, with one warning per type. CPU tensors stay strong: no graph pool
    keeps their memory, so a weak ref would dangle.
    """

    engine: str
    leaves: tuple[type, ...]
    keep_foreign: bool
    error: type[Exception]
    log: logging.Logger
    warned: set[object] = dataclasses.field(default_factory=set, compare=False)

    def weaken(self, out: Any, pool: Pool | None = None) -> Any:
        """``out`` with every device tensor weak; with ``pool``, only those whose memory that graph pool owns.

        Raises:
            error: for a leaf that the engine refuses, and for a tensor that cannot be aliased, with its path.
        """
        try:
            return weakref_ext.weak_ref_tensors(out, pool=pool, cpu="keep", passthrough=self._passes)
        except ValueError as error:
            raise self.error(str(error)) from error
        except RuntimeError as error:
            if pool is None:
                raise
            # an allocator that cannot tell, or a build without its CUDA part
            self._warn_once("pool", "cannot tell what graph pool %s owns (%s): all of it is weakened", pool, error)
            return self.weaken(out)

    def _passes(self, kind: type, path: str) -> bool:
        if kind in self.leaves:
            return True
        if self.keep_foreign:
            self._warn_once(kind, "%s is a %s: it stays as it is, and so strong any tensor in it", path, kind)
        return self.keep_foreign

    def _warn_once(self, reason: object, message: str, *args: object) -> None:
        if reason not in self.warned:
            self.warned.add(reason)
            self.log.warning("weakref_ext, %s: " + message, self.engine, *args)
