"""Which verdict each history of a pool gives each alias."""

import pytest
import torch
from made_up_pool import BLOCK, POOL, Graph, Pool
from sanitizer_fixtures import capture, kinds, pool, trace, traced

from weakref_ext import owner_alive, sanitizer, weak_ref_tensors
from weakref_ext.sanitizer import Kind
from weakref_ext.sanitizer._verdict import Action, Alias, Event, History, Span, judge, owner_of


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
        assert owner_of(alias, History(events, 3), 3) is None
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
