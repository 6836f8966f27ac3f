"""Switches a trace on: its hooks in torch's graphs, in our wrappers and in weak_ref_tensors, and how they come out."""

import atexit
import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from .. import _load
from ..cudagraph import _recording
from ._trace import Trace

_C: Any = _load.native()
_PATCHED = ("capture_begin", "capture_end", "replay", "reset")

_active: list[Trace] = []


def active() -> Trace | None:
    return _active[0] if _active else None


@contextlib.contextmanager
def switched_on(trace: Trace) -> Iterator[Trace]:
    """Hook the trace into torch's graphs, our wrappers and weak_ref_tensors, and take the hooks out again."""
    if torch.cuda.is_initialized():
        trace.listen()
    saved = {name: torch.cuda.CUDAGraph.__dict__[name] for name in _PATCHED}
    for name, hooked in _hooks(trace, saved).items():
        setattr(torch.cuda.CUDAGraph, name, functools.wraps(saved[name])(hooked))
    _recording.captured = trace.capture
    _C.set_listener(trace.born)
    _active.append(trace)
    try:
        yield trace
    finally:
        _active.remove(trace)
        _C.set_listener(None)
        _recording.captured = None
        for name, method in saved.items():
            setattr(torch.cuda.CUDAGraph, name, method)
        trace.stop()


def _hooks(trace: Trace, saved: dict[str, Callable[..., None]]) -> dict[str, Callable[..., None]]:
    def capture_begin(graph: Any, pool: Any = None, *args: Any, **kwargs: Any) -> None:
        # torch says only after the capture which pool it made for a graph that was given none
        given = torch.cuda.graph_pool_handle() if pool is None else pool
        trace.begin(graph, getattr(given, "id", given), lambda: saved["capture_begin"](graph, given, *args, **kwargs))

    def capture_end(graph: Any) -> None:
        trace.end(graph, lambda: saved["capture_end"](graph))

    def replay(graph: Any) -> None:
        saved["replay"](graph)
        trace.replayed(graph)

    def reset(graph: Any) -> None:
        saved["reset"](graph)
        trace.reset(graph)

    return {"capture_begin": capture_begin, "capture_end": capture_end, "replay": replay, "reset": reset}


_for_ever = contextlib.ExitStack()  # of a trace from the environment


def switch_on(capacity: int) -> None:
    atexit.register(_for_ever.close)
    _for_ever.enter_context(switched_on(Trace(capacity)))
