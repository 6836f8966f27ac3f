"""Listens to the allocator, to captures and to replays, and knows of every registered output whether it is stale."""

import contextlib
import struct
import threading
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakTensorKeyDictionary

from .. import _inspect, _load
from ..cudagraph._inputs import _CONSTANTS
from ._report import Report
from ._verdict import Alias, Event, History, Pool, Span, home_of, judge, owner_of, untraced

_C: Any = _load.native()
_EVENT = struct.Struct("5QhH4x")  # PoolEvent of csrc/cuda/pool_trace.h


def parsed(first: int, data: bytes) -> list[Event]:
    """The events in the ring's bytes, of which the earliest has the number ``first``."""
    rows = enumerate(_EVENT.iter_unpack(data), first)
    return [Event(n, act, dev, at, size, stream, (a, b)) for n, (at, size, stream, a, b, dev, act) in rows]


class Allocator:
    """torch's caching allocator as a source of events: nothing is attached to it before :meth:`start`."""

    _started = False

    def start(self, capacity: int) -> None:
        if not hasattr(_C, "trace_start"):
            raise RuntimeError(
                "the sanitizer listens to the CUDA allocator, and weakref_ext was built without its CUDA part: rebuild "
                "it on a CUDA build of torch, with WEAKREF_EXT_CUDA=1"
            )
        _C.trace_start(capacity)
        self._started = True

    def stop(self) -> None:
        if self._started:
            _C.trace_stop()
        self._started = False  # the next trace's events are not this one's

    def position(self) -> int:
        return _C.trace_position() if self._started else 0

    def read(self, first: int) -> tuple[int, list[Event]]:
        """The events from number ``first`` on, and the number of the first of them that the ring still has."""
        if not self._started:
            return first, []
        first, data = _C.trace_read(first)
        return first, parsed(first, data)

    def inside(self, tensors: list[torch.Tensor], pool: Pool) -> list[bool]:
        weak: Any = _C.weak_ref_tensors(tensors, pool=pool) if any(tensor.is_cuda for tensor in tensors) else tensors
        return [a is not b for a, b in zip(weak, tensors, strict=True)]


@dataclass(eq=False)
class Output:
    """A registered output. ``tensor`` is a weak ref over the same memory; it keeps the address of the user's storage
    object (by which he is found) from being used again. ``stale``: whose writes the memory holds now."""

    alias: Alias
    tensor: torch.Tensor
    owner: Event | None
    home: Span | None
    stale: Span | Event | None = None


