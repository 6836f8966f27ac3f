"""A weak ref keeps nothing alive; the walk holds nothing after it returns."""

import gc
import sys
import weakref

import pytest
import torch
from helpers import Buffers, tensors, use_count

import weakref_ext
from weakref_ext import LayerName

STRUCTURES = {
    "T": lambda new: new(4),
    "[6:T]": lambda new: [new(4) for _ in range(6)],
    "(2:T,[3:T])": lambda new: (new(4), [new(4), new(4), new(4)]),
    "[6:T,int]": lambda new: [*(new(4) for _ in range(5)), 3],
    "(T,[])": lambda new: (new(4), []),
    "[T,LayerName]": lambda new: [new(4), LayerName("a")],
    "shared": lambda new: list(new(4, 4).unbind()),
    "repeated": lambda new: [new(4)] * 3,
    "10,000 tensors": lambda new: [new(1) for _ in range(10_000)],
}


@pytest.mark.parametrize("make", STRUCTURES.values(), ids=STRUCTURES.keys())
def test_memory_goes_with_the_source(make, weaken):
    buffers = Buffers()
    out = make(buffers.tensor)
    weak = weaken(out)
    everything = buffers.held()
    assert everything == len(buffers._buffers)
    assert all(weakref_ext.owner_alive(tensor) for tensor in tensors(weak))
    del out
    assert buffers.held() == 0
    assert not any(weakref_ext.owner_alive(tensor) for tensor in tensors(weak))


def test_depth_900_keeps_nothing(weaken):
    buffers = Buffers()
    out = buffers.tensor(4)
    for _ in range(900):
        out = [out]
    weak = weaken(out)
    del out
    assert buffers.held() == 0
    assert len(tensors(weak)) == 1


def test_the_nested_list_is_not_left_strong(weaken):
    """The leak of one-level copies: (hidden, [aux, aux, aux]) kept the inner list."""
    buffers = Buffers()
    out = (buffers.tensor(8), [buffers.tensor(8) for _ in range(3)])
    inner_gone = weakref.ref(out[1][0])
    weak = weaken(out)
    del out
    gc.collect()
    assert inner_gone() is None
    assert buffers.held() == 0
    del weak


def test_an_empty_view_does_not_pin_its_base(weaken):
    buffers = Buffers()
    base = buffers.tensor(1000)
    weak = weaken((base[3:3],))
    del base
    assert buffers.held() == 0
    assert weak[0].shape == (0,)


@pytest.mark.parametrize("derive", [lambda w: w, lambda w: w.exp(), lambda w: w * 2], ids=["leaf", "exp", "mul"])
def test_autograd_does_not_make_it_strong(derive, weaken):
    """An op that autograd sees would save its input, and a weak ref of a leaf would own it."""
    leaf = torch.nn.Parameter(torch.randn(64))
    source = derive(leaf)
    weak = weaken([source])
    before = use_count(source)
    weak_again = weaken(source)
    assert use_count(source) == before
    leaf = source = None
    assert not weakref_ext.owner_alive(weak[0])
    assert not weakref_ext.owner_alive(weak_again)


def test_use_counts_of_sources_do_not_change(weaken):
    xs = [torch.randn(3) for _ in range(20)]
    before = [(sys.getrefcount(x), use_count(x)) for x in xs]
    weak = weaken((xs, xs))
    assert [(sys.getrefcount(x), use_count(x)) for x in xs] == before
    del weak


def test_aliases_outlive_everything_safely(weaken):
    weak = weaken([torch.randn(3) for _ in range(10)])
    second = weaken(weak)
    del weak
    assert not any(weakref_ext.owner_alive(tensor) for tensor in second)
