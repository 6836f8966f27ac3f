"""What is not understood is refused, by type and path, and nothing else happens."""

import enum
import sys

import pytest
import torch
from conftest import ENTRIES
from torch._subclasses.fake_tensor import FakeTensorMode

import weakref_ext


class Unregistered(list):
    pass


class UnregisteredTuple(tuple):
    __slots__ = ()


class UnregisteredDict(dict):
    pass


def fake():
    with FakeTensorMode() as mode:
        return mode.from_tensor(torch.randn(2))


REFUSED = {
    "None": (lambda: None, r"<class 'NoneType'>"),
    "float": (lambda: 1.5, r"<class 'float'>"),
    "str": (lambda: "layer.0", r"<class 'str'>"),
    "set": (lambda: {1}, r"<class 'set'>"),
    "object": (object, r"<class 'object'>"),
    "type": (lambda: int, r"<class 'type'>"),
    "sparse": (lambda: torch.eye(2).to_sparse(), r"<class 'torch.Tensor'>.*sparse"),
    "csr": (lambda: torch.eye(2).to_sparse_csr(), r"<class 'torch.Tensor'>.*sparse"),
    "mkldnn": (lambda: torch.randn(2, 2).to_mkldnn(), r"<class 'torch.Tensor'>.*mkldnn"),
    "quantized": (lambda: torch.quantize_per_tensor(torch.randn(2), 0.1, 0, torch.qint8), r"quantized.*int_repr"),
    "FakeTensor": (fake, r"FakeTensor'>.*__torch_dispatch__"),
    "jagged": (lambda: torch.nested.nested_tensor([torch.randn(2)], layout=torch.jagged), r"NestedTensor'>"),
    "list subclass": (lambda: Unregistered([torch.randn(2)]), r"Unregistered'>"),
    "tuple subclass": (lambda: UnregisteredTuple([torch.randn(2)]), r"UnregisteredTuple'>"),
    "dict subclass": (lambda: UnregisteredDict(a=torch.randn(2)), r"UnregisteredDict'>"),
}
DEPTHS = {
    0: (lambda bad: bad, r"at out[:.]"),
    1: (lambda bad: [torch.randn(2), bad], r"at out\[1\][:.]"),
    3: (lambda bad: (torch.randn(2), [[torch.randn(2), bad], torch.randn(2)]), r"at out\[1\]\[0\]\[1\][:.]"),
}


@pytest.mark.filterwarnings("ignore:.*:UserWarning", "ignore:.*:DeprecationWarning")
@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_type_and_path(name, depth, weaken):
    make, text = REFUSED[name]
    wrap, path = DEPTHS[depth]
    bad = make()
    out = wrap(bad)
    mine = [value for value in (bad, out) if value is not None]  # None is everybody's
    counts = [sys.getrefcount(value) for value in mine]
    with pytest.raises(ValueError, match=f"^Invalid type for tensors: .*{text}") as error:
        weaken(out)
    error.match(path)
    del error
    assert [sys.getrefcount(value) for value in mine] == counts


def test_sym_ints_never_pass(weaken):
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    sym = ShapeEnv().create_unbacked_symint()
    with pytest.raises(ValueError, match=r"SymInt'> at out\[0\]"):
        weaken([sym])


def test_the_message_says_the_way_out(weaken):
    with pytest.raises(ValueError, match=r"Supported are .*register_passthrough"):
        weaken([None])


def test_int_subclasses_are_ints(weaken):
    class Level(enum.IntEnum):
        LOW = 1

    assert weaken([Level.LOW])[0] is Level.LOW


def test_a_structure_that_contains_itself_is_a_recursion_error(weaken):
    out = []
    out.append(out)
    with pytest.raises(RecursionError, match=r"nested more than 1000 levels deep"):
        weaken(out)


def test_200_000_levels_are_a_recursion_error(weaken):
    out = torch.randn(1)
    for _ in range(200_000):
        out = [out]
    with pytest.raises(RecursionError, match=r"^out\[\.\.\.\]\[0\]"):
        weaken(out)
    while isinstance(out, list):
        out = out[0]


def test_a_list_that_shrinks_during_the_walk_is_an_error(weaken):
    """Types are resolved by Python code once: it may do anything to the structure."""

    class Meta(type):
        def __hash__(cls):
            victim.clear()
            return 1

        def __eq__(cls, other):
            return cls is other

    class Odd(metaclass=Meta):
        pass

    victim = [Odd(), torch.randn(2), torch.randn(2)]
    with pytest.raises((ValueError, RuntimeError), match=r"Invalid type|lost items"):
        weaken(victim)
    assert victim == [] or len(victim) == 3


def test_passthrough_is_by_exact_type_and_refuses_containers(weaken):
    class Name:
        pass

    class Longer(Name):
        pass

    with pytest.raises(ValueError, match=r"Name'> at out\[0\]"):
        weaken([Name()])
    weakref_ext.register_passthrough(Name)
    name = Name()
    assert weaken([name])[0] is name
    with pytest.raises(ValueError, match=r"Longer'> at out\[0\]"):
        weaken([Longer()])
    for kind in (torch.Tensor, torch.nn.Parameter, Unregistered, UnregisteredDict, UnregisteredTuple):
        with pytest.raises(TypeError, match=r"holds tensors|is a tensor type"):
            weakref_ext.register_passthrough(kind)
    for kind in (list, tuple, dict, int, Name):
        with pytest.raises(ValueError, match="is registered already"):
            weakref_ext.register_passthrough(kind)
    with pytest.raises(TypeError, match="expected a class, got 3"):
        weakref_ext.register_passthrough(3)


def test_opaque_value_types_of_torch_pass():
    """How vLLM's LayerName passes without this package knowing vLLM."""
    from torch._library.opaque_object import register_opaque_type

    class ForeignName(metaclass=weakref_ext._opaque.Meta):  # which torch 2.11 insists on
        def __init__(self, value):
            self.value = value

        def __eq__(self, other):
            return self.value == other.value

        def __hash__(self):
            return hash(self.value)

        def __fx_repr__(self):
            return repr(self), {}

    name = ForeignName("layer")
    with pytest.raises(ValueError, match=r"ForeignName'> at out\[1\]"):
        weakref_ext.weak_ref_tensors((torch.randn(1), name))
    register_opaque_type(ForeignName, typ="value", hoist=True)
    for weaken in ENTRIES.values():
        assert weaken((torch.randn(1), name))[1] is name
