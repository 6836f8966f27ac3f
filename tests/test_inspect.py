"""What is in a structure, what pins memory and by which path, and the way back to owning tensors."""

import pytest
import torch
from helpers import geometry
from test_alias import VIEWS

import weakref_ext
from weakref_ext import LayerName, describe, nbytes, own, pinned, testing


@pytest.mark.parametrize(
    ("out", "text"),
    [
        (torch.ones(1), "T"),
        ((torch.ones(1), [torch.ones(1)] * 3), "(2:T,[3:T])"),
        ([torch.ones(1)] * 5 + [3], "[6:T,int]"),
        ([1, 2, torch.ones(1), 3], "[4:int,T,int]"),
        ((torch.ones(1), []), "(2:T,[0:])"),
        ([torch.ones(1), LayerName("a")], "[2:T,LayerName]"),
        ({"a": torch.ones(1), "b": {}}, "{2:T,{0:}}"),
        (testing.Point(torch.ones(1), [torch.ones(2)]), "Point(2:T,[1:T])"),
        (testing.Output(torch.ones(1), ()), "Output(3:T,(0:),int)"),
        ((None, 1.5, "x", True, {1}), "(5:NoneType,float,str,bool,set)"),
        (torch.nn.Parameter(torch.ones(1)), "T"),
        (torch.eye(2).to_sparse(), "T"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_describe(out, text):
    assert describe(out) == text


def test_describe_stops_at_a_cycle():
    out = []
    out.append(out)
    with pytest.raises(RecursionError, match="nested more than 1000"):
        describe(out)


def test_nbytes_counts_distinct_storages_once_and_whole():
    base = torch.zeros(10)
    out = (base[:2], {"a": base[5:], "b": [torch.zeros(3, dtype=torch.int8)]}, 4)
    assert nbytes(out) == 43
    assert nbytes(weakref_ext.weak_ref_tensors(out)) == 43
    assert nbytes([weakref_ext.weak_ref_tensors(base), base]) == 40
    assert nbytes(([], torch.empty(0))) == 0


@pytest.mark.parametrize("query", [nbytes, pinned, own])
def test_queries_refuse_what_they_do_not_understand(query):
    with pytest.raises(ValueError, match=r"NoneType'> at out\[1\]\['a'\]"):
        query((torch.ones(1), {"a": None}))
    query((torch.ones(1), {"a": None}), passthrough=(type(None),))


def test_pinned_names_what_someone_kept():
    out = (torch.zeros(4), [torch.zeros(8), torch.zeros(8)[2:]], {"x": torch.zeros(1)})
    weak = weakref_ext.weak_ref_tensors(out)
    assert pinned(weak) == [("out[0]", 16), ("out[1][0]", 32), ("out[1][1]", 32), ("out[2]['x']", 4)]
    kept = out[1]
    del out
    assert pinned(weak) == [("out[1][0]", 32), ("out[1][1]", 32)]
    kept.pop()
    assert pinned(weak) == [("out[1][0]", 32)]
    del kept
    assert pinned(weak) == []


def test_pinned_shows_what_a_one_level_copy_leaves_strong():
    out = (torch.zeros(4), [torch.zeros(8)])
    one_level = (weakref_ext.weak_ref_tensors(out[0]), out[1])
    del out
    assert pinned(one_level) == [("out[1][0]", 32)]


def test_pinned_counts_a_shared_storage_once():
    base = torch.zeros(6)
    weak = weakref_ext.weak_ref_tensors([base[:1], base[1:]])
    assert pinned(weak) == [("out[0]", 24)]


@pytest.mark.parametrize("name", VIEWS)
def test_own_keeps_geometry_and_values_and_owns(name):
    source = VIEWS[name]()
    weak = weakref_ext.weak_ref_tensors([source])
    owned = own(weak)[0]
    assert not weakref_ext.is_weak_ref(owned)
    assert geometry(owned)[1:] == geometry(source)[1:]
    if source.device.type != "meta":
        assert torch.equal(owned, source)
        assert source.numel() == 0 or owned.data_ptr() != source.data_ptr()
    assert owned.untyped_storage().nbytes() <= source.untyped_storage().nbytes() + 16


def test_own_keeps_sharing():
    base = torch.arange(100.0)
    x = torch.ones(2, requires_grad=True)
    out = weakref_ext.weak_ref_tensors((base[40:50], [base[45:60].view(torch.int32), x], {"again": x}))
    owned = own(out)
    assert torch.equal(owned[0], base[40:50])
    owned[1][0].zero_()
    assert owned[0].tolist() == [40, 41, 42, 43, 44, 0, 0, 0, 0, 0]
    assert owned[1][1] is owned[2]["again"]
    assert base[45] == 45
    assert nbytes(owned[0]) < nbytes(base)
    assert pinned(own(out)) != []


def test_own_of_strong_tensors_has_no_history():
    x = torch.ones(2, requires_grad=True)
    owned = own([x * 2])[0]
    assert (owned.requires_grad, owned.grad_fn) == (False, None)


@pytest.mark.parametrize("make", testing.CORPUS.values(), ids=testing.CORPUS.keys())
def test_own_over_the_corpus(make):
    from test_containers import same_shape

    out = make()
    same_shape(own(weakref_ext.weak_ref_tensors(out)), out)


def test_assert_weak_names_strong_tensors():
    out = (torch.zeros(4), [torch.zeros(8)])
    testing.assert_weak(weakref_ext.weak_ref_tensors(out))
    with pytest.raises(AssertionError, match=r"1 tensors own their memory\n  out\[1\]\[0\]: strong tensor \(8,\)"):
        testing.assert_weak((weakref_ext.weak_ref_tensors(out[0]), out[1]))


class Holder:
    pass


def test_assert_released_names_path_bytes_and_holder():
    holder = Holder()
    holder.cache = {"aux": [torch.zeros(8)]}
    weak = weakref_ext.weak_ref_tensors((torch.zeros(1), holder.cache["aux"]))
    with pytest.raises(AssertionError) as error:
        testing.assert_released(weak)
    assert "1 tensors are still owned\n  out[1][0]: 32 bytes, a Tensor (8,) held by a list of 1" in str(error.value)
    holder.cache = {"only": holder.cache["aux"][0]}
    with pytest.raises(AssertionError, match="held by a dict under 'only'"):
        testing.assert_released(weak)
    holder.cache = None
    testing.assert_released(weak)


def test_assert_released_names_owners_outside_python():
    leaf = torch.ones(4, requires_grad=True)
    result = leaf.exp()
    weak = weakref_ext.weak_ref_tensors(result)
    consumer = result.sum()
    del result
    with pytest.raises(AssertionError, match=r"out: 16 bytes, owned from C\+\+"):
        testing.assert_released(weak)
    del consumer
    testing.assert_released(weak)
