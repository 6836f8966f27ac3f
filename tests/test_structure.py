"""The same structure comes back, at any depth and width, with every tensor an alias."""

import pytest
import torch
from conftest import ENTRIES
from helpers import assert_same, reference, tensors
from hypothesis import given, settings
from hypothesis import strategies as st

import weakref_ext
from weakref_ext import LayerName


def t(*shape):
    return torch.randn(*shape)


def nested(depth):
    out = t(3)
    for level in range(depth):
        out = [out] if level % 2 else (out,)
    return out


STRUCTURES = {
    "T": lambda: t(2, 3),
    "[6:T]": lambda: [t(i + 1, 2) for i in range(6)],
    "(2:T,[3:T])": lambda: (t(4, 8), [t(4, 8), t(4, 8), t(4, 8)]),
    "[6:T,int]": lambda: [*(t(2) for _ in range(5)), 7],
    "(T,[])": lambda: (t(2), []),
    "[T,LayerName]": lambda: [t(2), LayerName("model.layers.0.attn")],
    "(1:T)": lambda: (t(1),),
    "()": lambda: (),
    "bools": lambda: (True, [False, t(1)]),
    "depth 900": lambda: nested(900),
    "10,000 tensors": lambda: [t(2) for _ in range(10_000)],
}


@pytest.mark.parametrize("make", STRUCTURES.values(), ids=STRUCTURES.keys())
def test_every_structure_comes_back_with_aliases(make, weaken):
    out = make()
    weak = weaken(out)
    assert_same(weak, reference(out))
    assert all(weakref_ext.is_weak_ref(tensor) for tensor in tensors(weak))


def test_passed_objects_are_the_same_objects(weaken):
    name, number = LayerName("layer"), 10**30
    weak = weaken([name, number, True])
    assert weak[0] is name
    assert weak[1] is number
    assert weak[2] is True


def test_containers_are_new_ones(weaken):
    inner = [t(1)]
    out = (inner, inner)
    weak = weaken(out)
    assert weak[0] is not inner
    assert weak is not out


def test_one_tensor_gives_one_alias(weaken):
    x, y = t(3), t(3)
    weak = weaken([x, (y, x), [[x]]])
    assert weak[0] is weak[1][1] is weak[2][0][0]
    assert weak[1][0] is not weak[0]


@pytest.mark.parametrize("count", [3, 100])
def test_tensors_that_share_a_storage_give_aliases_that_share_one(count, weaken):
    base = t(count, 4)
    other = t(4)
    weak = weaken([*base.unbind(), other])
    storages = {tensor.untyped_storage()._cdata for tensor in weak[:-1]}
    assert len(storages) == 1
    assert storages.isdisjoint({base.untyped_storage()._cdata, weak[-1].untyped_storage()._cdata})


@pytest.mark.parametrize("count", [5, 40])
def test_repeats_are_found_among_many(count, weaken):
    xs = [t(2) for _ in range(count)]
    weak = weaken((xs, xs[::-1]))
    assert all(a is b for a, b in zip(weak[0], reversed(weak[1]), strict=True))
    assert len({id(a) for a in weak[0]}) == count


leaves = st.one_of(
    st.builds(lambda shape: torch.zeros(shape), st.lists(st.integers(0, 3), max_size=4)),
    st.integers(),
    st.booleans(),
    st.builds(LayerName, st.text(max_size=3)),
)
structures = st.recursive(leaves, lambda inner: st.lists(inner, max_size=5) | st.lists(inner, max_size=5).map(tuple))


@pytest.mark.parametrize("entry", ENTRIES.values(), ids=ENTRIES.keys())
@settings(deadline=None, max_examples=200)
@given(out=structures)
def test_any_structure_agrees_with_the_reference_walker(entry, out):
    assert_same(entry(out), reference(out))
