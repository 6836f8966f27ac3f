"""Verdicts, the guard, and the hooks: all that needs no GPU, with made-up pools."""

import copy
import re
import subprocess
import sys
import warnings
from contextlib import contextmanager
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from fake_graphs import FakeBackend
from hypothesis import given, settings
from hypothesis import strategies as st
from made_up_pool import BLOCK, POOL, Graph, Pool

from weakref_ext import own, owner_alive, sanitizer, testing, weak_ref_tensors
from weakref_ext.cudagraph import BreakableCUDAGraphWrapper, CUDAGraphWrapper, _backend, _recording, eager_break
from weakref_ext.sanitizer import Kind, StaleTensorError, _trace
from weakref_ext.sanitizer._hooks import switched_on
from weakref_ext.sanitizer._trace import Output, Trace
from weakref_ext.sanitizer._verdict import Action, Alias, Event, History, Span, home_of, judge, owner_of


@contextmanager
def traced(pool):
    with switched_on(Trace(1000, pool)) as trace:
        yield trace


@pytest.fixture
def pool():
    return Pool()


@pytest.fixture
def trace(pool):
    with traced(pool) as trace:
        yield trace


def capture(trace, pool, value, blocks=1, keep=weak_ref_tensors):
    """A graph that fills one block with ``value``, and what is kept of it, while its block goes back to the pool."""

    def body():
        tensor = pool.alloc(blocks)
        kept = keep(tensor)
        pool.give_back(tensor)
        return kept, pool.kernel(tensor, value)

    graph = Graph(trace, body)
    return graph, graph.out


def kinds(trace):
    return [verdict.kind for verdict in trace.report()]


