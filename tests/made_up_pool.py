"""A graph pool on the CPU: blocks of one buffer, with the events that a real allocator would tell of."""

import torch

from weakref_ext.sanitizer._trace import _EVENT, Packed
from weakref_ext.sanitizer._verdict import Action, Event

POOL = (0, 1)
BLOCK = 64  # bytes


class Pool:
    """``capacity``: events that the ring holds; older ones are lost."""

    def __init__(self, blocks=64, capacity=10**6, seen=True):
        self._memory = bytearray(blocks * BLOCK)
        self.base = torch.frombuffer(self._memory, dtype=torch.uint8).data_ptr()
        self.events = []
        self.capacity = capacity
        self.free = set(range(blocks))
        self.started = False
        if seen:
            self._tell(Action.SEGMENT_ALLOC, self.base, blocks * BLOCK)

    def _tell(self, action, address, size):
        self.events.append(Event(len(self.events), action, -1, address, size, 0, POOL))

    def alloc(self, blocks=1):
        """A float32 tensor over the first run of free blocks that is long enough."""
        at = next(i for i in sorted(self.free) if self.free.issuperset(range(i, i + blocks)))
        self.free -= set(range(at, at + blocks))
        self._tell(Action.ALLOC, self.base + at * BLOCK, blocks * BLOCK)
        return self._tensor(at * BLOCK, blocks * BLOCK)

    def _tensor(self, offset, nbytes):  # a storage of its own, as the allocator would give it
        return torch.frombuffer(self._memory, dtype=torch.float32, count=nbytes // 4, offset=offset)

    def give_back(self, tensor):
        at = (tensor.data_ptr() - self.base) // BLOCK
        self.free |= set(range(at, at + tensor.nbytes // BLOCK))

    def kernel(self, tensor, value):
        """Fills the memory of ``tensor``, and does not own it."""
        offset, nbytes = tensor.data_ptr() - self.base, tensor.nbytes
        return lambda: self._tensor(offset, nbytes).fill_(value)

    # As weakref_ext.sanitizer._trace.Allocator.

    def start(self, capacity):
        self.started = True

    def stop(self):
        self.started = False

    def position(self):
        return len(self.events)

    def read(self, first):
        first = max(first, len(self.events) - self.capacity)
        rows = [(e.address, e.size, e.stream, *e.pool, e.device, e.action) for e in self.events[first:]]
        return Packed(first, b"".join(_EVENT.pack(*row) for row in rows))

    def inside(self, tensors, pool):
        return [pool == POOL and 0 <= t.data_ptr() - self.base < len(self._memory) for t in tensors]


class Graph:
    """Runs ``work`` at a replay. ``trace`` is told of all that it would be told of a torch.cuda.CUDAGraph."""

    def __init__(self, trace, body):
        self.trace = trace
        trace.begin(self, POOL, lambda: None)
        self.out, self.work = body()
        trace.end(self, lambda: None)

    def replay(self):
        self.work()
        self.trace.replayed(self)
