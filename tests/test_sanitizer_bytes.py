"""Verdicts and stale outputs are those of a naive map of bytes."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from made_up_pool import POOL
from sanitizer_fixtures import capture, kinds, pool, trace, traced

from weakref_ext.sanitizer import Kind
from weakref_ext.sanitizer._trace import Output, Trace
from weakref_ext.sanitizer._verdict import Action, Alias, Event, History, Span, judge, owner_of


@st.composite
def programs(draw):
    """Spans of allocations (begin, end in bytes), each with its capture, and aliases of some blocks."""
    spans, events, aliases = [], [Event(0, Action.SEGMENT_ALLOC, 0, 0, 12, 0, POOL)], []
    for _ in range(draw(st.integers(1, 5))):
        span = Span(draw(st.sampled_from("ABC")), POOL, 0, len(events))
        for _ in range(draw(st.integers(0, 4))):
            begin = draw(st.integers(0, 9))
            block = Event(len(events), Action.ALLOC, 0, begin, draw(st.integers(1, 3)), 0, POOL)
            events.append(block)
            if draw(st.booleans()):
                low = draw(st.integers(block.address, block.address + block.size - 1))
                high = draw(st.integers(low + 1, block.address + block.size))
                aliases.append((block, Alias("out", span.capture, POOL, 0, low, high, len(events), True)))
        spans.append(span)
        span.end = len(events)
        span.update(History(events, len(events)))
    return spans, History(events, len(events)), aliases


def write(memory, span):
    for block in span.blocks:
        for byte in range(block.address, block.address + block.size):
            memory[byte] = block.position


def holds(memory, alias, block):
    return all(memory.get(byte) == block.position for byte in range(alias.begin, alias.end))


def reference(alias, block, spans):
    """What happens to the alias's bytes, one by one, when its capture replays and then another one."""
    memory = {}
    own = [span for span in spans if span.capture == alias.capture]
    for span in own:
        write(memory, span)
    if not holds(memory, alias, block):
        return Kind.OVERWRITTEN, None
    others = []
    for other in spans:
        after = dict(memory)
        write(after, other)
        if other not in own and not holds(after, alias, block):
            others.append(other.capture)
    return (Kind.SHARED, tuple(dict.fromkeys(others))) if others else (Kind.EXCLUSIVE, ())


@settings(deadline=None, max_examples=500)
@given(program=programs(), lost=st.integers(0, 5))
def test_verdicts_are_those_of_a_map_of_bytes(program, lost):
    spans, history, aliases = program
    for block, alias in aliases:
        verdict = judge(alias, history, spans)
        kind, captures = reference(alias, block, spans)
        assert verdict.kind is kind
        assert captures is None or verdict.captures == captures
        shorter = History(history.events[lost:], history.end, min(lost, len(history.events)))
        assert judge(alias, shorter, spans).kind is not Kind.EXCLUSIVE or lost == 0


@settings(deadline=None, max_examples=300)
@given(program=programs(), order=st.lists(st.integers(0, 4), max_size=12))
def test_an_output_is_stale_exactly_when_the_map_of_bytes_says_so(program, order):
    spans, history, aliases = program
    trace = Trace(1000)
    trace.history, trace.spans = history, spans

    class AGraph:
        pass

    graphs = [AGraph() for _ in spans]
    trace._graphs.update(zip(graphs, spans, strict=True))
    for block, alias in aliases:
        assert owner_of(alias, history, alias.born) == block
        trace.outputs.append(Output(alias, torch.empty(0), alias.born, since=0))
    memory, replayed = {}, set()
    for at in order:
        span = spans[at % len(spans)]
        write(memory, span)
        trace.replayed(graphs[at % len(spans)])
        replayed.add(span)
        for output in trace.outputs:
            by = trace.taken_by(output)
            if output.home in replayed:
                assert (by is None) == holds(memory, output.alias, output.owner)
