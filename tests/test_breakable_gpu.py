"""BreakableCUDAGraphWrapper on a GPU: right where torch.cuda.graph with unchecked weak refs goes wrong.

Tests named after a public report do both, so that they are known to see the fault.
"""

import gc

import pytest
import torch
from raw_graphs import N, capture, churn, equal, full, strong

from weakref_ext import is_weak_ref, weak_ref_tensors
from weakref_ext.cudagraph import BreakableCUDAGraphWrapper, CUDAGraphWrapper, eager_break

pytestmark = pytest.mark.cuda


@pytest.fixture
def pool():
    return torch.cuda.graph_pool_handle()


@eager_break
def scale(x, by=3):
    return x * by


def test_sglang_37606_a_break_argument_whose_block_another_capture_got(pool):
    x = full(2)
    large, argument = capture(lambda: x * 1, pool)
    _small, other = capture(lambda: x * 5, pool, strong)
    assert other.data_ptr() == argument.data_ptr()
    other.fill_(-999)
    assert equal(argument, -999)  # the corruption: the break would read the other bucket's tensor
    large.replay()
    assert equal(other, 2)  # and the other way round

    seen = []

    @eager_break
    def attention(y):
        seen.append(float(y[0]))
        return y * 10

    wrapped = BreakableCUDAGraphWrapper(lambda x: attention(x * 1) + 1)
    for n in (N, N - 64, N, N - 64, N):
        seen.clear()
        value = n % 7 + 1
        assert equal(wrapped(full(value, n)), 10 * value + 1)
        assert seen[-1] == value


