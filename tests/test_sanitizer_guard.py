"""Using a stale alias raises, by name, and nothing else does."""

import copy

import pytest
import torch
from made_up_pool import BLOCK, POOL, Graph
from sanitizer_fixtures import capture, kinds, pool, trace, traced

from weakref_ext import own, sanitizer, weak_ref_tensors
from weakref_ext.sanitizer import Kind, StaleTensorError

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

    def test_captures_of_several_threads_at_once_are_told_apart(self, trace, pool):
        (first, out), longer, shorter = capture(trace, pool, 1), Graph.__new__(Graph), Graph.__new__(Graph)
        sanitizer.capture("first", first, out)

        def body():
            trace.begin(shorter, (0, 2), lambda: None)
            trace.end(shorter, lambda: None)
            assert kinds(trace) == [Kind.EXCLUSIVE]
            out.sum()
            tensor = pool.alloc()
            with pytest.raises(StaleTensorError, match="'capture 3', which is being captured, has used its memory"):
                out.sum()
            return weak_ref_tensors(tensor), pool.kernel(tensor, 2)

        with sanitizer.guard():
            trace.begin(longer, (0, 2), lambda: None)
            second = Graph(trace, body)
            sanitizer.capture("second", second, second.out)
            for still_capturing in (True, False):
                first.replay()
                assert out.eq(1).all()
                second.replay()
                assert second.out.eq(2).all()
                with pytest.raises(StaleTensorError, match="the replay of 'second' overwrote it"):
                    out.sum()
                if still_capturing:
                    trace.end(longer, lambda: None)
        assert [verdict.captures for verdict in trace.report()] == [("second",), ("first",)]

    def test_replays_before_the_registration_count_once_its_own_graph_was_among_them(self, trace, pool):
        big, (out, again) = capture(trace, pool, 1, keep=lambda t: (weak_ref_tensors(t), weak_ref_tensors(t)))
        small, _ = capture(trace, pool, 2)
        small.replay()
        sanitizer.capture("early", big, out)
        with sanitizer.guard():
            out.sum()  # its memory never held its values
        big.replay()
        small.replay()
        sanitizer.capture("late", big, again)
        for output in (out, again):
            with sanitizer.guard(), pytest.raises(StaleTensorError):
                output.sum()
        big.replay()
        with sanitizer.guard():
            assert out.eq(1).all()
            assert again.eq(1).all()

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
        pool.give_back(pool.alloc())
        with pytest.raises(RuntimeError, match="CUDA error"):
            trace.end(failed, fail)
        for end in (trace.reset, lambda abandoned: None):
            trace.begin(abandoned := Graph.__new__(Graph), POOL, lambda: None)
            pool.give_back(pool.alloc())
            end(abandoned)
            del abandoned
        assert kinds(trace) == [Kind.EXCLUSIVE]
        other, also = capture(trace, pool, 2)
        sanitizer.capture("after it", other, also)
        with sanitizer.guard():
            graph.replay()
            assert out.eq(1).all()
            other.replay()
            assert also.eq(2).all()
