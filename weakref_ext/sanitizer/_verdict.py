"""What became of a weak ref's memory: a pure function of what the allocator handed out, and to which captures.

A graph writes to the blocks that its pool handed out while it was captured, and a replay writes to them again, in the
same order. So an alias holds its values from the replay of the graph that was handed its block (its owner's) until the
replay of any other graph that was handed an overlapping block, before or after; and never holds them, if the
overlapping block was handed out later in the same graph.
"""

import bisect
import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

Pool = Any  # a graph pool handle: (int, int)


class Action(enum.IntEnum):
    """The values are those of torch's ``TraceEntry::Action``."""

    ALLOC = 0
    SEGMENT_ALLOC = 3
    SEGMENT_FREE = 4
    SEGMENT_MAP = 5
    SEGMENT_UNMAP = 6


class Event(NamedTuple):
    """Memory of a graph pool that the allocator handed out, or took from or gave back to the device. Sizes in bytes."""

    position: int
    action: int
    device: int
    address: int
    size: int
    stream: int
    pool: Pool

    def overlaps(self, begin: int, end: int) -> bool:
        return self.address < end and begin < self.address + self.size

    def __str__(self) -> str:
        return f"allocation #{self.position} ({self.size} bytes at {self.address:#x})"


@dataclass
class History:
    """Events in order. ``end``: how many there have been; ``lost``: how many of them are not here."""

    events: list[Event] = field(default_factory=list)
    end: int = 0
    lost: int = 0

    def between(self, begin: int, end: int) -> list[Event]:
        low, high = (bisect.bisect_left(self.events, at, key=lambda event: event.position) for at in (begin, end))
        return self.events[low:high]


