"""A container comes back as one of its own type, with its keys, order and attributes; a foreign one raises by name."""

import dataclasses
import sys
from collections import OrderedDict, defaultdict, deque
from typing import Any, NamedTuple

import pytest
import torch
from conftest import ENTRIES
from helpers import Buffers
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils import _pytree

import weakref_ext
from weakref_ext import testing


def same_shape(got, expected):
    """Equal types, keys and values all the way down."""
    assert type(got) is type(expected)
    if isinstance(got, torch.Tensor):
        assert torch.equal(got.resolve_conj(), expected.resolve_conj())
        assert got.stride() == expected.stride()
    elif isinstance(got, dict):
        assert list(got) == list(expected)
        for key in got:
            same_shape(got[key], expected[key])
    elif dataclasses.is_dataclass(got):
        for field in dataclasses.fields(got):
            same_shape(getattr(got, field.name), getattr(expected, field.name))
    elif isinstance(got, list | tuple | deque):
        assert len(got) == len(expected)
        for one, other in zip(got, expected, strict=True):
            same_shape(one, other)
    else:
        assert got == expected


@pytest.mark.parametrize("make", testing.CORPUS.values(), ids=testing.CORPUS.keys())
def test_round_trip_over_the_corpus(make, weaken):
    out = make()
    weak = weaken(out)
    same_shape(weak, out)
    testing.assert_weak(weak)
    assert weakref_ext.describe(weak) == weakref_ext.describe(out)
    del out
    testing.assert_released(weak)
    assert weakref_ext.pinned(weak) == []


def test_ordered_dicts_keep_an_order_that_was_moved(weaken):
    out = OrderedDict(a=torch.ones(1), b=torch.ones(2))
    out.move_to_end("a")
    assert list(weaken(out)) == ["b", "a"]


def test_defaultdicts_keep_their_factory(weaken):
    weak = weaken(defaultdict(list, a=torch.ones(1)))
    assert weak["missing"] == []


def test_named_tuples_keep_type_and_attributes_and_run_no_code(weaken):
    class Pair(NamedTuple):
        a: Any
        b: Any

    class Tagged(Pair):
        def __new__(cls, *args):
            raise AssertionError("ran")

    out = tuple.__new__(Tagged, (torch.ones(1), 2))
    out.note = "kept"
    weak = weaken(out)
    assert type(weak) is Tagged
    assert (weak.b, weak.note) == (2, "kept")
    assert weakref_ext.is_weak_ref(weak.a)


class Ran(Exception):
    pass


@dataclasses.dataclass
class Checked:
    x: torch.Tensor
    _cache: int = dataclasses.field(default=0, init=False, repr=False)

    def __post_init__(self):
        raise Ran


@dataclasses.dataclass(frozen=True)
class FrozenBase:
    x: torch.Tensor


class Slotted:
    __slots__ = ("__secret", "note")

    def secret(self, *value):
        if value:
            self.__secret = value[0]
        return self.__secret


@dataclasses.dataclass
class WithSlots(Slotted):
    x: torch.Tensor
    unset: torch.Tensor = dataclasses.field(init=False)


def test_dataclasses_run_neither_init_nor_post_init_and_keep_other_attributes(weaken):
    out = object.__new__(Checked)
    out.x, out._cache, out.extra = torch.ones(2), 3, "kept"
    weak = weaken(out)
    assert (type(weak), weak._cache, weak.extra) == (Checked, 3, "kept")
    assert weakref_ext.is_weak_ref(weak.x)
    assert not weakref_ext.is_weak_ref(out.x)


def test_frozen_and_slotted_dataclasses(weaken):
    assert weakref_ext.is_weak_ref(weaken(FrozenBase(torch.ones(1))).x)
    out = WithSlots(torch.ones(1))
    out.note = "kept"
    out.secret(5)
    weak = weaken(out)
    assert (weak.note, weak.secret()) == ("kept", 5)
    assert not hasattr(weak, "unset")


def test_pytree_nodes_come_back_as_their_type(weaken):
    out = deque([torch.ones(1), {"a": torch.ones(2)}], maxlen=5)
    weak = weaken(out)
    assert (type(weak), weak.maxlen) == (deque, 5)
    testing.assert_weak(weak)

    class Node:
        def __init__(self, x):
            self.x = x

    with pytest.raises(ValueError, match=r"Node'> at out\[0\]"):
        weaken([Node(torch.ones(1))])
    _pytree.register_pytree_node(Node, lambda node: ([node.x], None), lambda children, _: Node(children[0]))
    assert weakref_ext.is_weak_ref(weaken([Node(torch.ones(1))])[0].x)


