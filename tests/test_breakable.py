"""BreakableCUDAGraphWrapper over recorded operators: segments, breaks, what crosses them, and failures."""

import pytest
import torch

from weakref_ext import LayerName, is_weak_ref
from weakref_ext.cudagraph import BreakableCUDAGraphWrapper, CUDAGraphWrapper, eager_break

pytestmark = pytest.mark.usefixtures("fake")


def check(function, *, times=3, **options):
    """The wrapper agrees with the function over several inputs, the first call included; returns the wrapper."""
    wrapped = BreakableCUDAGraphWrapper(function, **options)
    for i in range(times):
        x = torch.arange(4.0) + 10 * i
        assert wrapped(x).tolist() == function(x).tolist()
    return wrapped


@eager_break
def attention(q, scale=3):
    return q * scale


def test_a_forward_without_breaks_is_one_graph(fake):
    wrapped = check(lambda x: x * 2 + 1)
    assert wrapped.report()[0].segments == 1
    assert fake.log.count("begin") == 1


def test_two_breaks_make_three_graphs():
    wrapped = check(lambda x: attention(attention(x + 1) - 2, scale=5) * 7)
    assert wrapped.report()[0].segments == 3


def test_a_break_runs_once_a_call_with_real_values_from_the_start():
    seen = []

    @eager_break
    def look(x):
        seen.append(x.tolist())
        return x + 0

    wrapped = BreakableCUDAGraphWrapper(lambda x: look(x * 2) + 1, warmup=0)
    for i in range(3):
        assert wrapped(torch.full((2,), float(i))).tolist() == [2 * i + 1] * 2
    assert seen == [[0, 0], [2, 2], [4, 4]]


def test_a_branch_on_data_inside_a_break_follows_the_data():
    @eager_break
    def relu_sum(x):
        return x.sum() * 0 + (x.sum().item() if x.sum().item() > 0 else -1)

    check(lambda x: relu_sum(x - 12) + x)


def test_a_break_that_writes_to_its_argument_and_returns_nothing():
    @eager_break
    def fill(q, out):
        out.copy_(q * 3)

    def forward(x):
        q = x + 1
        out = torch.empty_like(q)
        fill(q, out)
        return out * 2

    check(forward)


def test_a_break_that_returns_its_argument():
    @eager_break
    def in_place(x):
        return x.mul_(3)

    def forward(x):
        y = x + 1
        z = in_place(y)
        return z + y  # one tensor by two names

    check(forward)


def test_a_break_that_returns_the_same_memory_every_time_is_read_in_place():
    cache = torch.zeros(4)

    @eager_break
    def update(x):
        cache.add_(x)
        return cache

    def forward(x):
        c = update(x * 2)
        c.mul_(2)
        return c + x

    wrapped = BreakableCUDAGraphWrapper(forward)
    x = torch.ones(4)
    wrapped(x)
    cache.zero_()
    assert wrapped(x).tolist() == [5] * 4
    assert cache.tolist() == [4] * 4
    assert wrapped(x).tolist() == [13] * 4


def test_a_break_that_returns_its_buffers_in_turn_keeps_them():
    buffers, turn = [torch.zeros(4), torch.zeros(4)], [0]

    @eager_break
    def double_buffered(x):
        turn[0] += 1
        return buffers[turn[0] % 2].copy_(x * turn[0])

    wrapped = BreakableCUDAGraphWrapper(lambda x: double_buffered(x + 0) + 1)
    for n in (2, 3, 4):
        assert wrapped(torch.ones(4)).tolist() == [n + 1] * 4
    assert [b.tolist() for b in buffers] == [[4] * 4, [3] * 4]


def test_nested_structures_cross_a_break_both_ways():
    @eager_break
    def mix(qkv, *, meta):
        q, (k, v) = qkv
        meta["seen"].append(1)  # the function's own list each time
        return {"out": [q + k, v * meta["scale"]], "n": len(meta["seen"]), "name": meta["name"]}

    def forward(x):
        result = mix([x, (x * 2, x * 3)], meta={"scale": 5, "seen": [0], "name": LayerName("l.0"), "none": None})
        assert result["name"] == LayerName("l.0")
        return result["out"][0] * result["out"][1] + result["n"]

    check(forward)


def test_the_same_tensor_returned_twice_is_one_tensor():
    @eager_break
    def twice(x):
        y = x + 1
        return y, y

    def forward(x):
        a, b = twice(x * 1)
        a.add_(5)
        return a + b

    check(forward)


def test_a_break_inside_a_break_runs_inline():
    @eager_break
    def outer(x):
        return attention(x) + 1

    assert check(lambda x: outer(x * 2) + 1).report()[0].segments == 2


def test_outside_a_breakable_capture_a_break_is_a_plain_call():
    assert attention(torch.ones(2)).tolist() == [3, 3]
    wrapped = CUDAGraphWrapper(lambda x: attention(x * 2) + 1)
    for i in range(2):
        assert wrapped(torch.full((2,), float(i))).tolist() == [6 * i + 1] * 2
    assert wrapped.report()[0].segments == 1


def test_stored_arguments_are_weak_and_code_sees_them_strong_at_the_capture():
    weak = []

    @eager_break
    def look(x):
        weak.append(is_weak_ref(x))
        return x * 1

    wrapped = BreakableCUDAGraphWrapper(lambda x: look(x + 1) + 1)
    wrapped(torch.ones(2))
    wrapped(torch.ones(2))
    assert weak == [False, False, True]  # warm-up, capture, replay


@pytest.mark.parametrize("outputs", ["weak", "strong", "copy"])
def test_two_sizes_in_turn(outputs):
    wrapped = BreakableCUDAGraphWrapper(lambda x: (attention(x * 2) + 1, [attention(x) - 1]), outputs=outputs)
    for n in (4, 2, 4, 2):
        x = torch.full((n,), float(n))
        a, (b,) = wrapped(x)
        assert (a.tolist(), b.tolist()) == ([6 * n + 1] * n, [3 * n - 1] * n)


def test_no_grad_inference_and_grad_mode_mix():
    wrapped = BreakableCUDAGraphWrapper(lambda x: attention(x * 2) + 1)
    with torch.inference_mode():
        assert wrapped(torch.ones(2)).tolist() == [7, 7]
    assert wrapped(torch.zeros(2, requires_grad=True)).tolist() == [1, 1]
    with torch.no_grad():
        assert wrapped(torch.ones(2)).tolist() == [7, 7]
