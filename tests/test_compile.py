"""Under torch.compile the op breaks the graph at the call; where that is forbidden, it says where it belongs."""

import pytest
import torch
from conftest import OP
from torch._subclasses.fake_tensor import FakeTensorMode, UnsupportedFakeTensorException
from torch.fx.experimental.proxy_tensor import make_fx

import weakref_ext
from weakref_ext import LayerName

OPS = pytest.mark.parametrize("op", [OP, OP.default], ids=["op", "default"])
SENTENCE = "weak_ref_tensors belongs outside compiled and traced regions"
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
NAME = LayerName("model.layers.0")


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def function(op):
    def f(x):
        y = x + 1
        weak = op((y, [x, y], 3, NAME))
        return weak[0] * 2 + weak[1][0] + y, weak[3]  # y: a graph break drops what is not used after it

    return f


@OPS
def test_the_graph_breaks_at_the_call(op):
    graphs = []

    def backend(module, inputs):
        graphs.append(module)
        return module

    x = torch.randn(4)
    value, name = torch.compile(function(op), backend=backend)(x)
    assert torch.equal(value, function(op)(x)[0])
    assert name is NAME
    assert len(graphs) == 2
    assert not any("weak_ref_tensors" in graph.code for graph in graphs)


def test_inductor_gives_the_eager_result():
    x = torch.randn(4)
    assert torch.equal(torch.compile(function(OP))(x)[0], function(OP)(x)[0])


@OPS
def test_fullgraph_says_where_weak_refs_belong(op):
    with pytest.raises(torch._dynamo.exc.Unsupported, match=SENTENCE):
        torch.compile(function(op), backend="eager", fullgraph=True)(torch.randn(4))


@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace the builtin:UserWarning")
def test_the_python_entry_breaks_the_graph_too():
    x = torch.randn(4)
    f = function(weakref_ext.weak_ref_tensors)
    assert torch.equal(torch.compile(f, backend="eager")(x)[0], f(x)[0])


@OPS
def test_fake_tensors_get_the_sentence(op):
    with FakeTensorMode() as mode, pytest.raises(UnsupportedFakeTensorException, match=SENTENCE):
        op([mode.from_tensor(torch.randn(2))])


def test_tracing_with_fake_tensors_gets_the_sentence():
    with pytest.raises(UnsupportedFakeTensorException, match=SENTENCE):
        make_fx(lambda x: OP([x])[0] + 1, tracing_mode="fake")(torch.randn(2))


def test_export_gets_the_sentence():
    class Module(torch.nn.Module):
        def forward(self, x):
            return OP([x])[0] + 1

    with pytest.raises(UnsupportedFakeTensorException, match=SENTENCE):
        torch.export.export(Module(), (torch.randn(2),))


def test_a_layer_name_is_a_hoisted_opaque_value():
    from torch._library.opaque_object import is_opaque_value_type

    assert is_opaque_value_type(LayerName)
    assert LayerName("a") == LayerName("a") != LayerName("b")
    assert hash(LayerName("a")) == hash(LayerName("a"))
    assert (str(LayerName("a")), repr(LayerName("a"))) == ("a", "LayerName('a')")
    text, names = LayerName("a").__fx_repr__()
    assert eval(text, names) == LayerName("a")
