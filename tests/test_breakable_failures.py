"""BreakableCUDAGraphWrapper: what a replay cannot follow is named, and a failure anywhere leaves no entry."""

import threading

import pytest
import torch

from weakref_ext.cudagraph import BreakableCUDAGraphWrapper, CUDAGraphWrapper, eager_break

pytestmark = pytest.mark.usefixtures("fake")


@eager_break
def attention(q, scale=3):
    return q * scale


# What a replay cannot follow

CHANGES = {
    "shape": (lambda n: torch.ones(2 + n), r"out is float32\[3\] cpu, was float32\[2\] cpu"),
    "structure": (lambda n: [torch.ones(2)] * (1 + n), r"out\[1\] \(float32\[2\] cpu\) was not there"),
    "value": (lambda n: (torch.ones(2), n), r"out\[1\] is 1, was 0"),
}


@pytest.mark.parametrize(("result", "says"), CHANGES.values(), ids=CHANGES.keys())
def test_a_break_that_returns_something_else_is_named(result, says):
    n = [0]

    @eager_break
    def changes(x):
        return result(n[0])

    wrapped = BreakableCUDAGraphWrapper(lambda x: (changes(x), x * 2)[1])
    wrapped(torch.ones(2))
    n[0] = 1
    with pytest.raises(RuntimeError, match=r"the eager break .*changes returned something else .*: " + says):
        wrapped(torch.ones(2))


def test_a_break_that_returned_its_argument_and_then_another_tensor_is_refused():
    new = []

    @eager_break
    def sometimes(x):
        return x + 1 if new else x

    wrapped = BreakableCUDAGraphWrapper(lambda x: sometimes(x * 2) * 1)
    wrapped(torch.ones(2))
    new.append(1)
    with pytest.raises(RuntimeError, match=r"at another address than at its capture: out was an argument.*clone"):
        wrapped(torch.ones(2))


def test_a_cpu_scalar_that_a_break_returns_counts_as_its_value(fake):
    fake.device_type = "meta"
    n = [1]

    @eager_break
    def scalar():
        return torch.tensor(n[0])

    wrapped = BreakableCUDAGraphWrapper(lambda: [scalar() * 0][0:0])
    wrapped()
    n[0] = 2
    with pytest.raises(RuntimeError, match="out is 2, was 1"):
        wrapped()


# Failures


@pytest.mark.parametrize("at", [(name, n) for name in ("begin", "end") for n in (1, 2, 3)], ids=str)
def test_a_failure_of_any_segment_leaves_no_entry(fake, at):
    wrapped = BreakableCUDAGraphWrapper(lambda x: attention(attention(x + 1) * 2) + 1)
    fake.fail_at = at
    with pytest.raises(RuntimeError, match=f"CUDA error at {at[0]}"):
        wrapped(torch.ones(2))
    assert wrapped.report() == []
    assert not fake.capturing()
    fake.fail_at = None
    assert wrapped(torch.ones(2)).tolist() == [37, 37]
    assert wrapped(torch.zeros(2)).tolist() == [19, 19]


@pytest.mark.parametrize("where", range(5))
def test_an_exception_anywhere_leaves_no_entry_and_breaks_work_after_it(fake, where):
    armed = [True]

    def maybe(n):
        if armed and n == where:
            raise KeyError(n)

    @eager_break
    def fragile(x, n):
        maybe(n)
        return x * 2

    def forward(x):
        maybe(0)
        x = fragile(x + 1, 1)
        maybe(2)
        x = fragile(x + 1, 3)
        maybe(4)
        return x + 1

    wrapped = BreakableCUDAGraphWrapper(forward, warmup=0)
    with pytest.raises(KeyError):
        wrapped(torch.ones(2))
    assert wrapped.report() == []
    assert not fake.capturing()
    armed.clear()
    assert wrapped(torch.ones(2)).tolist() == [11, 11]
    assert wrapped(torch.zeros(2)).tolist() == [7, 7]
    assert wrapped.report()[0].segments == 3


def test_a_forward_that_swallows_a_failed_break_is_not_captured(fake):
    @eager_break
    def fails(x):
        raise KeyError("mine")

    def forward(x):
        try:
            fails(x * 2)
        except KeyError:
            x = x + 1
        return x

    wrapped = BreakableCUDAGraphWrapper(forward)
    with pytest.raises(RuntimeError, match="the forward went on") as raised:
        wrapped(torch.ones(2))
    assert isinstance(raised.value.__cause__, KeyError)
    assert wrapped.report() == []


def test_an_exception_in_a_break_at_a_replay_leaves_the_entry(fake):
    fail = []

    @eager_break
    def fragile(x):
        if fail:
            raise KeyError(fail.pop())
        return x * 2

    wrapped = BreakableCUDAGraphWrapper(lambda x: fragile(x + 1) + 1)
    wrapped(torch.ones(2))
    fail.append("mine")
    with pytest.raises(KeyError, match="mine"):
        wrapped(torch.ones(2))
    assert wrapped(torch.zeros(2)).tolist() == [3, 3]


def test_a_graph_of_the_same_pool_inside_a_break_is_refused_and_of_another_pool_runs():
    shared, other = (CUDAGraphWrapper(lambda x: x * 2, pool=(0, pool)) for pool in (50, 51))
    shared(torch.ones(4))
    inner = [other]

    @eager_break
    def calls(x):
        return inner[0](x) + 0

    outer = BreakableCUDAGraphWrapper(lambda x: calls(x + 1) + 1, pool=(0, 50), warmup=0)
    assert outer(torch.ones(4)).tolist() == [5] * 4
    assert outer(torch.zeros(4)).tolist() == [3] * 4
    inner[0] = shared
    for n in (4, 3):  # at a replay, and at a capture
        with pytest.raises(RuntimeError, match=r"same pool: .* pool of its own"):
            outer(torch.ones(n))


def test_a_break_called_on_another_thread_is_a_plain_call():
    results = []

    def forward(x):
        thread = threading.Thread(target=lambda: results.append(attention(torch.ones(1)).item()))
        thread.start()
        thread.join()
        return attention(x * 2)

    wrapped = BreakableCUDAGraphWrapper(forward, warmup=0)
    assert wrapped(torch.ones(2)).tolist() == [6, 6]
    assert results == [3]
    assert wrapped.report()[0].segments == 2
