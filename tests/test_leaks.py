"""Millions of calls leave no reference and no byte behind, on success and on every error."""

import gc
import itertools
import resource
import sys
from collections import deque

import pytest
import torch
from helpers import Buffers, use_count

import weakref_ext
from weakref_ext import LayerName

GOOD = {
    "T": lambda: torch.randn(2),
    "(2:T,[3:T])": lambda: (torch.randn(2), [torch.randn(2) for _ in range(3)]),
    "mixed": lambda: [torch.randn(2), (10**30, LayerName("a")), [], ()],
    "shared": lambda: [*torch.randn(20, 2).unbind()] * 2,
}
BAD = {
    "at the top": lambda: None,
    "last": lambda: [torch.randn(2), torch.randn(2), None],
    "first": lambda: (1.0, torch.randn(2)),
    "deep": lambda: (torch.randn(2), [torch.randn(2), (torch.randn(2), {1}), torch.randn(2)]),
    "sparse": lambda: [torch.randn(2), torch.eye(2).to_sparse()],
}


def references(out):
    counts = [sys.getrefcount(out), sys.getrefcount(type(out))]
    if isinstance(out, torch.Tensor) and out.layout == torch.strided:
        counts.append(use_count(out))
    if isinstance(out, list | tuple):
        for i in range(len(out)):
            counts += references(out[i])
    return counts


def call(weaken, out, fails):
    if fails:
        try:
            weaken(out)
        except ValueError:
            return
        pytest.fail("not refused")
    weaken(out)


@pytest.mark.parametrize(
    ("make", "fails"),
    [*((m, False) for m in GOOD.values()), *((m, True) for m in BAD.values())],
    ids=[*GOOD, *BAD],
)
def test_10_000_calls_are_exact(make, fails, weaken):
    out = make()
    for _ in range(100):
        call(weaken, out, fails)
    gc.collect()
    gc.disable()
    try:
        before, blocks = references(out), sys.getallocatedblocks()
        for _ in range(10_000):
            call(weaken, out, fails)
        assert references(out) == before
        assert abs(sys.getallocatedblocks() - blocks) < 50  # a leak would be 10,000 at least
    finally:
        gc.enable()


@pytest.mark.parametrize("make", [GOOD["(2:T,[3:T])"], BAD["deep"]], ids=["success", "error"])
def test_memory_stays_flat(make, weaken):
    out = make()
    fails = make is BAD["deep"]

    def peak_after(calls):
        for _ in range(calls):
            call(weaken, out, fails)
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    start = peak_after(20_000)
    assert peak_after(200_000) - start < 1024  # KiB; one leaked alias a call would be 40 MiB


def test_10_million_calls_stay_flat():
    def calls(count):
        deque(map(weakref_ext.weak_ref_tensors, itertools.repeat(out, count)), maxlen=0)
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    out = GOOD["(2:T,[3:T])"]()
    start = calls(100_000)
    assert calls(10_000_000) - start < 1024  # KiB; a leaked byte a call would be 10 MiB


def test_errors_leave_the_memory_of_their_source_free(weaken):
    buffers = Buffers()
    out = [buffers.tensor(4), [buffers.tensor(4), None]]
    with pytest.raises(ValueError, match="NoneType"):
        weaken(out)
    del out
    assert buffers.held() == 0
