"""A call's arguments: same signature, same graph; another one is named with its path; sizes share buffers."""

import enum
from collections import OrderedDict, namedtuple

import pytest
import torch
from torch.utils import _pytree as pytree

from weakref_ext import LayerName
from weakref_ext.cudagraph._inputs import Call, StaticInputs, describe, difference


def signature(*args, **kwargs):
    return Call.of(args, kwargs).signature


X = torch.zeros(4, 3)


@pytest.mark.parametrize(
    "value",
    [None, 3, True, 2.5, float("nan"), "layer.0", b"x", torch.float16, torch.device("cpu"), LayerName("a")],
    ids=repr,
)
def test_equal_calls_have_equal_signatures(value):
    one, two = (signature(X + i, [X, (value,)], {"k": X}, flag=value) for i in range(2))
    assert one == two
    assert hash(one) == hash(two)
    assert difference(one, two) is None


PAIRS = {
    "shape": (X, X[:2], "args[0] is float32[2, 3] cpu, was float32[4, 3] cpu"),
    "dtype": (X, X.to(torch.int32), "args[0] is int32[4, 3] cpu, was float32[4, 3] cpu"),
    "device": (X, X.to("meta"), "args[0] is float32[4, 3] meta, was float32[4, 3] cpu"),
    "strides": (X, torch.zeros(3, 4).t(), "args[0] is float32[4, 3] strides [1, 4] cpu, was float32[4, 3] cpu"),
    "value": ({"n": 1}, {"n": 2}, "args[0]['n'] is 2, was 1"),
    "bool for int": ((X, 1), (X, True), "args[0][1] is True, was 1"),
    "signed zero": ((X, 0.0), (X, -0.0), "args[0][1] is -0.0, was 0.0"),
    "tensor for value": ((X, 1), (X, X), "args[0][1] is float32[4, 3] cpu, was 1"),
    "one more": ([X], [X, X], "args[0][1] (float32[4, 3] cpu) was not there"),
    "one less": ([X, [X, 7]], [X, [X]], "args[0][1][1] (7) is missing"),
    "container": ([X], (X,), "the containers are"),
}


@pytest.mark.parametrize(("captured", "called", "says"), PAIRS.values(), ids=PAIRS.keys())
def test_a_difference_is_named_with_its_path(captured, called, says):
    assert signature(captured) != signature(called)
    assert says in difference(signature(captured), signature(called))


def test_keyword_arguments_and_pytree_nodes_have_paths():
    node = namedtuple("Node", "h aux")(X, OrderedDict(a=[X]))
    assert describe(signature(1, node=node)) == (
        "args[0]: 1, kwargs['node'].h: float32[4, 3] cpu, kwargs['node'].aux['a'][0]: float32[4, 3] cpu"
    )


@pytest.mark.parametrize(
    ("args", "kwargs"), [((), {}), ((X, 1), {}), ((X,), {"b": 2.0, "a": "s"}), (([X],), {"a": None})], ids=str
)
def test_arguments_without_containers_are_flattened_as_by_pytree(args, kwargs):
    leaves, spec = pytree.tree_flatten((args, kwargs))
    call = Call.of(args, kwargs)
    assert all(a is b for a, b in zip(call.leaves, leaves, strict=True))
    assert call.signature.spec == spec


def test_a_size_one_dimension_with_another_stride_is_the_same_layout():
    assert signature(torch.zeros(4, 3)[:1]) == signature(torch.empty_strided((1, 3), (99, 1)))


@pytest.mark.parametrize("hidden", [object(), {1, 2}, lambda: X], ids=["object", "set", "function"])
def test_what_may_hold_tensors_out_of_sight_is_refused_by_path(hidden):
    with pytest.raises(TypeError, match=r"args\[1\]\['meta'\]\[0\] is a <class '.*'>: .*register its type"):
        signature(X, {"meta": [hidden]})


def test_an_enum_is_a_plain_value():
    assert signature(enum.Enum("Mode", "A B").A) is not None


def test_smaller_sizes_read_leading_slices_of_the_largest():
    static = StaticInputs()
    calls = [Call.of((torch.zeros(n, 3), [torch.zeros(n, dtype=torch.int64)]), {}) for n in (8, 4, 1)]
    bound = [static.bind(call) for call in calls]
    for call, tensors in zip(calls, bound, strict=True):
        assert [t.shape for t in tensors] == [t.shape for t in call.tensors]
        assert [t.data_ptr() for t in tensors] == [t.data_ptr() for t in bound[0]]


def test_a_larger_size_later_leaves_the_smaller_one_its_buffer():
    static = StaticInputs()
    (small,) = static.bind(Call.of((torch.zeros(2, 3),), {}))
    (large,) = static.bind(Call.of((torch.zeros(5, 3),), {}))
    small.fill_(1)
    large.fill_(2)
    assert small.tolist() == [[1] * 3] * 2


def test_arguments_of_other_widths_and_layouts_have_buffers_of_their_own():
    static = StaticInputs()
    shapes = [torch.zeros(4, 3), torch.zeros(4, 2), torch.zeros(4, 3, dtype=torch.int32), torch.zeros(3, 4).t()]
    bound = [static.bind(Call.of((t,), {}))[0] for t in shapes]
    assert len({t.data_ptr() for t in bound}) == len(shapes)
    assert bound[3].stride() == (1, 4)


def test_a_source_in_our_own_buffers_is_cloned_first():
    static = StaticInputs()
    a, b = static.bind(Call.of((torch.ones(2), torch.zeros(2)), {}))
    a.fill_(1)
    b.fill_(0)
    swapped = static.sources([b, a])
    a.copy_(swapped[0])
    b.copy_(swapped[1])
    assert (a.tolist(), b.tolist()) == ([0, 0], [1, 1])


def test_a_buffer_allocated_in_inference_mode_takes_copies_outside():
    static = StaticInputs()
    with torch.inference_mode():
        (buffer,) = static.bind(Call.of((torch.ones(2, 2),), {}))
    buffer.copy_(torch.ones(2, 2))