class TestVerdicts:
    def test_an_output_that_nobody_else_was_given_is_exclusive(self, trace, pool):
        graph, out = capture(trace, pool, 1)
        sanitizer.capture("only", graph, (out, [out[:4]]))
        assert [v.path for v in trace.report()] == ["out[0]", "out[1][0]"]
        assert kinds(trace) == [Kind.EXCLUSIVE] * 2

    def test_two_captures_that_share_a_block_name_each_other(self, trace, pool):
        graphs = []
        for name, blocks in (("big", 3), ("small", 1)):
            graph, out = capture(trace, pool, 1, blocks)
            graphs.append(graph)
            sanitizer.capture(name, graph, out)
        big, small = trace.report()
        assert (big.kind, big.captures) == (Kind.SHARED, ("small",))
        assert (small.kind, small.captures) == (Kind.SHARED, ("big",))
        assert str(big) == "shared with small"
        del graph, graphs[1]  # a graph that is gone does not replay
        assert trace.report()[0].captures == ()

    def test_a_strong_output_is_not_safe_from_an_earlier_capture(self, trace, pool):
        earlier, _ = capture(trace, pool, 1)
        later = Graph(trace, lambda: (pool.alloc(), None))
        sanitizer.capture("earlier", earlier)
        sanitizer.capture("later", later, later.out)
        assert str(trace.report()[0]) == "shared with earlier"

    def test_a_block_handed_out_again_in_the_same_capture(self, trace, pool):
        second = None

        def body():
            nonlocal second
            first = pool.alloc(2)
            weak = weak_ref_tensors(first)
            pool.give_back(first)
            second = pool.alloc(1)
            return (weak, weak_ref_tensors(second)), None

        graph = Graph(trace, body)
        sanitizer.capture("one", graph, graph.out)
        first, later = trace.report()
        assert first.kind is Kind.OVERWRITTEN
        assert (first.allocation.position, first.allocation.size) == (2, BLOCK)
        assert str(first) == f"overwritten in its own capture by allocation #2 (64 bytes at {pool.base:#x})"
        assert later.kind is Kind.PINNED
        del second
        assert kinds(trace)[1] is Kind.EXCLUSIVE

    def test_a_block_used_before_in_the_same_capture_does_no_harm(self, trace, pool):
        def body():
            for _ in range(3):
                pool.give_back(pool.alloc(2))
            out = pool.alloc()
            return weak_ref_tensors(out), None

        graph = Graph(trace, body)
        sanitizer.capture("one", graph, graph.out)
        assert kinds(trace) == [Kind.EXCLUSIVE]

    def test_a_block_recarved_between_the_segments_of_a_capture(self, trace, pool):
        segments = [capture(trace, pool, value) for value in (1, 2)]
        sanitizer.capture("broken", [graph for graph, _ in segments], [out for _, out in segments])
        assert kinds(trace) == [Kind.OVERWRITTEN, Kind.EXCLUSIVE]

    def test_memory_of_no_pool(self, trace, pool):
        graph, _ = capture(trace, pool, 1)
        eager = torch.ones(3)
        weak = weak_ref_tensors(eager)
        sanitizer.capture("raw", graph, [weak, torch.ones(1), torch.empty(0)])
        assert (
            str(trace.report()[0]) == "not in the pool: nothing but an owner keeps its memory, and its owner is alive"
        )
        del eager
        assert [str(v) for v in trace.report()] == [
            "not in the pool: nothing but an owner keeps its memory, and its owner is gone",
            "pinned by an owner",
            "exclusive: it has no elements",
        ]

    def test_a_pool_that_was_in_use_before_is_not_called_exclusive(self):
        pool = Pool(seen=False)
        with traced(pool) as trace:
            graph, out = capture(trace, pool, 1)
            sanitizer.capture("late", graph, out)
            assert [str(v) for v in trace.report()] == ["unknown: its pool was in use before the trace began"]

    def test_a_weak_ref_of_unknown_age_over_a_block_used_twice_is_unknown(self, trace, pool):
        def body():
            pool.give_back(pool.alloc())
            out = pool.alloc()
            return torch.ops.weakref_ext.weak_ref_tensors.ivalue(out), None  # nobody hears C++

        graph = Graph(trace, body)
        sanitizer.capture("one", graph, graph.out)
        assert "the trace did not see when the weak ref was made" in str(trace.report()[0])

    def test_a_full_ring_says_so_and_calls_nothing_exclusive(self):
        pool = Pool(capacity=2)
        with traced(pool) as trace:
            graph, out = capture(trace, pool, 1)
            sanitizer.capture("fits", graph, out)

            def many():
                kept = [weak_ref_tensors(pool.alloc()) for _ in range(4)]
                return kept, None

            with pytest.warns(RuntimeWarning, match="ring of 1000 events was full"):
                graph = Graph(trace, many)
            sanitizer.capture("does not", graph, graph.out)
            report = trace.report()
        assert report.lost == 2
        assert Kind.EXCLUSIVE not in {verdict.kind for verdict in report}
        assert "The ring was full: 2 events are lost" in str(report)

    def test_memory_that_the_pool_gave_back(self, trace, pool):
        graph, out = capture(trace, pool, 1)
        sanitizer.capture("gone", graph, out)
        pool._tell(Action.SEGMENT_FREE, pool.base, 64 * BLOCK)
        assert str(trace.report()[0]) == "not in the pool: the pool has given its memory back"

    def test_what_no_capture_explains_is_named_too(self, trace, pool):
        graph, out = capture(trace, pool, 1)
        pool.alloc()
        sanitizer.capture("one", graph, out)
        assert str(trace.report()[0]) == "shared with code outside every traced capture"

    def test_an_output_that_is_handed_on_by_another_capture(self, trace, pool):
        def body():
            tensor = pool.alloc()  # stays handed out
            return weak_ref_tensors(tensor), None

        first = Graph(trace, body)
        second, _ = capture(trace, pool, 1)
        sanitizer.capture("first", first, first.out)
        sanitizer.capture("second", second, first.out)
        assert kinds(trace) == [Kind.EXCLUSIVE] * 2

    def test_memory_that_a_pool_had_once_is_not_the_pool_s(self):
        events = [
            Event(0, Action.SEGMENT_ALLOC, 0, 0, 8, 0, POOL),
            Event(1, Action.ALLOC, 0, 0, 8, 0, POOL),
            Event(2, Action.SEGMENT_FREE, 0, 0, 8, 0, POOL),
        ]
        span = Span("A", POOL, 0, 0, end=3)
        span.update(History(events, 3))
        alias = Alias("out", "A", POOL, 0, 0, 8, 3, False)
        assert owner_of(alias, History(events, 3)) is None
        assert judge(alias, History(events, 3), [span]).kind is Kind.OUTSIDE

    def test_the_trace_keeps_no_memory(self, trace, pool):
        graph, _ = capture(trace, pool, 1)
        strong = torch.ones(3)
        weak = weak_ref_tensors(strong)
        sanitizer.capture("one", graph, [strong, strong[1:]])
        del strong
        assert not owner_alive(weak)

    def test_names_are_unique_and_graphs_known(self, trace, pool):
        graphs = [capture(trace, pool, 1)[0] for _ in range(3)]
        for graph in graphs:
            sanitizer.capture("step", graph, torch.ones(1))
        assert [v.capture for v in trace.report()] == ["step", "step #2", "step #3"]
        with pytest.raises(ValueError, match="step: its graph was not captured while the trace was on"):
            sanitizer.capture("step", kinds)

    def test_without_a_trace_there_is_nothing_to_report(self):
        with pytest.raises(RuntimeError, match="no trace is on"):
            sanitizer.report()

    def test_the_table(self, trace, pool):
        graph, out = capture(trace, pool, 1, 16)
        sanitizer.capture("size 4", graph, (out, None))
        lines = str(trace.report()).splitlines()
        assert lines == [
            "capture  output  bytes  verdict",
            "size 4   out[0]  1,024  exclusive",
        ]


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
        assert owner_of(alias, history) == block
        trace.outputs.append(Output(alias, torch.empty(0), block, home_of(block, spans)))
    memory, replayed = {}, set()
    for at in order:
        span = spans[at % len(spans)]
        write(memory, span)
        trace.replayed(graphs[at % len(spans)])
        replayed.add(span)
        for output in trace.outputs:
            if output.home in replayed:
                assert (output.stale is None) == holds(memory, output.alias, output.owner)


