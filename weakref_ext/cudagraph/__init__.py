"""CUDA graph wrappers whose outputs cost one pool for all sizes, and whose values are right by construction.

:class:`CUDAGraphWrapper` captures a whole call, :class:`BreakableCUDAGraphWrapper` captures it in segments around the
functions marked with :func:`eager_break`. Importing this does no CUDA work.
"""

from ._outputs import EntryReport
from ._recording import eager_break
from ._wrapper import BreakableCUDAGraphWrapper, CUDAGraphWrapper

__all__ = ["BreakableCUDAGraphWrapper", "CUDAGraphWrapper", "EntryReport", "eager_break"]
