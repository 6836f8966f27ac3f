"""The operator: schemas, modes, transforms and the overload for C++ and TorchScript."""

from collections import OrderedDict

import pytest
import torch
from conftest import OP
from helpers import Buffers, assert_same
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import weakref_ext

IVALUE = OP.ivalue


def pair():
    return torch.randn(3), [torch.randn(2).t(), torch.randn(4)[1:]]


def test_the_python_overload_comes_first():
    assert OP.overloads() == ["default", "ivalue"]
    assert str(OP.default._schema) == "weakref_ext::weak_ref_tensors(PyObject out) -> PyObject"
    assert str(OP.ivalue._schema) == "weakref_ext::weak_ref_tensors.ivalue(Any out) -> Any"


def test_no_operator_in_a_foreign_namespace():
    names = torch._C._dispatch_get_all_op_names()
    assert [n for n in names if "weak_ref" in n] == [n for n in names if n.startswith("weakref_ext::weak_ref_tensors")]


@pytest.mark.parametrize("op", [OP, OP.default, OP.ivalue], ids=["op", "default", "ivalue"])
def test_the_argument_has_a_name(op):
    out = pair()
    assert_same(op(out=out), out)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_grad_modes(mode, weaken):
    out = (torch.randn(2, requires_grad=True), [torch.randn(2)])
    with mode():
        weak = weaken(out)
    assert not weak[0].requires_grad
    assert weak[0].data_ptr() == out[0].data_ptr()
    assert weakref_ext.is_weak_ref(weak[1][0])


def test_a_dispatch_mode_sees_one_call_with_the_live_structure():
    seen = []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append((func, args))
            return func(*args, **(kwargs or {}))

    out = pair()
    with Mode():
        weak = OP(out)
    assert_same(weak, out)
    assert [func for func, _ in seen] == [OP.default]
    assert seen[0][1][0] is out


def test_the_python_entry_is_invisible_to_modes():
    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            raise AssertionError(func)

    out = pair()
    with Mode():
        weak = weakref_ext.weak_ref_tensors(out)
    assert_same(weak, out)


def test_a_function_mode_sees_the_operator():
    seen = []

    class Mode(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    out = pair()
    with Mode():
        weak = OP(out)
    assert seen == [OP]
    assert_same(weak, out)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize(
    "transform",
    [
        lambda f: torch.vmap(f),
        lambda f: torch.func.grad(lambda x: f(x).sum()),
        lambda f: lambda x: torch.func.jvp(f, (x,), (x,)),
    ],
    ids=["vmap", "grad", "jvp"],
)
def test_functorch_transforms_are_refused(transform, weaken):
    with pytest.raises(ValueError, match=r"at out\[0\]: a tensor inside a functorch transform"):
        transform(lambda x: weaken([x])[0])(torch.randn(3))


def test_functionalization_is_refused(weaken):
    with pytest.raises(ValueError, match="FunctionalTensor"):
        torch.func.functionalize(lambda x: weaken([x])[0])(torch.randn(3))


@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events")
def test_the_profiler_records_the_operator_without_holding_tensors():
    buffers = Buffers()
    out = (buffers.tensor(4), [buffers.tensor(4)])
    with torch.profiler.profile(record_shapes=True) as profile:
        weak = OP(out)
        del out
        assert buffers.held() == 0
    assert "weakref_ext::weak_ref_tensors" in {event.name for event in profile.events()}
    del weak


def test_opcheck_of_the_schema():
    torch.library.opcheck(OP.ivalue, (torch.randn(3),), test_utils=("test_schema", "test_autograd_registration"))


IVALUES = {
    "tensor": lambda: torch.randn(2, 3).t(),
    "nested": lambda: (torch.randn(2), [torch.randn(2), torch.randn(3)]),
    "ints and bools": lambda: (3, True, [1, 2], torch.randn(1)),
}


@pytest.mark.parametrize("make", IVALUES.values(), ids=IVALUES.keys())
def test_ivalues(make):
    out = make()
    weak = IVALUE(out)
    assert_same(weak, out)


def test_an_ivalue_weak_ref_owns_nothing():
    buffers = Buffers()
    out = (buffers.tensor(4), [buffers.tensor(4), buffers.tensor(4)])
    weak = IVALUE(out)
    del out
    assert buffers.held() == 0
    assert not weakref_ext.owner_alive(weak[1][0])


def test_ivalue_repeats_and_sharing():
    x = torch.randn(4)
    weak = IVALUE(([x, x], x[1:]))
    assert weak[0][0] is weak[0][1]
    assert weak[0][0].untyped_storage()._cdata == weak[1].untyped_storage()._cdata


def test_ivalue_dicts_keep_order():
    weak = IVALUE(OrderedDict(b=torch.randn(1), a=torch.randn(2)))
    assert list(weak) == ["b", "a"]
    assert all(weakref_ext.is_weak_ref(tensor) for tensor in weak.values())


@pytest.mark.parametrize(
    ("out", "text"),
    [
        (1.5, r"Double at out\."),
        ((torch.randn(1), (None,)), r"None at out\[1\]\[0\]\."),
        ({"aux": "name"}, r"String at out\['aux'\]\."),
        (torch.eye(2).to_sparse(), r"Tensor at out: .*sparse"),
    ],
    ids=["float", "None", "str", "sparse"],
)
def test_ivalues_are_refused_by_kind_and_path(out, text):
    with pytest.raises(ValueError, match=f"Invalid type for tensors: {text}"):
        IVALUE(out)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_torchscript_calls_the_ivalue_overload():
    source = "def f(x: Tensor, y: Tensor) -> Any:\n    return torch.ops.weakref_ext.weak_ref_tensors((x, [y, y]))\n"
    unit = torch.jit.CompilationUnit(source)
    x, y = torch.randn(2), torch.randn(3)
    weak = unit.f(x, y)
    assert_same(weak, (x, [y, y]))
    assert weakref_ext.is_weak_ref(weak[1][0])
