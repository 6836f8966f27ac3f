"""Promises of the vLLM plugin, checked inside a process of one vLLM release: python tests/vllm_cases.py RELEASE.

A process of its own, because the order of imports is part of what is promised. Prints a JSON object, case -> "" or the
traceback. The cases run in this order; the first ones need vLLM's modules not to be loaded yet.
"""

import copy
import importlib
import json
import logging
import os
import sys
import traceback
from dataclasses import dataclass
from types import SimpleNamespace
from unittest.mock import MagicMock, patch

import engines
import pytest
import torch

RELEASE = sys.argv[1] if __name__ == "__main__" else engines.VLLM[0]
COMPILATION = ("vllm.compilation.cuda_graph", "vllm.compilation.breakable_cudagraph")
records: list[logging.LogRecord] = []
cases = {}


def case(function):
    cases[function.__name__] = function
    return function


def meta(*shape, **options):
    return torch.empty(*shape, device="meta", **options)


def logged(level, since=0):
    return [record.getMessage() for record in records[since:] if record.levelno == level]


def plugin():
    from weakref_ext.integrations import vllm

    return vllm


def held():
    """The two functions, and who holds a drop-in."""
    modules = [importlib.import_module(name) for name in ("vllm.utils.torch_utils", *COMPILATION)]
    return [m.__name__ for m in modules if m.weak_ref_tensors is plugin().weak_ref_tensors], modules


@case
def vllm_plugins_turns_it_off():
    import vllm.plugins

    with patch.dict(os.environ, VLLM_PLUGINS="another"):
        vllm.plugins.load_general_plugins()
    assert "weakref_ext.integrations.vllm" not in sys.modules
    vllm.plugins.plugins_loaded = False


@case
def the_environment_variable_turns_it_off():
    with patch.dict(os.environ, WEAKREF_EXT_DISABLE="1"):
        assert not plugin().install()
    import vllm.utils.torch_utils as torch_utils

    assert torch_utils.weak_ref_tensors is not plugin().weak_ref_tensors
    assert "vLLM is left as it is" in logged(logging.INFO)[-1]


@case
def vllm_finds_and_installs_it_before_the_modules_load():
    import vllm.plugins

    assert not any(name in sys.modules for name in COMPILATION)
    start = len(records)
    vllm.plugins.load_general_plugins()
    assert len(held()[0]) == 3
    (line,) = logged(logging.INFO, start)
    assert f"patched vLLM {RELEASE.removeprefix('vllm-')}: " in line
    assert "vllm.utils.torch_utils.weak_ref_tensors" in line


@case
def loading_it_again_changes_and_logs_nothing():
    import vllm.plugins

    start = len(records)
    vllm.plugins.plugins_loaded = False
    vllm.plugins.load_general_plugins()
    assert len(held()[0]) == 3
    assert records[start:] == []


@case
def uninstall_restores_modules_that_loaded_since():
    assert plugin().uninstall()
    names, modules = held()
    assert names == []
    for module in modules:
        assert module.weak_ref_tensors.__module__ == "vllm.utils.torch_utils"
    assert modules[2].weak_ref_tensor.__module__ == "vllm.utils.torch_utils"
    assert not plugin().uninstall()


@case
def install_reaches_modules_that_are_loaded():
    start = len(records)
    assert plugin().install()
    assert len(held()[0]) == 3
    assert held()[1][2].weak_ref_tensor is plugin().weak_ref_tensor
    assert "vllm.compilation.breakable_cudagraph.weak_ref_tensor," in logged(logging.INFO, start)[0]


def weak(out):
    from weakref_ext import is_weak_ref

    return torch.utils._pytree.tree_map(lambda leaf: is_weak_ref(leaf) if isinstance(leaf, torch.Tensor) else leaf, out)


@case
def nested_outputs_come_back_weak():
    import vllm.compilation.cuda_graph as cuda_graph

    t = meta(4)
    assert weak(cuda_graph.weak_ref_tensors((t, [t, t, t]))) == (True, [True, True, True])
    assert weak(cuda_graph.weak_ref_tensors([t, (t, {"aux": [t]})])) == [True, (True, {"aux": [True]})]
    assert weak(cuda_graph.weak_ref_tensors(t)) is True
    alias, views = cuda_graph.weak_ref_tensors((t, [t[1:]]))
    assert alias.untyped_storage()._cdata == views[0].untyped_storage()._cdata