class Trace:
    """What has been seen since the trace began. ``history``, ``spans`` and ``outputs`` only grow."""

    def __init__(self, capacity: int, source: Any = None) -> None:
        self.capacity = capacity
        self.history = History()
        self.spans: list[Span] = []
        self.outputs: list[Output] = []
        self._source = source or Allocator()
        self._graphs: weakref.WeakKeyDictionary[Any, Span] = weakref.WeakKeyDictionary()
        self._open: Span | None = None
        self._listening = False
        self._born: Any = WeakTensorKeyDictionary()
        self._by_storage: dict[int, list[Output]] = {}
        self._lock = threading.RLock()

    def listen(self) -> None:
        """Attach to the allocator, which must exist by then: at the first capture at the latest."""
        if not self._listening:
            self._source.start(self.capacity)
            self._listening = True

    # What the hooks call.

    def begin(self, graph: Any, pool: Pool, begin: Callable[[], None]) -> None:
        with self._lock:
            self.listen()
            self._update()
            position = self.history.end
            begin()
            span = Span(f"capture {len(self.spans) + 1}", pool, _current_device(), position)
            weakref.finalize(graph, setattr, span, "alive", False).atexit = False
            self._graphs[graph] = self._open = span
            self.spans.append(span)

    def end(self, graph: Any, end: Callable[[], None]) -> None:
        with self._lock:
            span = self._graphs.get(graph)
            try:
                end()
            except BaseException:
                self.reset(graph)  # a failed capture never replays
                raise
            finally:
                self._open = None
                self._update()
                if span is not None:
                    span.end = self.history.end
                    span.update(self.history)

    def replayed(self, graph: Any) -> None:
        """Outputs that this graph writes are fresh from here on, others in the same memory are stale."""
        with self._lock:
            span = self._graphs.get(graph)
            if span is None:
                return
            for output in self.outputs[span.judged :]:
                if output.home is span or span.writes_to(output.alias):
                    span.touches.append(output)
            span.judged = len(self.outputs)
            for output in span.touches:
                if output.home is not span:
                    output.stale = span
                elif output.owner is not None:
                    output.stale = span.later_block(output.alias, output.owner.position)

    def reset(self, graph: Any) -> None:
        span = self._graphs.pop(graph, None)
        if span is not None:
            span.alive = False

    def born(self, weak: Any) -> None:
        """Called by weak_ref_tensors with its result."""
        position = self._source.position()
        with contextlib.suppress(ValueError):  # of a type that the call itself passed through
            for _, tensor in leaves(weak):
                if _C.is_weak_ref(tensor):
                    self._born[tensor] = position

    # What users and wrappers call.

    def capture(self, name: str, graphs: Any, outputs: Any = ()) -> None:
        """See :func:`weakref_ext.sanitizer.capture`."""
        graphs = graphs if isinstance(graphs, list | tuple) else [graphs]
        with self._lock:
            spans = [span for span in map(self._graphs.get, graphs) if span is not None]
            if len(spans) != len(graphs) or not spans:
                raise ValueError(f"{name}: its graph was not captured while the trace was on, or was reset")
            self._update()
            taken = {span.capture for span in self.spans if span not in spans}
            free = (f"{name} #{n}" for n in range(2, len(taken) + 3))
            name = name if name not in taken else next(candidate for candidate in free if candidate not in taken)
            for span in spans:
                span.capture = name
            found = leaves(outputs)
            inside = self._source.inside([tensor for _, tensor in found], spans[0].pool)
            for (path, tensor), in_pool in zip(found, inside, strict=True):
                self._add(Alias(path, name, spans[0].pool, *_range(tensor), None, in_pool), tensor)

    def report(self) -> Report:
        """See :func:`weakref_ext.sanitizer.report`."""
        with self._lock:
            self._update()
            spans = [*self.spans, *untraced(self.history, self.spans)]
            found = [judge(o.alias, self.history, spans, owner_alive=_C.owner_alive(o.tensor)) for o in self.outputs]
            return Report(found, list(self.spans), self.history.lost)

    def find_stale(self, tensor: torch.Tensor) -> tuple[Output, Span | Event | None] | None:
        """The output that ``tensor`` is, or was made from without copying, if its values are gone; and who took them:
        None for memory that no pool keeps."""
        for output in self._by_storage.get(tensor.untyped_storage()._cdata, ()):
            by = output.stale or self._taken_in_open_capture(output)
            gone = (
                by is None and output.owner is None and not output.alias.in_pool and not _C.owner_alive(output.tensor)
            )
            if (by is not None or gone) and _reaches(tensor, output.alias):
                return output, by
        return None

    def is_open(self, span: object) -> bool:
        return span is not None and span is self._open

    def stop(self) -> None:
        """Read what is left, and stop listening."""
        with self._lock:
            self._update()
            self._source.stop()

    def _taken_in_open_capture(self, output: Output) -> Span | None:
        span = self._open
        if span is None or output.owner is None or output.home is span:
            return None
        with self._lock:
            self._update()
            span.update(self.history)
        return span if span.writes_to(output.alias) else None

    def _update(self) -> None:
        first, events = self._source.read(self.history.end)
        lost, before = first - self.history.end, self.history.lost
        self.history.lost += lost
        self.history.events += events
        self.history.end = first + len(events)
        if lost and not before:
            warnings.warn(
                f"the sanitizer's ring of {self.capacity} events was full: it lost some, and will call no tensor "
                "exclusive any more. Give trace() more capacity.",
                RuntimeWarning,
                stacklevel=3,
            )

    def _add(self, alias: Alias, tensor: torch.Tensor) -> None:
        alias.strong = not _C.is_weak_ref(tensor)
        alias.born = self._born.get(tensor)
        if alias.born is None and _C.owner_alive(tensor):
            alias.born = self.history.end
        owner = owner_of(alias, self.history)
        home = owner and home_of(owner, self.spans)
        output = Output(alias, _C.weak_ref_tensors(tensor) if alias.strong else tensor, owner, home)
        self.outputs.append(output)
        self._by_storage.setdefault(tensor.untyped_storage()._cdata, []).append(output)


def leaves(out: Any) -> list[tuple[str, torch.Tensor]]:
    """Every tensor with its path; plain values pass, as they do in wrappers."""
    plain = {type(leaf) for leaf in pytree.tree_leaves(out) if isinstance(leaf, (*_CONSTANTS, float, complex))}
    return _C.leaves(out, tuple(plain))  # type: ignore[no-any-return]


def _current_device() -> int:
    return torch.cuda.current_device() if torch.cuda.is_available() else -1


def _range(tensor: torch.Tensor) -> tuple[int, int, int]:
    """Device, begin and end of the memory that the tensor reaches."""
    base = tensor.untyped_storage().data_ptr()
    begin, end = _inspect._extent(tensor)
    return -1 if tensor.device.index is None else tensor.device.index, base + begin, base + end


def _reaches(tensor: torch.Tensor, alias: Alias) -> bool:
    _, begin, end = _range(tensor)
    return begin < alias.end and alias.begin < end
