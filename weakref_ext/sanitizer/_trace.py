"""Listens to the allocator, to captures and to replays, and knows of every registered output whether it is stale."""

import contextlib
import struct
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
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


@dataclass(frozen=True)
class Packed:
    """Events as the ring has them, from number ``first`` on: a capture need not wait until they are unpacked."""

    first: int
    data: bytes

    def __len__(self) -> int:
        return len(self.data) // _EVENT.size

    def __iter__(self) -> Iterator[Event]:
        rows = enumerate(_EVENT.iter_unpack(self.data), self.first)
        return (Event(n, act, dev, at, size, stream, (a, b)) for n, (at, size, stream, a, b, dev, act) in rows)


class Allocator:
    """torch's caching allocator as a source of events: nothing is attached to it before :meth:`start`."""

    _started = False

    def start(self, capacity: int) -> None:
        _load.require_cuda_part(_C, "the sanitizer listens to the CUDA allocator")
        _C.trace_start(capacity)
        self._started = True

    def stop(self) -> None:
        if self._started:
            _C.trace_stop()
        self._started = False  # the next trace's events are not this one's

    def position(self) -> int:
        return _C.trace_position() if self._started else 0

    def read(self, first: int) -> Packed:
        """The events from number ``first`` on that the ring still has."""
        return Packed(*_C.trace_read(first)) if self._started else Packed(first, b"")

    def inside(self, tensors: list[torch.Tensor], pool: Pool) -> list[bool]:
        weak: Any = _C.weak_ref_tensors(tensors, pool=pool) if any(tensor.is_cuda for tensor in tensors) else tensors
        return [a is not b for a, b in zip(weak, tensors, strict=True)]


@dataclass(eq=False)
class Output:
    """A registered output. ``tensor`` is a weak ref over the same memory; it keeps the address of the user's storage
    object (by which he is found) from being used again. ``until`` and ``since``: how many events were over when it was
    made, and replays when it was registered. The rest is found out when somebody asks: among the first ``judged``
    spans, ``writers`` write to its memory."""

    alias: Alias
    tensor: torch.Tensor
    until: int
    since: int
    judged: int = 0
    owner: Event | None = None
    home: Span | None = None
    writers: list[Span] = field(default_factory=list)


class Trace:
    """What has been seen since the trace began. ``history``, ``spans`` and ``outputs`` only grow.

    Events stay packed until somebody asks for a report or, under a guard, uses an output: captures and replays note
    their place in the order of things, and nothing else.
    """

    def __init__(self, capacity: int, source: Any = None) -> None:
        self.capacity = capacity
        self.history = History()
        self.spans: list[Span] = []
        self.outputs: list[Output] = []
        self._source = source or Allocator()
        self._graphs: weakref.WeakKeyDictionary[Any, Span] = weakref.WeakKeyDictionary()
        self._listening = False
        self._packed: list[Packed] = []
        self._updated = 0  # so many first spans are over, and their blocks known
        self._replays = 0
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
            self._read()
            position = self.history.end
            begin()
            span = Span(f"capture {len(self.spans) + 1}", pool, _current_device(), position)
            weakref.finalize(graph, span.close, self._source.position).atexit = False
            self._graphs[graph] = span
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
                self._read()
                if span is not None:
                    span.end = self.history.end

    def replayed(self, graph: Any) -> None:
        """Outputs that this graph writes are fresh from here on, others in the same memory are stale."""
        span = self._graphs.get(graph)
        if span is not None:
            with self._lock:
                self._replays += 1
                span.replayed = self._replays

    def reset(self, graph: Any) -> None:
        span = self._graphs.pop(graph, None)
        if span is not None:
            span.close(self._source.position)

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
            self._read()
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
            by = self.taken_by(output)
            gone = (
                by is None and output.owner is None and not output.alias.in_pool and not _C.owner_alive(output.tensor)
            )
            if (by is not None or gone) and _reaches(tensor, output.alias):
                return output, by
        return None

    def taken_by(self, output: Output) -> Span | Event | None:
        """Whose writes the output's memory holds instead of its own; None while its own are there."""
        with self._lock:
            if output.judged < len(self.spans):
                self._update()
                self._judge(output)
            later = self._writers(output, len(self.spans))
            last = max([*output.writers, *later], key=lambda span: span.replayed, default=None)
            # Replays before the registration count where its own graph's is among them: its values were there once.
            since = 0 if output.home is not None and output.home.replayed else output.since
            if last is not None and last.replayed > since:
                if output.owner is None or last is not output.home:
                    return last
                block = last.later_block(output.alias, output.owner.position)
                if block is not None:
                    return block
            if output.owner is None:
                return None
            return next((span for span in later if span.is_open and span is not output.home), None)

    def _judge(self, output: Output) -> None:
        if not output.judged:
            output.owner = owner_of(output.alias, self.history, output.until)
            output.home = output.owner and home_of(output.owner, self.spans)
        output.writers += self._writers(output, self._updated)
        output.judged = self._updated

    def _writers(self, output: Output, until: int) -> list[Span]:
        spans = self.spans[output.judged : until]
        return [span for span in spans if span is output.home or span.writes_to(output.alias)]

    def stop(self) -> None:
        """Read what is left, and stop listening."""
        with self._lock:
            self._read()
            self._source.stop()

    def _read(self) -> None:
        """Take what is new from the ring, as it is."""
        events = self._source.read(self.history.end)
        lost, before = events.first - self.history.end, self.history.lost
        self._packed.append(events)
        self.history.lost += lost
        self.history.end = events.first + len(events)
        if lost and not before:
            warnings.warn(
                f"the sanitizer's ring of {self.capacity} events was full: it lost some, and will call no tensor "
                "exclusive any more. Give trace() more capacity.",
                RuntimeWarning,
                stacklevel=3,
            )

    def _update(self) -> None:
        """Bring the history, and the blocks of every span, up to date."""
        self._read()
        for events in self._packed:
            self.history.events += events
        self._packed.clear()
        later = self.spans[self._updated :]
        for span in later:
            span.update(self.history)
        self._updated += next((n for n, span in enumerate(later) if span.is_open), len(later))

    def _add(self, alias: Alias, tensor: torch.Tensor) -> None:
        alias.strong = not _C.is_weak_ref(tensor)
        alias.born = self._born.get(tensor)
        if alias.born is None and _C.owner_alive(tensor):
            alias.born = self.history.end
        until = self.history.end if alias.born is None else alias.born
        weak = _C.weak_ref_tensors(tensor) if alias.strong else tensor
        output = Output(alias, weak, until, self._replays)
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