USES = {
    "operator": lambda t: t + 1,
    "in place": lambda t: t.add_(1),
    "out=": lambda t: torch.add(torch.ones(16), 1, out=t),
    "out= of a view": lambda t: torch.add(torch.ones(8), 1, out=t[:8]),
    "copy_ out of it": lambda t: torch.empty(16).copy_(t),
    "view": lambda t: t[2:].sum(),
    "detach": lambda t: t.detach() * 2,
    "data": lambda t: t.data.mul_(2),
    "in a list": lambda t: torch.cat([torch.ones(1), t]),
    "foreach": lambda t: torch._foreach_add([t], 1),
    "item": lambda t: t[0].item(),
    "bool": lambda t: bool(t[0]),
    "repr": repr,
    "numpy": lambda t: t.numpy(),
    "tolist": lambda t: t.tolist(),
    "dlpack": lambda t: torch.from_dlpack(t),
    "deepcopy": copy.deepcopy,
    "format": "{}".format,
    "custom operator": lambda t: torch.ops.aten.clone.default(t),
    "own": own,
}


class TestGuard:
    @pytest.mark.parametrize("use", USES.values(), ids=USES.keys())
    def test_any_use_of_a_stale_output_raises_and_of_a_fresh_one_works(self, use, trace, pool):
        (big, out), (small, _) = capture(trace, pool, 1), capture(trace, pool, 2)
        sanitizer.capture("big", big, [out])
        sanitizer.capture("small", small)
        with sanitizer.guard():
            big.replay()
            use(out)
            small.replay()
            before = out.data_ptr(), out.shape, out.dtype  # metadata is no use
            with pytest.raises(StaleTensorError) as caught:
                use(out)
            assert pool._tensor(0, BLOCK).eq(2).all()  # nothing was written
            big.replay()
            use(out)
        small.replay()
        use(out)  # the guard is off
        assert before == (out.data_ptr(), out.shape, out.dtype)
        error = caught.value
        assert (error.path, error.capture, error.overwritten_by) == ("out[0]", "big", "small")
        assert str(error) == (
            "out[0] of capture 'big' is stale: the replay of 'small' overwrote it, which uses the same memory. "
            "Consume it before that replay, or clone it, or own() the output, before it."
        )

    def test_a_view_made_while_it_was_fresh_is_stale_too(self, trace, pool):
        (big, out), (small, _) = capture(trace, pool, 1, 2), capture(trace, pool, 2, 1)
        sanitizer.capture("big", big, out)
        with sanitizer.guard():
            big.replay()
            hit, spared, clone = out.detach()[:8], out.data[16:], out.clone()
            small.replay()
            with pytest.raises(StaleTensorError, match="capture 2"):
                hit.sum()
            assert clone.eq(1).all()
            with pytest.raises(StaleTensorError):
                spared.sum()  # part of an output that is stale as a whole

    def test_outputs_that_share_a_storage_are_told_apart(self, trace, pool):
        def body():
            tensor = pool.alloc(2)
            weak = weak_ref_tensors([tensor[:16], tensor[16:]])
            pool.give_back(tensor)
            return weak, pool.kernel(tensor, 1)

        graph = Graph(trace, body)
        small, _ = capture(trace, pool, 2, 1)
        sanitizer.capture("both", graph, graph.out)
        with sanitizer.guard():
            graph.replay()
            small.replay()
            graph.out[1].sum()
            with pytest.raises(StaleTensorError, match=r"out\[0\]"):
                graph.out[0].sum()

    def test_a_new_owner_of_the_same_memory_may_use_it(self, trace, pool):
        (big, out), (small, other) = capture(trace, pool, 1), capture(trace, pool, 2)
        sanitizer.capture("big", big, out)
        sanitizer.capture("small", small, other)
        with sanitizer.guard():
            big.replay()
            small.replay()
            assert other.eq(2).all()
            with pytest.raises(StaleTensorError):
                out.sum()

    def test_one_that_is_overwritten_in_its_own_capture_is_never_right(self, trace, pool):
        def body():
            first = pool.alloc()
            weak = weak_ref_tensors(first)
            pool.give_back(first)
            again = pool.alloc()
            return weak, pool.kernel(again, 2)

        graph = Graph(trace, body)
        sanitizer.capture("one", graph, graph.out)
        with sanitizer.guard():
            for _ in range(2):
                graph.replay()
                with pytest.raises(
                    StaleTensorError, match=r"allocation #2 .* later in the same capture, so it is wrong"
                ):
                    graph.out.sum()

    def test_a_later_segment_of_the_same_capture(self, trace, pool):
        (first, out), (second, _) = capture(trace, pool, 1), capture(trace, pool, 2)
        sanitizer.capture("broken", [first, second], out)
        with sanitizer.guard():
            first.replay()
            out.sum()  # a break between the segments may read it
            second.replay()
            with pytest.raises(StaleTensorError, match=r"'broken' \(a later segment of it\) overwrote it"):
                out.sum()

    def test_a_read_that_is_being_captured_after_its_memory_was_used(self, trace, pool):
        graph, state = capture(trace, pool, 1)
        sanitizer.capture("first", graph, state)

        def body():
            state.sum()  # not yet
            pool.alloc()
            with pytest.raises(StaleTensorError, match="'capture 2', which is being captured, has used its memory"):
                state.sum()
            return None, None

        with sanitizer.guard():
            graph.replay()
            Graph(trace, body)

    def test_memory_that_no_pool_keeps(self, trace, pool):
        graph, _ = capture(trace, pool, 1)
        eager = torch.ones(3)
        weak = weak_ref_tensors(eager)
        sanitizer.capture("raw", graph, weak)
        with sanitizer.guard():
            weak.sum()
            del eager
            with pytest.raises(StaleTensorError, match="not in the graph pool and its owner is gone"):
                weak.sum()

    def test_tensors_without_storage_pass(self, trace, pool):
        graph, out = capture(trace, pool, 1)
        sanitizer.capture("one", graph, out)
        with sanitizer.guard():
            assert torch.vmap(lambda x: x.sum())(torch.ones(2, 3)).tolist() == [3, 3]
            assert torch.eye(2).to_sparse().mul(2).to_dense().sum() == 4

    def test_a_graph_that_cannot_replay_any_more_overwrites_nothing(self, trace, pool):
        (big, out), (small, _) = capture(trace, pool, 1), capture(trace, pool, 2)
        sanitizer.capture("big", big, out)
        trace.reset(small)
        assert kinds(trace) == [Kind.EXCLUSIVE]
        with sanitizer.guard():
            big.replay()
            small.replay()
            out.sum()

    def test_a_failed_capture_overwrites_nothing(self, trace, pool):
        graph, out = capture(trace, pool, 1)
        sanitizer.capture("good", graph, out)

        def fail():
            raise RuntimeError("CUDA error")

        failed = Graph.__new__(Graph)
        trace.begin(failed, POOL, lambda: None)
        pool.alloc()
        with pytest.raises(RuntimeError, match="CUDA error"):
            trace.end(failed, fail)
        assert kinds(trace) == [Kind.EXCLUSIVE]


