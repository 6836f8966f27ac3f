"""Each engine's drop-in: over the released module that holds its function, by that engine's rules for leaves."""

import collections
import dataclasses
import logging
import sys

import engines
import pytest
import torch

from weakref_ext import integrations, is_weak_ref

NT = collections.namedtuple("NT", "a b")


@dataclasses.dataclass(frozen=True)
class Output:
    hidden: torch.Tensor
    aux: list


def meta(*shape, **options):
    return torch.empty(*shape, device="meta", **options)


def weak(out):
    return torch.utils._pytree.tree_map(lambda leaf: is_weak_ref(leaf) if isinstance(leaf, torch.Tensor) else leaf, out)


@pytest.fixture(scope="module", autouse=True)
def _modules():
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.partition(".")[0] in engines.PACKAGES:  # what they imported stays: two copies of sympy do not mix
            del sys.modules[name]


@pytest.fixture(scope="module")
def sglang_modules(_modules):
    engines.need(engines.SGLANG)
    return engines.sglang()


@pytest.fixture
def sglang(sglang_modules):
    assert integrations.sglang.install()
    yield sglang_modules
    assert integrations.sglang.uninstall()


@pytest.fixture
def te(_modules):
    engines.need(engines.TRANSFORMER_ENGINE)
    module = engines.transformer_engine()
    assert integrations.transformer_engine.install()
    yield module
    assert integrations.transformer_engine.uninstall()


@pytest.fixture
def tensorrt_llm(monkeypatch):
    """A stand-in with the released function's signature: TensorRT-LLM's wheels are not on the package index."""

    def make_weak_ref(x):
        return x

    monkeypatch.setitem(sys.modules, "tensorrt_llm", None)
    engines.stub("tensorrt_llm", __version__="1.2.1")
    engines.stub("tensorrt_llm._torch")
    engines.stub("tensorrt_llm._torch.utils", make_weak_ref=make_weak_ref)
    engines.stub("tensorrt_llm._torch.runner", make_weak_ref=make_weak_ref)
    assert integrations.tensorrt_llm.install()
    yield sys.modules["tensorrt_llm._torch.runner"]
    assert integrations.tensorrt_llm.uninstall()
    assert sys.modules["tensorrt_llm._torch.runner"].make_weak_ref is make_weak_ref


def test_sglang_weakens_to_any_depth_and_keeps_scalars(sglang):
    t = meta(2)
    out = sglang.weak_ref_tensor.weak_ref_tensors([t, (t, None, 3, "x"), {"aux": [t]}, NT(t, None), Output(t, [t])])
    assert weak(out[:4]) == [True, (True, None, 3, "x"), {"aux": [True]}, NT(True, None)]
    assert type(out[4]) is Output
    assert weak((out[4].hidden, out[4].aux)) == (True, [True])


@pytest.mark.parametrize("top", [None, 3, "x", object()])
def test_sglang_refuses_what_sglang_refuses(sglang, top):
    with pytest.raises(ValueError, match="Invalid type for tensors"):
        sglang.weak_ref_tensor.weak_ref_tensors(top)
    if type(top) is object:
        with pytest.raises(ValueError, match=r"Invalid type for tensors: <class 'object'> at out\[1\]"):
            sglang.weak_ref_tensor.weak_ref_tensors([meta(2), top])


def test_sglang_break_arguments_ask_for_the_graph_pool(sglang, monkeypatch):
    asked = []

    def weak_ref_tensors(out, passthrough=(), **options):
        asked.append(options)
        return out

    monkeypatch.setattr("weakref_ext.weak_ref_tensors", weak_ref_tensors)
    capture = sglang.breakable.BreakableCUDAGraphCapture(sglang.breakable.BreakableCUDAGraph(), pool=(0, 7))
    token = sglang.breakable._current_capture_var.set(capture)
    try:
        sglang.breakable._weak_ref_if_tensor((meta(2), None, "x", torch.ones(1)))
    finally:
        sglang.breakable._current_capture_var.reset(token)
    sglang.breakable._weak_ref_if_tensor(meta(2))
    assert asked == [dict(pool=(0, 7), cpu="keep"), dict(pool=None, cpu="keep")]


def test_sglang_without_a_gpu_is_left_as_it_is(sglang_modules, monkeypatch, caplog):
    monkeypatch.delitem(sys.modules, sglang_modules.weak_ref_tensor.__name__)
    monkeypatch.setattr(sys.modules["sglang.srt.utils.common"], "is_cuda", lambda: False)
    monkeypatch.setattr(integrations.sglang._patch, "_warned", False)
    for _ in range(2):
        assert not integrations.sglang.install()
    (record,) = caplog.records
    assert "SGLang is left as it is" in record.getMessage()