def test_hugging_face_outputs_keep_their_type(weaken):
    outputs = pytest.importorskip("transformers.modeling_outputs")
    out = outputs.BaseModelOutputWithPast(
        last_hidden_state=torch.ones(2), hidden_states=(torch.ones(1), torch.ones(3)), past_key_values=None
    )
    weak = weaken((out, 1))[0]
    assert type(weak) is type(out)
    assert list(weak) == list(out)
    assert weak[0] is weak.last_hidden_state
    assert len(testing._C.leaves(weak, ())) == 3
    testing.assert_weak(weak)
    out.last_hidden_state = None
    out["attentions"] = "no"
    with pytest.raises(ValueError, match=r"<class 'str'> at out.*attentions"):
        weaken(out)


def test_wrapper_subclasses_are_taken_apart(weaken):
    buffers = Buffers()
    out = TwoTensor(buffers.tensor(3, 4), buffers.tensor(3, 4))
    weak = weaken([out, out])
    assert type(weak[0]) is TwoTensor
    assert weak[0] is weak[1]
    assert weak[0].shape == (3, 4)
    assert weakref_ext.is_weak_ref(weak[0].a)
    assert weakref_ext.describe(weak) == "[2:T]"
    del out
    assert buffers.held() == 0
    assert weakref_ext.pinned(weak) == []


def test_errors_carry_keys_and_field_names(weaken):
    bad = {"aux": [None]}
    cases = {
        r"at out\[1\]\['aux'\]\[0\]\.": [1, bad],
        r"at out\.hidden\.": testing.Output(1.5, ()),
        r"at out\.aux\[1\]\.step\.": testing.Point(torch.ones(1), [1, testing.Output(torch.ones(1), (), step=None)]),
        r"at out\[\(3, 'x'\)\]\.": {(3, "x"): "text"},
        r"at out\['b'\]\.": OrderedDict(b=set()),
        r"at out\[1\]\.a: .*sparse": [1, TwoTensor(torch.eye(2).to_sparse(), torch.eye(2).to_sparse())],
    }
    for path, out in cases.items():
        with pytest.raises(ValueError, match=path):
            weaken(out)


@pytest.mark.parametrize("kind", [dict, OrderedDict])
def test_a_tensor_as_a_key_is_refused(kind, weaken):
    """Keys stay as they are: it would stay strong."""
    with pytest.raises(ValueError, match=r"<class 'torch.Tensor'> as a dict key at out\[0\]: its memory would stay"):
        weaken([kind([(torch.ones(1), torch.ones(1))])])


def test_errors_leave_every_reference(weaken):
    values = [torch.ones(1), object(), "key"]
    out = {"a": testing.Output(values[0], (values[0], {values[2]: values[1]}))}
    before = [sys.getrefcount(value) for value in values]
    for _ in range(100):
        with pytest.raises(ValueError, match="object"):
            weaken(out)
    assert [sys.getrefcount(value) for value in values] == before


def test_registered_containers_name_their_children(weaken):
    class State:
        def __init__(self, tensors):
            self.tensors = tensors

    with pytest.raises(ValueError, match="State"):
        weaken(State({}))
    weakref_ext.register_container(State, lambda s: (s.tensors, "context"), lambda tensors, _: State(tensors))
    weak = weaken(State({"hidden": torch.ones(1), "aux": [torch.ones(2)]}))
    assert type(weak) is State
    assert weakref_ext.describe(weak) == "State(2:T,[1:T])"
    assert [path for path, _ in testing._C.leaves(weak, ())] == ["out.hidden", "out.aux[0]"]
    with pytest.raises(ValueError, match=r"at out\.aux\[0\]"):
        weaken(State({"aux": [None]}))
    with pytest.raises(ValueError, match="is registered already"):
        weakref_ext.register_container(State, lambda s: (s.tensors, None), lambda tensors, _: State(tensors))
    with pytest.raises(TypeError, match="tensor type"):
        weakref_ext.register_container(torch.nn.Parameter, lambda s: ([], None), lambda children, _: None)
    for kind in (list, dict, defaultdict):
        with pytest.raises(ValueError, match="is registered already"):
            weakref_ext.register_container(kind, lambda s: ([], None), lambda children, _: None)