def merged(ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The same addresses as sorted ranges that do not touch."""
    pieces: list[tuple[int, int]] = []
    for begin, end in sorted(ranges):
        if pieces and begin <= pieces[-1][1]:
            pieces[-1] = pieces[-1][0], max(pieces[-1][1], end)
        else:
            pieces.append((begin, end))
    return pieces


@dataclass(eq=False)
class Span:
    """One captured graph: the events from ``begin`` to ``end`` are its own, if they are of its pool and device.

    A capture that is broken into segments has several spans. ``alive``: whether the graph can replay. ``replayed``: the
    place of its last replay in the order of all replays, 0 for none.
    """

    capture: str
    pool: Pool
    device: int
    begin: int
    blocks: list[Event] = field(default_factory=list)
    end: int | None = None
    alive: bool = True
    replayed: int = 0
    ranges: list[tuple[int, int]] = field(default_factory=list)

    @property
    def is_open(self) -> bool:
        """Whether it is still being captured."""
        return self.end is None

    def close(self, position: Callable[[], int]) -> None:
        """Its graph replays no more, and if it was still being captured, no more is."""
        self.alive = False
        if self.end is None:
            self.end = position()

    def was_handed(self, block: Event) -> bool:
        during = self.begin <= block.position and (self.end is None or block.position < self.end)
        return during and (block.action, block.pool, block.device) == (Action.ALLOC, self.pool, self.device)

    def update(self, history: History) -> None:
        until = history.end if self.end is None else self.end
        self.hold([event for event in history.between(self.begin, until) if self.was_handed(event)])

    def hold(self, blocks: list[Event]) -> None:
        self.blocks = blocks
        self.ranges = merged([(block.address, block.address + block.size) for block in self.blocks])

    def writes_to(self, alias: "Alias") -> bool:
        """Whether a replay writes to the alias's bytes."""
        after = bisect.bisect_left(self.ranges, (alias.end, 0))
        return alias.device == self.device and after > 0 and self.ranges[after - 1][1] > alias.begin

    def later_block(self, alias: "Alias", position: int) -> Event | None:
        """The first block over the alias's bytes that was handed out after ``position``."""
        if not self.writes_to(alias):
            return None
        return next((b for b in self.blocks if b.position > position and b.overlaps(alias.begin, alias.end)), None)


@dataclass(eq=False)
class Alias:
    """A weak ref among the outputs of a capture.

    Attributes:
        path: where it stands in the output.
        begin, end: the addresses that it reaches.
        born: the number of events when it was made, while its owner was alive; None if that is not known.
        in_pool: whether the allocator says that the capture's pool holds its memory.
        strong: whether it is no weak ref at all, but owns its memory.
    """

    path: str
    capture: str
    pool: Pool
    device: int
    begin: int
    end: int
    born: int | None
    in_pool: bool
    strong: bool = False


class Kind(enum.StrEnum):
    EXCLUSIVE = "exclusive"
    SHARED = "shared with"
    OVERWRITTEN = "overwritten in its own capture by"
    OUTSIDE = "not in the pool"
    PINNED = "pinned by an owner"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Verdict:
    """What is known of one alias.

    Attributes:
        capture, path: which alias.
        kind: ``EXCLUSIVE``: nobody else writes to its memory. ``SHARED``: valid until one of ``captures`` replays.
            ``OVERWRITTEN``: wrong after every replay. ``OUTSIDE``: no graph keeps its memory. ``PINNED``: exclusive, or
            outside the pool, for as long as its owner lives. ``UNKNOWN``: the trace did not see enough, see ``reason``.
        captures: the other captures that write to its memory, in their order.
        allocation: the block that overwrites it in its own capture.
        address, nbytes: the memory that it reaches.
    """

    capture: str
    path: str
    kind: Kind
    address: int
    nbytes: int
    captures: tuple[str, ...] = ()
    allocation: Event | None = None
    reason: str = ""

    def __str__(self) -> str:
        if self.kind is Kind.OVERWRITTEN:
            return f"{self.kind} {self.allocation}"
        if self.kind is Kind.SHARED:
            more = f" and {len(self.captures) - 4} more" if len(self.captures) > 4 else ""
            return f"{self.kind} {', '.join(self.captures[:4])}{more}"
        return f"{self.kind}: {self.reason}" if self.reason else str(self.kind)


_GIVEN_BACK = (Action.SEGMENT_FREE, Action.SEGMENT_UNMAP)


def untraced(history: History, spans: Sequence[Span]) -> list[Span]:
    """What no capture explains: one more span for each device, so that its blocks count as somebody else's."""
    known = {block.position for span in spans for block in span.blocks}
    rest = [e for e in history.events if e.action == Action.ALLOC and e.position not in known]
    found = [Span("code outside every traced capture", None, device, 0, end=0) for device in {e.device for e in rest}]
    for span in found:
        span.hold([block for block in rest if block.device == span.device])
    return found


def owner_of(alias: Alias, history: History, until: int) -> Event | None:
    """The block that the alias was made over: the last one there before event number ``until``."""
    for event in reversed(history.between(0, until)):
        if event.device == alias.device and event.overlaps(alias.begin, alias.end):
            if event.action == Action.ALLOC:
                return event if event.address <= alias.begin and alias.end <= event.address + event.size else None
            if event.action in _GIVEN_BACK:
                return None
    return None


def home_of(block: Event, spans: Sequence[Span]) -> Span | None:
    """The graph in whose capture the block was handed out."""
    return next((span for span in spans if span.was_handed(block)), None)


def _seen_whole(alias: Alias, owner: Event, history: History) -> bool:
    """Whether the trace saw the memory come to the pool, so that it saw every block that was ever handed out there."""
    gaps = [(alias.begin, alias.end)]
    for event in history.between(0, owner.position):
        if event.action in (Action.SEGMENT_ALLOC, Action.SEGMENT_MAP) and event.device == alias.device:
            begin, end = event.address, event.address + event.size
            gaps = [piece for b, e in gaps for piece in ((b, min(e, begin)), (max(b, end), e)) if piece[0] < piece[1]]
    return history.lost == 0 and not gaps


def judge(alias: Alias, history: History, spans: Sequence[Span], *, owner_alive: bool = False) -> Verdict:
    """The verdict on one alias. Never ``EXCLUSIVE`` on a history with a gap."""

    def verdict(kind: Kind, **more: Any) -> Verdict:
        return Verdict(alias.capture, alias.path, kind, alias.begin, alias.end - alias.begin, **more)

    if alias.begin == alias.end:
        return verdict(Kind.EXCLUSIVE, reason="it has no elements")
    owner = owner_of(alias, history, history.end if alias.born is None else alias.born)
    if owner is None or owner.pool != alias.pool:
        if alias.strong:
            return verdict(Kind.PINNED)
        if not alias.in_pool:
            alive = "its owner is alive" if owner_alive else "its owner is gone"
            return verdict(Kind.OUTSIDE, reason=f"nothing but an owner keeps its memory, and {alive}")
        return verdict(Kind.UNKNOWN, reason=_gap(history) or "its memory was handed out before the trace began")

    since = history.between(owner.position, history.end)
    if any(e.action in _GIVEN_BACK and e.overlaps(alias.begin, alias.end) for e in since):
        return verdict(Kind.OUTSIDE, reason="the pool has given its memory back")
    own = [span for span in spans if span.capture == alias.capture]
    if alias.born is None:
        handed_out = (e for e in history.events if e.action == Action.ALLOC and e.device == alias.device)
        if sum(e.overlaps(alias.begin, alias.end) for e in handed_out) > 1:
            reason = "its memory was handed out several times, and the trace did not see when the weak ref was made"
            return verdict(Kind.UNKNOWN, reason=reason)
    home = home_of(owner, spans)
    others = [s.capture for s in spans if s.alive and s not in own and s is not home and s.writes_to(alias)]
    captures = tuple(dict.fromkeys(others))
    for span in own:
        later = span.later_block(alias, owner.position)
        if later is not None:
            return verdict(Kind.OVERWRITTEN, allocation=later, captures=captures)
    if captures:
        return verdict(Kind.SHARED, captures=captures)
    if owner_alive:
        return verdict(Kind.PINNED)
    if not _seen_whole(alias, owner, history):
        return verdict(Kind.UNKNOWN, reason=_gap(history) or "its pool was in use before the trace began")
    return verdict(Kind.EXCLUSIVE)


def _gap(history: History) -> str:
    return f"the ring was full and lost {history.lost} events: give trace() more capacity" if history.lost else ""