def test_transformer_engine_keeps_its_leaves_and_what_it_lost(te):
    host, scalars = torch.ones(2), [1, 2.5, True, None]
    out = te.make_weak_ref((meta(4, 6).t(), [meta(2, dtype=torch.float64), {"k": meta(2)}], NT(meta(1), None), host))
    assert weak(out[:3]) == (True, [True, {"k": True}], NT(True, None))
    assert out[0].stride() == (1, 6)
    assert out[1][0].dtype == torch.float64
    assert out[3] is host
    assert all(a is b for a, b in zip(te.make_weak_ref(scalars), scalars, strict=True))
    for scalar in scalars:
        assert te.make_weak_ref(scalar) is scalar


@pytest.mark.parametrize("host", [False, True])
@pytest.mark.parametrize("value", ["x", object(), {1}])
def test_transformer_engine_raises_its_type_error_with_the_path(te, value, host):
    structure = [meta(2), {"k": value}, torch.ones(1) if host else 1]
    with pytest.raises(TypeError, match=r"out\[1\]\['k'\]"):
        te.make_weak_ref(structure)


def test_megatron_weakens_in_place_through_transformer_engine(te):
    engines.need(engines.MEGATRON)
    integrations.transformer_engine.uninstall()
    cuda_graphs = engines.megatron(te.make_weak_ref)
    assert integrations.transformer_engine.install()
    tensor = meta(4, 6, dtype=torch.float64).t().requires_grad_()
    assert cuda_graphs.make_weakref(tensor) is tensor
    assert not is_weak_ref(tensor)  # not marked as graph memory
    tensor.is_from_global_mempool = True
    assert cuda_graphs.make_weakref(tensor) is tensor
    assert is_weak_ref(tensor)
    assert (tensor.stride(), tensor.dtype, tensor.requires_grad) == ((1, 6), torch.float64, True)


def test_tensorrt_llm_preserves_unsupported_values_only_when_asked(tensorrt_llm, caplog):
    value = object()
    assert weak(tensorrt_llm.make_weak_ref([meta(2), 1, None, 2.5, {"k": (meta(1),)}])) == [
        True, 1, None, 2.5, {"k": (True,)},
    ]  # fmt: skip
    with pytest.raises(TypeError, match=r"out\[1\]"):
        tensorrt_llm.make_weak_ref([meta(2), value])
    out = tensorrt_llm.make_weak_ref([meta(2), value], preserve_unsupported=True)
    assert weak(out[0])
    assert out[1] is value
    assert "out[1] is a <class 'object'>" in caplog.text


def test_a_model_output_with_a_host_tensor_keeps_its_type(te):
    modeling_outputs = pytest.importorskip("transformers.modeling_outputs")
    source = modeling_outputs.BaseModelOutput(last_hidden_state=meta(2), attentions=(torch.ones(1),))
    out = te.make_weak_ref(source)
    assert type(out) is type(source)
    assert weak(out.last_hidden_state)
    assert out["last_hidden_state"] is out.last_hidden_state
    assert out.attentions[0] is source.attentions[0]
    assert not weak(source.last_hidden_state)


def test_the_log_line_names_engine_version_and_places(caplog, request):
    with caplog.at_level(logging.INFO):
        request.getfixturevalue("tensorrt_llm")
    (record,) = caplog.records
    places = "tensorrt_llm._torch.runner.make_weak_ref, tensorrt_llm._torch.utils.make_weak_ref"
    assert record.getMessage() == f"weakref_ext: patched TensorRT-LLM 1.2.1: {places}"


def test_submodules_load_when_asked_for():
    assert set(integrations.__all__) <= set(dir(integrations))
    with pytest.raises(AttributeError, match="no attribute 'another'"):
        integrations.another  # noqa: B018


def test_a_foreign_operator_is_defined_only_where_it_is_missing():
    where = dict(namespace="weakref_ext_test_foreign", name="weak_ref_tensor")
    assert integrations.torch_ops.install(**where)
    assert integrations.torch_ops.install(**where)
    op = torch.ops.weakref_ext_test_foreign.weak_ref_tensor
    for source in (
        torch.ones(2, 3, requires_grad=True).t(),
        torch.ones(2, dtype=torch.complex64).conj(),
        torch.ones(2, dtype=torch.complex64).conj().imag,
    ):
        alias = op(source)
        assert is_weak_ref(alias)
        assert not alias.requires_grad
        assert alias.data_ptr() == source.data_ptr()
        assert (alias.is_conj(), alias.is_neg()) == (source.is_conj(), source.is_neg())
        assert torch.equal(alias, source)
    assert integrations.torch_ops.uninstall(**where)
    assert not integrations.torch_ops.uninstall(**where)
    assert not hasattr(torch.ops.weakref_ext_test_foreign, "weak_ref_tensor")
    assert not integrations.torch_ops.install("weakref_ext", "weak_ref_tensors")
    assert integrations.torch_ops.install(**where)
    assert is_weak_ref(torch.ops.weakref_ext_test_foreign.weak_ref_tensor(torch.ones(1)))
    assert integrations.torch_ops.uninstall(**where)