def test_errors_of_flatten_and_unflatten_come_through(weaken):
    class Broken:
        pass

    answers = [ZeroDivisionError, ([1], None)]

    def flatten(obj):
        if isinstance(answers[0], type):
            raise answers[0]
        return answers[0]

    def unflatten(children, context):
        raise KeyError("unflatten")

    weakref_ext.register_container(Broken, flatten, unflatten)
    with pytest.raises(ZeroDivisionError):
        weaken([Broken()])
    answers.pop(0)
    with pytest.raises(KeyError, match="unflatten"):
        weaken([Broken()])
    answers[0] = 3
    with pytest.raises(TypeError):
        weaken([Broken()])


def test_per_call_passthrough_is_by_exact_type():
    out = (torch.ones(1), [None, 1.5], {"a": "text"})
    weak = weakref_ext.weak_ref_tensors(out, passthrough=(type(None), float, str))
    assert weak[1:] == out[1:]
    assert weakref_ext.is_weak_ref(weak[0])
    with pytest.raises(ValueError, match=r"str'> at out\[2\]\['a'\]"):
        weakref_ext.weak_ref_tensors(out, passthrough=(type(None), float))
    for wrong in (None, [float], (3,), float):
        with pytest.raises(TypeError, match="passthrough must be a tuple of types, or a function"):
            weakref_ext.weak_ref_tensors(out, passthrough=wrong)


def test_a_passthrough_function_is_asked_about_unknown_types_only():
    asked = []

    def passes(kind, path):
        asked.append((kind, path))
        return kind is not set

    out = (torch.ones(1), [None, 3], {"a": "text"})
    weak = weakref_ext.weak_ref_tensors(out, passthrough=passes)
    assert weak[1:] == out[1:]
    assert asked == [(type(None), "out[1][0]"), (str, "out[2]['a']")]
    with pytest.raises(ValueError, match=r"set'> at out\[0\]"):
        weakref_ext.weak_ref_tensors([set()], passthrough=passes)
    with pytest.raises(ZeroDivisionError):
        weakref_ext.weak_ref_tensors([None], passthrough=lambda kind, path: 1 / 0)
    assert weakref_ext.nbytes(out, passthrough=passes) == 4


def test_cpu_tensors_can_stay_as_they_are():
    meta, cpu = torch.empty(1, device="meta"), torch.ones(1)
    weak = weakref_ext.weak_ref_tensors([meta, (cpu, torch.eye(2).to_sparse())], cpu="keep")
    assert weakref_ext.is_weak_ref(weak[0])
    assert weak[1][0] is cpu
    with pytest.raises(ValueError, match="cpu must be 'weak' or 'keep', got 'drop'"):
        weakref_ext.weak_ref_tensors(1, cpu="drop")


def test_keywords_are_checked():
    with pytest.raises(ValueError, match="outside must be 'keep' or 'raise', got 'drop'"):
        weakref_ext.weak_ref_tensors(1, outside="drop")
    with pytest.raises(TypeError, match=r"unexpected|invalid keyword"):
        weakref_ext.weak_ref_tensors(1, pools=None)
    with pytest.raises(TypeError, match=r"missing|required"):
        weakref_ext.weak_ref_tensors()
    x = torch.ones(1)
    assert weakref_ext.is_weak_ref(weakref_ext.weak_ref_tensors(out=x, pool=None, outside="raise"))


@pytest.mark.skipif(torch.version.cuda is not None, reason="this build has its CUDA part")
def test_a_pool_needs_the_cuda_part():
    with pytest.raises(RuntimeError, match=r"built without its CUDA part.*WEAKREF_EXT_CUDA=1"):
        weakref_ext.weak_ref_tensors(torch.ones(1), pool=(0, 1))


def test_the_slow_look_up_happens_once_per_type(monkeypatch):
    asked = []
    real = weakref_ext._containers._resolve
    weakref_ext._C.set_resolver(lambda cls: asked.append(cls) or real(cls))
    try:

        class Fresh(NamedTuple):
            x: torch.Tensor

        for entry in ENTRIES.values():
            for _ in range(3):
                entry([Fresh(torch.ones(1)), Fresh(torch.ones(1))])
        assert asked == [Fresh]
    finally:
        weakref_ext._C.set_resolver(real)
