"""The sanitizer over real captures: each way in which a weak ref goes wrong, with verdict, exception text and picture.

Pictures and texts go to $OUT/figures if $OUT is set, so that they can be looked at.
"""

import gc
import importlib.util
import os
import pickle
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from raw_graphs import N, capture, equal, full

from weakref_ext import sanitizer, testing, weak_ref_tensors
from weakref_ext.cudagraph import BreakableCUDAGraphWrapper, CUDAGraphWrapper, eager_break
from weakref_ext.sanitizer import Kind, StaleTensorError

pytestmark = pytest.mark.cuda


@pytest.fixture
def pool():
    return torch.cuda.graph_pool_handle()


@pytest.fixture
def figure(request, tmp_path):
    """Saves a report's picture and its table, with the error beside it."""

    def save(report, error=""):
        folder = Path(os.environ["OUT"], "figures") if "OUT" in os.environ else tmp_path
        folder.mkdir(exist_ok=True, parents=True)
        file = folder / f"{request.node.name}.png"
        file.with_suffix(".txt").write_text(f"{report}\n\n{error}\n")
        if importlib.util.find_spec("matplotlib") is None:  # to be drawn elsewhere: pickle.load(...).picture(file)
            file.with_suffix(".pickle").write_bytes(pickle.dumps(report))
        else:
            report.picture(file)
            assert file.stat().st_size > 10_000

    return save


def stale(use):
    with pytest.raises(StaleTensorError) as caught:
        use()
    return caught.value


def model(x):
    h = x * 2
    return h + 1, [h * 3, h - 1]