@case
def leaves_that_vllm_lets_through_come_back_as_they_are():
    from vllm.utils.torch_utils import LayerName, weak_ref_tensors

    leaves = [3, True, None, "layer.0", 2.5, torch.bfloat16, LayerName("layer.0")]
    out = weak_ref_tensors([meta(2), *leaves, (meta(2), leaves)])
    assert all(a is b for a, b in zip(out[1:8], leaves, strict=True))
    assert weak(out[0])
    assert weak(out[8][0])
    assert all(a is b for a, b in zip(out[8][1], leaves, strict=True))


@case
def an_object_it_does_not_know_stays_and_is_named_once():
    from vllm.utils.torch_utils import weak_ref_tensors

    class Metadata:
        pass

    start, metadata = len(records), Metadata()
    for _ in range(2):
        out = weak_ref_tensors((meta(2), [metadata, meta(2)]))
        assert out[1][0] is metadata
        assert weak((out[0], out[1][1])) == (True, True)
    (line,) = logged(logging.WARNING, start)
    assert "out[1][0] is a <class" in line
    assert "Metadata" in line


@case
def the_top_of_a_structure_is_checked_as_in_vllm():
    from vllm.utils.torch_utils import weak_ref_tensors

    for value in (None, 3, "layer", object()):
        with pytest.raises(ValueError, match="Invalid type for tensors"):
            weak_ref_tensors(value)


@case
def intermediate_tensors_keep_their_type():
    from vllm.sequence import IntermediateTensors
    from vllm.utils.torch_utils import weak_ref_tensors

    source = IntermediateTensors({"hidden_states": meta(2), "aux": [meta(3)]})
    for out in (weak_ref_tensors(source), weak_ref_tensors((meta(1), source))[1]):
        assert type(out) is IntermediateTensors
        assert weak(out.tensors) == {"hidden_states": True, "aux": [True]}
    assert weak(source.tensors) == {"hidden_states": False, "aux": [False]}


@case
def quantized_activations_are_weakened_field_by_field():
    if RELEASE == "vllm-0.26.0":
        return  # has none
    from vllm.model_executor.layers.fusion.quant_activation import QuantizedActivation
    from vllm.model_executor.layers.quantization.utils.quant_utils import kFp8StaticTensorSym
    from vllm.utils.torch_utils import weak_ref_tensors

    source = QuantizedActivation(
        meta(2, 4, dtype=torch.float8_e4m3fn), meta(1), torch.bfloat16, torch.Size([2, 4]), kFp8StaticTensorSym
    )
    for out in (source.weak_ref(), weak_ref_tensors([source])[0]):
        assert type(out) is QuantizedActivation
        assert weak((out.data, out.scale)) == (True, True)
        assert (out.orig_dtype, out.orig_shape, out.quant_key) == (torch.bfloat16, (2, 4), kFp8StaticTensorSym)
    assert not weak(source.data)


@case
def host_tensors_stay_strong():
    from vllm.utils.torch_utils import weak_ref_tensors

    @dataclass
    class Output:
        hidden: torch.Tensor
        host: torch.Tensor

    host = torch.ones(2)
    out = weak_ref_tensors((meta(2), [host, {"h": host}, Output(meta(2), host)]))
    assert out[1][0] is out[1][1]["h"] is out[1][2].host is host
    assert weak((out[0], out[1][2].hidden)) == (True, True)


@case
def an_empty_view_does_not_pin_its_storage():
    from vllm.utils.torch_utils import weak_ref_tensors

    from weakref_ext import owner_alive

    big = meta(1 << 20)
    out = weak_ref_tensors([big[3:3]])
    del big
    assert not owner_alive(out[0])


@case
def unknown_vllm_is_left_untouched_with_one_warning():
    import vllm.utils.torch_utils as torch_utils

    from weakref_ext.integrations._patch import Patch

    plugin().uninstall()
    before = (torch_utils.weak_ref_tensor, torch_utils.weak_ref_tensors)
    for change in (
        patch.object(torch_utils, "weak_ref_tensor", None),
        patch.object(torch_utils, "weak_ref_tensors", lambda tensors, pool: tensors),
    ):
        start = len(records)
        functions = (plugin().weak_ref_tensor, plugin().weak_ref_tensors)
        fresh = Patch("vLLM", "vllm.utils.torch_utils", plugin().log, *functions)
        with change:
            assert not fresh.install()
            assert not fresh.install()
        (line,) = logged(logging.WARNING, start)
        assert "is left as it is: vllm.utils.torch_utils has no weak_ref_tensor" in line
        assert (torch_utils.weak_ref_tensor, torch_utils.weak_ref_tensors) == before
    assert plugin().install()