def test_sglang_37448_a_later_segment_that_got_the_block_of_an_earlier_one(pool):
    x = full(5)
    first, doubled = capture(lambda: x * 2, pool)
    second, out = capture(lambda: x * 3 + doubled, pool)
    first.replay()
    second.replay()
    assert equal(out, 30)  # the corruption, at every replay: 25 is right

    @eager_break
    def attention(q, k, v, out):
        out.copy_(q + k + v)

    def forward(x):
        q, k, v, out = x * 2, x * 4, x * 6, torch.empty_like(x)
        attention(q, k, v, out)
        z = x * 3  # a new block, while q is still to be read
        return z + q, [out, v - k]

    wrapped = BreakableCUDAGraphWrapper(forward)
    for n in (N, N // 2, N, N // 4, N // 2, N):  # large to small, and the large one again
        hidden, (attended, rest) = wrapped(full(5, n))
        assert equal(hidden, 25)
        assert equal(attended, 60)
        assert equal(rest, 10)


def test_sglang_30584_tensorrt_llm_16609_what_a_break_returns_survives_a_churning_allocator():
    weak = weak_ref_tensors(full(2) * 2)
    victim = churn(7, weak)
    assert equal(weak, 7)  # the corruption: the break's result was in nobody's pool
    weak.copy_(full(9))
    assert equal(victim, 9)  # and a replay that copies to it destroys another tensor

    wrapped = BreakableCUDAGraphWrapper(lambda x: (scale(x + 1) * 2, [scale(x)]))
    for value in range(3):
        hidden, (last,) = wrapped(full(value))
        churned = [full(-5) for _ in range(16)]
        assert equal(hidden, 6 * (value + 1))
        assert equal(last, 3 * value)
        assert all(equal(t, -5) for t in churned)


def test_megatron_3970_an_argument_that_no_pool_owns_is_kept():
    weak = weak_ref_tensors(full(4))
    churn(7, weak)
    assert equal(weak, 7)  # the corruption

    state = [full(4)]

    @eager_break
    def add(x, y):
        return x + y

    def forward(x):
        return add(x * 1, state[0]) * 1

    wrapped = BreakableCUDAGraphWrapper(forward)
    assert equal(wrapped(full(1)), 5)
    state.clear()
    gc.collect()
    torch.cuda.empty_cache()
    churned = [full(-5) for _ in range(16)]
    assert equal(wrapped(full(2)), 6)
    assert all(equal(t, -5) for t in churned)


def test_tensorrt_llm_13354_a_break_that_returns_a_new_address_every_time(pool):
    x = full(1)
    eager = x * 3
    graph, out = capture(lambda: eager + 1, pool)
    x.fill_(2)
    fresh = x * 3
    assert fresh.data_ptr() != eager.data_ptr()
    graph.replay()
    assert equal(out, 4)  # the corruption: the segment read the address of the capture, 7 is right

    held = []

    @eager_break
    def fresh_each_time(x):
        held.append(x * 3)
        return held[-1]

    wrapped = BreakableCUDAGraphWrapper(lambda x: fresh_each_time(x + 0) + 1)
    for value in range(4):
        assert equal(wrapped(full(value)), 3 * value + 1)
    assert len({t.data_ptr() for t in held}) == len(held)


def test_stored_arguments_are_weak_where_the_pool_owns_them():
    weight, kinds = full(2), []

    @eager_break
    def look(activation, weight, static):
        kinds.append([is_weak_ref(t) for t in (activation, weight, static)])
        return activation * weight

    wrapped = BreakableCUDAGraphWrapper(lambda x: look(x + 1, weight, x) + x)
    for value in range(2):
        assert equal(wrapped(full(value)), 2 * (value + 1) + value)
    assert kinds == [[False] * 3, [False] * 3, [True, False, False]]


@pytest.mark.parametrize("outputs", ["weak", "strong", "copy"])
def test_many_breaks_and_sizes_in_any_order(outputs):
    def forward(x):
        aux = []
        for i in range(6):
            x = scale(x * 2 - i, by=2) + torch.relu(x)
            if i % 2:
                aux.append(x)
        return x, aux

    wrapped = BreakableCUDAGraphWrapper(forward, outputs=outputs)
    for n in (N, 1000, N // 2, 1000, N, 7, N // 2):
        x = torch.randn(n, device="cuda")
        hidden, aux = wrapped(x)
        expected, expected_aux = forward(x)
        assert torch.equal(hidden, expected)
        assert all(torch.equal(a, b) for a, b in zip(aux, expected_aux, strict=True))
    assert {row.segments for row in wrapped.report()} == {7}
    assert outputs == "strong" or {row.pinned_bytes for row in wrapped.report()} == {0}


def test_breaks_at_both_ends_and_next_to_each_other():
    wrapped = BreakableCUDAGraphWrapper(lambda x: scale(scale(x)))
    for value in range(3):
        assert equal(wrapped(full(value)), 9 * value)


def test_the_pool_of_a_broken_forward_costs_the_largest_size():
    def grown(sizes):
        wrapped = BreakableCUDAGraphWrapper(lambda x: (scale(x * 2) + 1, [scale(x) * 2]))
        for n in sizes:
            wrapped(full(1, n))
        return sum(row.pool_bytes for row in wrapped.report())

    assert grown([16 * N, 8 * N, 4 * N]) == grown([16 * N])


def test_a_break_may_read_the_device_and_branch():
    @eager_break
    def branch(x):
        return x + 1 if x[0].item() > 2 else x - 1

    wrapped = BreakableCUDAGraphWrapper(lambda x: branch(x * 2) * 10)
    assert [float(wrapped(full(value))[0]) for value in (0, 1, 2, 1)] == [-10, 10, 50, 10]


def test_a_replay_of_the_same_pool_inside_a_break_is_refused(pool):
    inner = CUDAGraphWrapper(lambda x: x * 2, pool=pool)
    inner(full(1))
    outer = BreakableCUDAGraphWrapper(lambda x: eager_break(lambda y: inner(y) + 0)(x + 1) + 1, pool=pool, warmup=0)
    with pytest.raises(RuntimeError, match="same pool"):
        outer(full(1))
    other = CUDAGraphWrapper(lambda x: x * 2)
    outer = BreakableCUDAGraphWrapper(lambda x: eager_break(lambda y: other(y) + 0)(x + 1) + 1, pool=pool, warmup=0)
    for value in range(3):
        assert equal(outer(full(value)), 2 * (value + 1) + 1)


def sync():
    torch.cuda.current_stream().synchronize()


def refuse():
    raise KeyError("mine")


@pytest.mark.parametrize("fail", [sync, refuse], ids=["cuda", "python"])
@pytest.mark.parametrize("point", range(5))
def test_a_failure_in_any_segment_or_break_leaves_the_device_usable(fail, point):
    armed = [True]

    def maybe(n):
        # a break may synchronize, so there only the exception is a failure
        if armed[0] and n == point and (fail is refuse or torch.cuda.is_current_stream_capturing()):
            fail()

    @eager_break
    def fragile(x, n):
        maybe(n)
        return x * 2

    def forward(x):
        maybe(0)
        x = fragile(x + 1, 1)
        maybe(2)
        x = fragile(x + torch.rand_like(x) * 0, 3)
        maybe(4)
        return x + 1

    stream = torch.cuda.current_stream()
    wrapped = BreakableCUDAGraphWrapper(forward, warmup=0)
    if fail is refuse or point % 2 == 0:
        with pytest.raises((RuntimeError, KeyError)):
            wrapped(full(1))
        assert wrapped.report() == []
    armed[0] = False
    assert torch.cuda.current_stream() == stream
    assert torch.rand(4, device="cuda").shape == (4,)
    for value, n in ((1, N), (2, 1000), (3, N)):
        assert equal(wrapped(full(value, n)), 4 * (value + 1) + 1)
    assert [row.segments for row in wrapped.report()] == [3, 3]