class TestHooks:
    def test_everything_is_undone(self):
        names = ("capture_begin", "capture_end", "replay", "reset")
        methods = [torch.cuda.CUDAGraph.__dict__[name] for name in names]
        with pytest.raises(KeyError), sanitizer.guard() as trace:  # noqa: PT012
            assert trace is not None
            assert [torch.cuda.CUDAGraph.__dict__[name] for name in names] != methods
            with sanitizer.trace() as inner:
                assert inner is trace
            assert _recording.captured is not None
            raise KeyError
        assert [torch.cuda.CUDAGraph.__dict__[name] for name in names] == methods
        assert _recording.captured is None
        assert sanitizer.active() is None
        weak_ref_tensors(torch.ones(1))

    def test_torchs_graphs_tell_the_trace(self, monkeypatch, pool):
        class TorchGraph:  # the methods of torch.cuda.CUDAGraph that can be patched
            calls: ClassVar[list] = []

            def capture_begin(self, pool=None, capture_error_mode="global"):
                self.calls.append((pool, capture_error_mode))

            def capture_end(self):
                self.calls.append("end")

            def replay(self):
                self.calls.append("replay")

            def reset(self):
                self.calls.append("reset")

        monkeypatch.setattr(torch.cuda, "CUDAGraph", TorchGraph)
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: POOL)
        with switched_on(Trace(1000, pool)) as trace:
            first, second = TorchGraph(), TorchGraph()
            first.capture_begin(capture_error_mode="relaxed")
            tensor = pool.alloc()
            out = weak_ref_tensors(tensor)
            sanitizer.capture("inside", first, out)
            pool.give_back(tensor)
            first.capture_end()
            assert kinds(trace) == [Kind.PINNED]
            second.capture_begin(POOL)
            pool.alloc()
            second.capture_end()
            sanitizer.capture("other", second)
            second.replay()
            assert trace.find_stale(out)[1].capture == "other"
            first.replay()
            assert trace.find_stale(out) is None
            second.reset()
            assert kinds(trace) == [Kind.PINNED]
        assert TorchGraph.calls == [(POOL, "relaxed"), "end", (POOL, "global"), "end", "replay", "replay", "reset"]
        TorchGraph.calls.clear()
        TorchGraph().capture_begin()
        assert TorchGraph.calls == [(None, "global")]

    def test_events_are_read_as_the_native_part_writes_them(self, monkeypatch):
        row = _trace._EVENT.pack(0x7F0000000200, 96, 5, 0, 1, 2, 6)
        assert len(row) == 48
        native = SimpleNamespace(trace_start=lambda n: None, trace_position=lambda: 8, trace_read=lambda n: (7, row))
        monkeypatch.setattr(_trace, "_C", native)
        source = _trace.Allocator()
        assert (source.position(), source.read(3)) == (0, (3, []))
        source.start(4)
        assert source.position() == 8
        event = Event(7, Action.SEGMENT_UNMAP, 2, 0x7F0000000200, 96, 5, (0, 1))
        assert source.read(3) == (7, [event])

    def test_a_trace_that_is_over_does_not_read_the_next_ones_events(self, monkeypatch):
        native = SimpleNamespace(trace_start=lambda n: None, trace_stop=lambda: None, trace_read=lambda n: (9, b""))
        monkeypatch.setattr(_trace, "_C", native)
        source = _trace.Allocator()
        source.start(4)
        source.stop()
        assert source.read(3) == (3, [])

    def test_a_build_without_cuda_says_so_at_the_first_capture(self, monkeypatch):
        monkeypatch.setattr(_trace, "_C", SimpleNamespace())
        with pytest.raises(RuntimeError, match="was built without its CUDA part"):
            _trace.Allocator().start(4)

    def test_weak_refs_come_out_the_same_while_someone_listens(self, weaken, trace):
        out = (torch.ones(2), [torch.ones(3), 7])
        weak = weaken(out)
        assert weak[0].data_ptr() == out[0].data_ptr()
        assert trace._born[weak[1][0]] == len(trace._source.events)
        with pytest.raises(ValueError, match="NoneType"):
            weaken((out[0], None))

    def test_wrappers_register_themselves(self, monkeypatch, trace):
        backend = FakeBackend()
        begin, end = backend.begin, backend.end

        def traced_begin(pool, mode):
            graph = begin(pool, mode)
            trace.begin(graph, pool, lambda: None)
            return graph

        backend.begin = traced_begin
        backend.end = lambda graph, **more: trace.end(graph, lambda: end(graph, **more))
        monkeypatch.setattr(_backend, "BACKEND", backend)

        def step(x):
            return x * 2, [x + 1]

        by_shape, by_key = CUDAGraphWrapper(step), CUDAGraphWrapper(step, key=len, outputs="strong")
        broken = BreakableCUDAGraphWrapper(lambda x: step(eager_break(step)(x)[0]))
        for wrapped in (by_shape, by_key, broken):
            wrapped(torch.ones(4))
            wrapped(torch.ones(2))
        names = [f"{step.__qualname__}({text})" for text in ("[4]", "[2]", "key=4", "key=2")]
        names += [f"{broken.fn.__qualname__}({text})" for text in ("[4]", "[2]")]
        assert [span.capture for span in trace.spans] == [*names[:5], names[4], *[names[5]] * 2]
        assert [(v.capture, v.path) for v in trace.report()] == [(n, p) for n in names for p in ("out[0]", "out[1][0]")]

    def test_the_environment_switches_it_on(self):
        code = "import weakref_ext; print(len(weakref_ext.sanitizer.report()))"
        run = [sys.executable, "-W", "error", "-c", code]
        done = subprocess.run(run, capture_output=True, text=True, env={"WEAKREF_EXT_SANITIZER": "1"})
        assert (done.stdout, done.stderr) == ("0\n", "")
        done = subprocess.run(run, capture_output=True, text=True, env={})
        assert "no attribute 'sanitizer'" in done.stderr


