"""CUDAGraphWrapper: when graphs and pools go, and what a failed or nested capture leaves behind."""

import contextlib
import gc
import threading
import weakref
from types import SimpleNamespace

import pytest
import torch
from fake_graphs import model, values

from weakref_ext.cudagraph import BreakableCUDAGraphWrapper, CUDAGraphWrapper, _backend, eager_break

BOTH = pytest.mark.parametrize("wrapper", [CUDAGraphWrapper, BreakableCUDAGraphWrapper])


# Pool and lifetime


def test_clear_forgets_everything_and_takes_a_new_pool(fake):
    wrapped = CUDAGraphWrapper(model)
    wrapped(torch.ones(1))
    before = wrapped.pool
    wrapped.clear()
    assert wrapped.report() == []
    assert wrapped.pool != before
    assert "synchronize" in fake.log
    assert values(wrapped(torch.ones(1))) == values(model(torch.ones(1)))


@BOTH
@pytest.mark.parametrize("fails", [False, True])
def test_graphs_go_with_the_last_reference_and_not_at_a_collection(fake, monkeypatch, wrapper, fails):
    graphs, begin = [], fake.begin

    def noted(pool, mode):
        graph = begin(pool, mode)
        graphs.append(weakref.ref(graph))
        return graph

    @eager_break
    def broken(x):
        if fails:
            raise KeyError("mine")
        return x * 2

    monkeypatch.setattr(fake, "begin", noted)
    wrapped = wrapper(lambda x: broken(x + 1) + 1, warmup=0)
    gc.disable()
    try:
        with contextlib.suppress(KeyError):
            wrapped(torch.ones(2))
        wrapped.clear()
        assert graphs
        assert [graph() for graph in graphs] == [None] * len(graphs)
    finally:
        gc.enable()


def test_a_pool_that_was_given_stays(fake):
    wrapped = CUDAGraphWrapper(model, pool=(0, 99))
    wrapped(torch.ones(1))
    wrapped.clear()
    assert wrapped.pool == (0, 99)


# Errors


@pytest.mark.parametrize("at", [("begin", 1), ("end", 1)])
def test_what_cuda_refuses_leaves_no_entry_and_the_next_call_captures(fake, at):
    wrapped = CUDAGraphWrapper(model)
    fake.fail_at = at
    with pytest.raises(RuntimeError, match=f"CUDA error at {at[0]}"):
        wrapped(torch.ones(2))
    assert wrapped.report() == []
    fake.fail_at = None
    assert values(wrapped(torch.ones(2))) == values(model(torch.ones(2)))
    assert fake.log.count("heal") == (at[0] == "end")


def test_an_exception_in_the_function_ends_the_capture(fake):
    fail = []

    def fragile(x):
        y = x * 2
        if fail and fail.pop() == fake.capturing():
            raise KeyError("mine")
        return y

    wrapped = CUDAGraphWrapper(fragile)
    for capturing in (False, True):
        fail[:] = [capturing] * (2 - (not capturing))
        with pytest.raises(KeyError, match="mine"):
            wrapped(torch.ones(2))
        assert wrapped.report() == []
        assert not fake.capturing()
    assert wrapped(torch.ones(2)).tolist() == [2, 2]


def test_an_output_of_a_type_that_is_not_understood_ends_the_capture(fake):
    wrapped = CUDAGraphWrapper(lambda x: (x * 2, [None]))
    with pytest.raises(ValueError, match=r"NoneType.* at out\[1\]\[0\]"):
        wrapped(torch.ones(2))
    assert wrapped.report() == []
    assert not fake.capturing()


def test_an_output_that_changes_between_warm_up_and_capture_is_named(fake):
    sizes = iter([2, 3])
    wrapped = CUDAGraphWrapper(lambda x: [x.repeat(next(sizes))], outputs="strong")
    with pytest.raises(RuntimeError, match=r"out\[0\] is float32\[3\] cpu, was float32\[2\] cpu"):
        wrapped(torch.ones(1))


def test_a_given_pool_that_torch_cannot_use_again_is_left_with_a_warning(fake):
    wrapped = CUDAGraphWrapper(model, pool=(0, 99))
    fake.fail_at = ("end", 1)
    with pytest.raises(RuntimeError, match="CUDA error"), pytest.warns(RuntimeWarning, match="pool of their own"):
        wrapped(torch.ones(2))
    assert wrapped.pool != (0, 99)


@BOTH
def test_a_capture_inside_a_capture_is_refused(fake, wrapper):
    inner = wrapper(model)
    outer = wrapper(lambda x: inner(x)[0], warmup=0)
    with pytest.raises(RuntimeError, match="Nested captures are not supported"):
        outer(torch.ones(2))
    inner(torch.ones(2))  # replays are refused as well
    with pytest.raises(RuntimeError, match="Nested captures are not supported"):
        outer(torch.ones(2))


def test_a_build_without_the_cuda_part_says_so_before_anything_is_captured(monkeypatch):
    monkeypatch.setattr(_backend, "_C", SimpleNamespace())
    with pytest.raises(RuntimeError, match=r"built without its CUDA part.*WEAKREF_EXT_CUDA=1"):
        _backend.Cuda().reserved()


def test_the_active_capture_is_this_threads(fake):
    other = CUDAGraphWrapper(lambda x: x * 3)
    results = []

    def in_thread():
        results.append(other(torch.ones(2)).tolist())

    def busy(x):
        thread = threading.Thread(target=in_thread)
        thread.start()
        thread.join(timeout=0.2)  # captures one at a time: it waits for ours, and is not refused
        results.append(thread)
        return x * 2

    CUDAGraphWrapper(busy, warmup=0)(torch.ones(2))
    results[0].join(timeout=10)
    assert results[1:] == [[3, 3]]
