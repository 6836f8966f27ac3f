"""Which weak ref is stale, since when, and by whose hand.

    with sanitizer.trace():
        ...  # captures and replays: CUDAGraphWrappers register themselves
        print(sanitizer.report())

    with sanitizer.guard():
        ...  # using a stale output raises StaleTensorError

Both listen to torch's allocator for the graph pools' hand-outs, and to captures and replays through
``torch.cuda.CUDAGraph``, from the moment they are entered; nothing is attached or patched before. Importing this does
no CUDA work.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

from ._guard import OperatorGuard, ReaderGuard, StaleTensorError
from ._hooks import active, switched_on
from ._report import Report
from ._trace import Trace
from ._verdict import Kind, Verdict

__all__ = ["Kind", "Report", "StaleTensorError", "Trace", "Verdict", "capture", "guard", "report", "trace"]

CAPACITY = 2**20


@contextlib.contextmanager
def trace(capacity: int = CAPACITY) -> Iterator[Trace]:
    """Follow what the allocator hands out to captures; ``with trace() as t``: ``t.report()``, also afterwards.

    Start it before the first capture into a pool: of memory that a pool had before, nothing is known for sure. Inside
    another trace it is that one. Follows the whole process. ``WEAKREF_EXT_SANITIZER=1`` in the environment is a trace
    from the import of weakref_ext to the end.

    Args:
        capacity: how many events the ring between the allocator and Python holds, 48 bytes each. It is emptied at the
            begin and end of each capture, and only a graph pool's hand-outs are events: it must hold those of one
            capture. If it is full it warns, and no verdict is ``exclusive`` any more.

    Raises:
        RuntimeError: where weakref_ext was built without its CUDA part, or the allocator takes no callbacks
            (cudaMallocAsync); at the first capture, if CUDA was not initialized before.
    """
    outer = active()
    if outer is not None:
        yield outer
        return
    with switched_on(Trace(capacity)) as made:
        yield made


def _active() -> Trace:
    found = active()
    if found is None:
        raise RuntimeError("no trace is on: use `with sanitizer.trace():`, or set WEAKREF_EXT_SANITIZER=1")
    return found


def capture(name: str, graphs: Any, outputs: Any = ()) -> None:
    """Name a capture, and register its outputs: for users of ``torch.cuda.graph``. Wrappers do it themselves.

    Args:
        name: as reports and errors show it; a number is added to a name that is taken.
        graphs: the ``torch.cuda.CUDAGraph``, or the list of them in order if the capture is broken into segments.
        outputs: the structure that is kept of it, of weak refs and other tensors. Inside the capture or after it;
            replays that come before are held against them only if one of their own graph's is among those. Weak refs
            that were made by :func:`weakref_ext.weak_ref_tensors` while the trace was on are known exactly.

    Raises:
        RuntimeError: without a trace.
        ValueError: for a graph that was not captured during the trace, and for outputs that are not understood.
    """
    _active().capture(name, graphs, outputs)


def report() -> Report:
    """One verdict per registered output tensor: prints as a table, ``picture(file)`` draws it.

    Raises:
        RuntimeError: without a trace.
    """
    return _active().report()


@contextlib.contextmanager
def guard() -> Iterator[Trace]:
    """Raise :class:`StaleTensorError` where this thread uses a registered output whose values are gone.

    Uses are: any operator (in place, ``out=``, a ``copy_`` out of it) on the tensor, or on what was made of it without
    copying (views, ``detach()``, ``.data``), and ``numpy()``, ``tolist()``, ``__dlpack__`` and printing. Not seen: the
    bare address (``data_ptr()``, pickling), what a captured graph reads at its replay, compiled code, and another weak
    ref made of a weak ref. An output is stale from the replay of a graph that was handed its memory until its own graph
    replays. Starts a trace if there is none. Costs some microseconds an operator.
    """
    with trace() as found, ReaderGuard(found), OperatorGuard(found):
        yield found