class TestPicture:
    def report(self, trace, pool):
        graphs = []
        for name, blocks in (("size 8", 6), ("size 4", 3), ("size 1", 1)):
            graph, out = capture(trace, pool, 1, blocks)
            sanitizer.capture(name, graph, out)
            graphs.append(graph)
        eager = torch.ones(4)
        sanitizer.capture("raw", graphs[0], weak_ref_tensors(eager))
        return trace.report()

    def test_every_capture_and_every_kind_is_named(self, trace, pool, tmp_path):
        pytest.importorskip("matplotlib")
        report = self.report(trace, pool)
        with warnings.catch_warnings(action="ignore"):  # of matplotlib's own
            report.picture(tmp_path / "pool.svg")
            report.picture(tmp_path / "pool.png")
        text = re.sub(r"\s+", " ", (tmp_path / "pool.svg").read_text())
        assert (tmp_path / "pool.png").stat().st_size > 10_000
        for shown in (
            "size 4",
            "size 1",
            "raw",
            "shared",
            "overwrites an output",
            "not in the pool",
            "block handed out",
        ):
            assert f"<!-- {shown} -->" in text

    def test_nothing_to_draw_is_no_error(self, trace, tmp_path):
        pytest.importorskip("matplotlib")
        trace.report().picture(tmp_path / "pool.png")

    def test_without_matplotlib_it_says_what_to_install(self, trace, pool, monkeypatch, tmp_path):
        monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
        with pytest.raises(ImportError, match=r"pip install 'weakref_ext\[bench\]'"):
            self.report(trace, pool).picture(tmp_path / "pool.png")


class TestChurn:
    @pytest.fixture(autouse=True)
    def backend(self, monkeypatch):
        monkeypatch.setattr(_backend, "BACKEND", FakeBackend())

    def test_what_stays_right_is_not_listed(self):
        x = torch.ones(64)
        assert testing.churn(lambda: (x * 2, [x + 1, 7])) == []
        assert testing.churn(lambda: x * float("nan")) == []

    def test_what_changes_is_listed_with_its_path_and_the_moment(self):
        x, calls = torch.ones(64), []

        def counts():
            calls.append(1)
            return x * 2, [x * len(calls)]

        assert testing.churn(counts) == [("out[1][0]", "replay")]

        def late():  # the second capture writes to what the first one keeps
            calls.append(1)
            return x * 2, y if len(calls) < 3 else y.add_(1)

        y = torch.ones(64)
        calls.clear()
        assert testing.churn(late) == [("out[1]", "churn")]

    def test_a_refused_output_leaves_the_capture(self):
        with pytest.raises(ValueError, match=r"NoneType.* at out\[1\]"):
            testing.churn(lambda: (torch.ones(1), None))
