"""torch.ops calls the walk itself, except where torch's own way to the operator would do more than that."""

import contextlib
from collections import namedtuple

import pytest
import torch
from conftest import OP
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from weakref_ext import _C, describe, is_weak_ref

THROUGH_TORCH, COUNT = object(), 3
Pair = namedtuple("Pair", "a b")


class Overloading(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return NotImplemented


def torch_call(*args, **kwargs):
    return THROUGH_TORCH


torch_call.__module__ = "torch.ops.weakref_ext"
call = _C.op_call(torch_call)


def x():
    return torch.randn(2)


@pytest.mark.parametrize("make", [x, lambda: [x(), (x(), COUNT)], lambda: {"a": x()}, lambda: Pair(x(), [x()])])
@pytest.mark.parametrize(
    "context",
    [
        contextlib.nullcontext,
        torch.inference_mode,
        torch.no_grad,
        lambda: torch.autocast("cpu"),
        lambda: torch.autocast("cuda", enabled=False),
    ],
)
def test_nothing_stands_between_the_operator_and_the_walk(make, context):
    out = make()
    with context():
        weak = call(out)
    assert describe(weak) == describe(out)
    assert all(is_weak_ref(leaf) for leaf in torch.utils._pytree.tree_leaves(weak) if leaf is not COUNT)


class Functions(TorchFunctionMode):
    pass


class Dispatches(TorchDispatchMode):
    pass


@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events")
@pytest.mark.parametrize(
    "context",
    [
        Functions,
        Dispatches,
        lambda: torch.device("cpu"),
        torch._subclasses.FakeTensorMode,
        torch.profiler.profile,
        torch.autograd.profiler.profile,
    ],
)
def test_modes_and_profilers_see_the_call(context):
    out = [x()]
    with context():
        assert call(out) is THROUGH_TORCH
    assert is_weak_ref(call(out)[0])


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize(
    "transform",
    [
        torch.vmap,
        torch.func.functionalize,
        lambda f: lambda t: torch.func.grad(f)(t.sum()),
        lambda f: torch.func.vjp(f, x())[1],
    ],
)
def test_transforms_see_the_call(transform):
    seen = []

    def f(t):
        seen.append(call([t]))
        return t * 1

    transform(f)(x())
    assert seen == [THROUGH_TORCH]


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_a_tracer_sees_the_call():
    seen = []
    torch.jit.trace(lambda t: seen.append(call(t)) or t * 1, x(), check_trace=False)
    assert seen == [THROUGH_TORCH]


def test_torch_asks_a_subclass_for_its_torch_function():
    tensor = x().as_subclass(Overloading)
    for out in (tensor, [x(), tensor], (tensor,)):
        assert call(out) is THROUGH_TORCH
        with pytest.raises(TypeError, match="__torch_function__"):
            OP(out)


@pytest.mark.parametrize(("args", "kwargs"), [((), {}), ((), {"out": 1}), ((1, 2), {}), ((1,), {"pool": 2})])
def test_other_arguments_are_for_torch_to_judge(args, kwargs):
    assert call(*args, **kwargs) is THROUGH_TORCH


def test_torch_ops_calls_it():
    for op in (OP, OP.default):
        assert op._op.__name__ == "weak_ref_tensors"
        assert type(op._op) is type(call)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_torchscript_knows_the_operator_by_its_packet():
    def f(t: torch.Tensor):
        return OP(t)

    t = x()
    assert is_weak_ref(torch.jit.script(f)(t))