def test_an_output_is_read_after_a_smaller_size_replayed(figure):
    with sanitizer.guard():
        wrapped = CUDAGraphWrapper(model, key=len)
        big, _ = wrapped(full(1))
        wrapped(full(2, N // 2))
        error = stale(lambda: big + 1)
        assert (error.path, error.overwritten_by) == ("out[0]", f"model(key={N // 2})")
        stale(lambda: big[3:].clone())
        hidden, _ = wrapped(full(3))
        assert equal(hidden, 7)
        report = sanitizer.report()
    by_path = {(v.capture, v.path): v for v in report}
    assert by_path[f"model(key={N})", "out[0]"].captures == (f"model(key={N // 2})",)
    assert by_path[f"model(key={N // 2})", "out[0]"].captures == (f"model(key={N})",)
    figure(report, error)


def test_an_output_is_reused_later_in_its_own_capture(pool, figure):
    x = full(5)
    with sanitizer.guard():
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            doubled = x * 2
            weak = weak_ref_tensors(doubled)
            del doubled
            tripled = x * 3
            kept = weak_ref_tensors(tripled)
            del tripled
        sanitizer.capture("one", graph, {"doubled": weak, "tripled": kept})
        graph.replay()
        error = stale(weak.sum)
        assert equal(kept, 15)
        doubled, tripled = report = sanitizer.report()
    assert equal(weak, 15)  # what the guard kept from the reader: 10 is right
    assert doubled.kind is Kind.OVERWRITTEN
    assert doubled.allocation.address == weak.data_ptr()
    assert tripled.kind is Kind.EXCLUSIVE
    assert "later in the same capture, so it is wrong after every replay" in str(error)
    figure(report, error)


def test_two_wrappers_share_a_pool(pool, figure):
    def embed(x):
        return x * 2

    def head(x):
        return x - 1

    with sanitizer.guard():
        one, two = CUDAGraphWrapper(embed, pool=pool, key=len), CUDAGraphWrapper(head, pool=pool, key=len)
        out = one(full(1))
        assert equal(out, 2)
        other = two(full(1))
        target = full(0)
        error = stale(lambda: torch.add(target, 1, out=out))
        assert equal(other, 0)
        assert error.overwritten_by.endswith(f"head(key={N})")
        assert equal(one(full(4)), 8)
        assert stale(other.sum).overwritten_by.endswith(f"embed(key={N})")
        report = sanitizer.report()
    assert [v.kind for v in report] == [Kind.SHARED] * 2
    figure(report, error)


def test_an_eager_tensor_is_weakened_raw(pool, figure):
    with sanitizer.guard():
        x, eager = full(4), full(4)
        graph, out = capture(lambda: x * 2, pool)
        weak = weak_ref_tensors(eager)
        sanitizer.capture("raw", graph, (out, weak))
        assert equal(weak, 4)
        del eager
        error = stale(lambda: torch.empty(N, device="cuda").copy_(weak))
        inside, outside = report = sanitizer.report()
    assert inside.kind is Kind.EXCLUSIVE
    assert outside.kind is Kind.OUTSIDE
    assert "its owner is gone" in str(error)
    figure(report, error)


def test_a_tensor_is_recarved_between_the_segments_of_a_breakable_capture(pool, figure):
    """SGLang 37448: z = 3x takes the block of 2x, which z + 2x then reads."""
    x = full(5)
    with sanitizer.guard():
        first, doubled = capture(lambda: x * 2, pool)
        sanitizer.capture("forward", first, doubled)
        first.replay()
        assert equal(doubled, 10)  # the break reads it in time
        while_captured = []

        def second_segment():
            z = x * 3
            while_captured.append(str(stale(lambda: z + doubled)))
            return z

        second, out = capture(second_segment, pool)
        gc.collect()  # the caught error's frames own z
        sanitizer.capture("forward", [first, second], out)
        second.replay()
        after = stale(doubled.sum)
        assert equal(out, 15)
        report = sanitizer.report()
    assert [v.kind for v in report] == [Kind.OVERWRITTEN, Kind.EXCLUSIVE]
    assert "is being captured, has used its memory before this read" in while_captured[0]
    assert "(a later segment of it) overwrote it" in str(after)
    figure(report, f"{while_captured[0]}\n\n{after}")


@eager_break
def attention(x):
    return x * 2 + 1


def eagle(x):
    aux = []
    for i in range(4):
        x = attention(x + i) * 0.5
        aux.append(x * 1)
    return x + 1, aux[:3]


@pytest.mark.parametrize("wrapper", [CUDAGraphWrapper, BreakableCUDAGraphWrapper])
@pytest.mark.parametrize("outputs", ["weak", "strong", "copy"])
def test_a_healthy_serving_loop_of_51_sizes_raises_no_alarm(wrapper, outputs, figure):
    sizes = [1, 2, 4, *range(8, 257, 8), *range(272, 513, 16)]
    assert len(sizes) == 51
    with torch.inference_mode(), sanitizer.guard():
        wrapped = wrapper(
            eagle, outputs=outputs, capture_sizes=sizes, make_inputs=lambda n: [torch.zeros(n, 1024, device="cuda")]
        )
        wrapped.capture(progress=False)
        draws = random.Random(0)
        for _ in range(150):
            x = torch.randn(draws.choice(sizes), 1024, device="cuda")
            hidden, aux = wrapped(x)
            expected, expected_aux = eagle(x)
            assert torch.equal(hidden, expected)
            assert all(torch.equal(a, b) for a, b in zip(aux, expected_aux, strict=True))
        report = sanitizer.report()
    assert len(report) == 4 * 51
    # By design: weak outputs live where other sizes have theirs, strong ones outside the pool.
    assert {v.kind for v in report} <= ({Kind.PINNED} if outputs == "strong" else {Kind.SHARED, Kind.EXCLUSIVE})
    figure(report)


def test_a_full_ring_says_so_and_calls_nothing_exclusive(pool):
    x = full(1)
    with sanitizer.trace(capacity=4):
        with pytest.warns(RuntimeWarning, match="ring of 4 events was full"):
            graph, out = capture(lambda: [x + i for i in range(8)], pool)
        sanitizer.capture("many", graph, out)
        report = sanitizer.report()
    assert report.lost > 0
    assert {v.kind for v in report} == {Kind.UNKNOWN}


def test_a_pool_that_was_in_use_before_the_trace_is_not_called_exclusive(pool):
    x = full(1)
    earlier, _ = capture(lambda: x * 2, pool)
    with sanitizer.trace():
        graph, out = capture(lambda: x * 3, pool)
        sanitizer.capture("late", graph, out)
        assert [v.kind for v in sanitizer.report()] == [Kind.UNKNOWN]
    del earlier


def test_a_graph_without_a_pool_of_ours_and_one_that_is_gone():
    x = full(1)
    with sanitizer.trace() as trace:
        graph, out = capture(lambda: x * 2, None)
        other, _ = capture(lambda: x * 3, graph.pool())
        sanitizer.capture("one", graph, out)
        sanitizer.capture("two", other)
        assert trace.report()[0].captures == ("two",)
        other.reset()
        assert trace.report()[0].kind is Kind.EXCLUSIVE


def test_a_trace_leaves_torch_as_it_was(pool):
    x = full(1)
    method = torch.cuda.CUDAGraph.replay
    with sanitizer.trace() as trace:
        graph, out = capture(lambda: x * 2, pool)
    assert torch.cuda.CUDAGraph.replay is method
    seen = trace.history.end
    assert seen >= 2
    capture(lambda: x * 3, pool)
    graph.replay()
    trace._update()
    assert trace.history.end == seen
    assert equal(out, 2)


@pytest.mark.parametrize(
    ("config", "expected"),
    [("expandable_segments:True", "exclusive"), ("backend:cudaMallocAsync", "RuntimeError")],
)
def test_other_allocators_are_followed_or_refused(config, expected):
    code = """
import torch
from weakref_ext import sanitizer, weak_ref_tensors
x, graph = torch.ones(2**20, device="cuda"), torch.cuda.CUDAGraph()
try:
    with sanitizer.trace():
        with torch.cuda.graph(graph):
            weak = weak_ref_tensors(x * 2)
        sanitizer.capture("one", graph, weak)
        print(sanitizer.report()[0])
except RuntimeError:
    print("RuntimeError")
"""
    env = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": config}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    assert done.stdout.strip() == expected, done.stderr


def test_churn_finds_what_the_pool_does_not_keep():
    x = full(2)
    assert testing.churn(lambda: (x * 2, [x + 1, 7])) == []
    held = [full(3) for _ in range(3)]
    ((path, _),) = testing.churn(lambda: (x * 2, held.pop()), keep=weak_ref_tensors)
    assert path == "out[1]"
    held = [full(3) for _ in range(3)]
    assert testing.churn(lambda: (x * 2, held.pop())) == []  # kept strong: the pool does not own it