def owning(asked, owned):
    """The op as it behaves on a GPU whose graph pool ``asked`` holds the tensors ``owned``."""
    import weakref_ext

    op = weakref_ext.weak_ref_tensors

    def weak_ref_tensors(out, *, pool=None, **options):
        if pool is None:
            return op(out, **options)
        assert pool == asked
        keep = lambda leaf: op(leaf, **options) if any(leaf is t for t in owned) else leaf  # noqa: E731
        return torch.utils._pytree.tree_map(keep, out)

    return patch.object(weakref_ext, "weak_ref_tensors", weak_ref_tensors)


@case
def break_arguments_are_weak_only_in_the_graph_pool():
    import vllm.compilation.breakable_cudagraph as breakable

    pool, inside, outside, host, metadata, seen = (0, 7), meta(2), meta(3), torch.ones(2), {"t": meta(1)}, []
    with (
        patch.dict(os.environ, VLLM_USE_BREAKABLE_CUDAGRAPH="1"),
        patch.object(torch.cuda, "CUDAGraph", MagicMock),
        owning(pool, [inside]),
    ):
        attention = breakable.eager_break_during_capture(lambda *args, **kwargs: seen.append((args, kwargs)))
        with breakable.BreakableCUDAGraphCapture(pool=pool) as capture:
            attention(inside, outside, host, metadata, "layer.0", None, [inside, outside], kv=inside)
    (args, kwargs) = seen[0]
    assert capture.num_eager_breaks == 1
    assert weak((args[0], kwargs["kv"])) == (True, True)
    assert args[1] is outside
    assert args[2] is host
    assert args[3] is metadata
    assert args[4:6] == ("layer.0", None)
    if RELEASE != "vllm-0.26.0":  # 0.26 hands no list to the function
        assert weak(args[6][0])
        assert args[6][1] is outside


@case
def outputs_that_a_break_allocated_stay_strong_in_the_stored_entry():
    import vllm.compilation.breakable_cudagraph as breakable

    pool, inside, eager = (0, 7), meta(2), meta(3)
    for output in (eager, (inside, [eager])):
        wrapper = object.__new__(breakable.BreakableCUDAGraphWrapper)
        wrapper.__dict__.update(
            runnable=lambda output=output: output,
            graph_pool=pool,
            vllm_config=SimpleNamespace(use_cumem_cudagraph_pool=False),
        )
        entry = breakable._BreakableEntry(batch_descriptor=None)
        with (
            patch.object(torch.cuda, "CUDAGraph", MagicMock),
            patch.object(torch.accelerator, "empty_cache"),
            owning(pool, [inside]),
        ):
            wrapper._capture(entry, (), {})
        if output is eager:
            assert entry.output is eager
        else:
            assert weak(entry.output[0])
            assert entry.output[1][0] is eager
    after = breakable.weak_ref_tensors(copy.copy(entry.output))  # outside of a capture: all of it
    assert weak(after) == (True, [True])


@case
def without_an_answer_from_the_allocator_break_arguments_are_weak_as_in_vllm():
    import vllm.compilation.breakable_cudagraph as breakable

    import weakref_ext

    op, start = weakref_ext.weak_ref_tensors, len(records)

    def refusing(out, *, pool=None, **options):
        if pool is not None:
            raise RuntimeError("this allocator cannot tell")
        return op(out, **options)

    with (
        patch.object(weakref_ext, "weak_ref_tensors", refusing),
        patch.object(breakable.BreakableCUDAGraphCapture, "current", lambda: SimpleNamespace(pool=(0, 7))),
    ):
        assert weak((breakable.weak_ref_tensor(meta(2)), breakable.weak_ref_tensor(meta(2)))) == (True, True)
    (line,) = logged(logging.WARNING, start)
    assert "this allocator cannot tell" in line


def main():
    sys.path.insert(0, str(engines.FOLDER / RELEASE))
    importlib.import_module("vllm.logger")  # sets up logging, and resets the loggers below its own
    logger = logging.getLogger("vllm.weakref_ext")
    logger.setLevel(logging.INFO)
    handler = logging.Handler()
    handler.emit = records.append
    logger.addHandler(handler)
    results = {}
    for name, function in cases.items():
        try:
            function()
            results[name] = ""
        except Exception:
            results[name] = traceback.format_exc()
    print(json.dumps(results))


if __name__ == "__main__":
    main()
