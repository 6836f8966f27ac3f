"""An eager break's own result under vLLM's real BreakableCUDAGraphWrapper: nothing but a strong reference keeps it.

The same scenario is run with vLLM's own functions first, so that it is known to bite.
"""

import os
from types import SimpleNamespace
from unittest.mock import patch

import pytest

pytestmark = [pytest.mark.cuda, pytest.mark.filterwarnings("ignore")]  # vLLM's imports warn

ELEMENTS = 1 << 20
KEPT = []  # wrappers: all share vLLM's one pool, and torch 2.11 fails to capture into it once its graphs are gone
FRESH, FILLED, CHURN = 7.0, 5.0, -999.0


@pytest.fixture
def breakable(monkeypatch):
    pytest.importorskip("vllm", reason="needs vLLM and its libraries: scripts/gpu_vllm.sh")
    monkeypatch.setenv("VLLM_USE_BREAKABLE_CUDAGRAPH", "1")
    monkeypatch.setenv("VLLM_PLUGINS", "")
    import vllm._C_stable_libtorch  # noqa: F401  vLLM's own operator
    import vllm.compilation.breakable_cudagraph as breakable
    from vllm.config import CUDAGraphMode

    context = SimpleNamespace(batch_descriptor="a size", cudagraph_runtime_mode=CUDAGraphMode.PIECEWISE)
    monkeypatch.setattr(breakable, "is_forward_context_available", lambda: True)
    monkeypatch.setattr(breakable, "get_forward_context", lambda: context)
    return breakable


@pytest.fixture(params=["stock", "plugin"])
def arm(request, breakable):
    from weakref_ext.integrations import vllm

    with patch.dict(os.environ):
        os.environ.pop("WEAKREF_EXT_DISABLE", None)
        if request.param == "plugin":
            assert vllm.install()
        yield request.param
        vllm.uninstall()


def capture_churn_replay(breakable, model):
    """Capture ``model``, hand its freed blocks to others, replay; return its output and those others' values."""
    import torch

    config = SimpleNamespace(compilation_config=None, use_cumem_cudagraph_pool=False)
    wrapper = breakable.BreakableCUDAGraphWrapper(model, config)
    KEPT.append(wrapper)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream), torch.inference_mode():
        wrapper()
        torch.cuda.synchronize()
        others = [torch.full((ELEMENTS,), CHURN, device="cuda") for _ in range(16)]
        output = wrapper()
        torch.cuda.synchronize()
    return output, {value for other in others for value in other.unique().tolist()}


def fresh_break(breakable):
    import torch

    return breakable.eager_break_during_capture(lambda: torch.full((ELEMENTS,), FRESH, device="cuda"))


def test_a_break_result_in_the_output_survives_the_allocator(breakable, arm):
    import torch

    static, fresh = torch.zeros(8, device="cuda"), fresh_break(breakable)

    def model():
        static.add_(1)
        result = fresh()
        return result + 1, result

    (after, result), others = capture_churn_replay(breakable, model)
    right = after.unique().tolist() == [FRESH + 1] and result.unique().tolist() == [FRESH]
    assert right == (arm == "plugin")
    assert others == {CHURN}


def test_a_break_result_that_a_later_break_writes_to_is_nobody_elses_memory(breakable, arm):
    import torch

    static, fresh = torch.zeros(8, device="cuda"), fresh_break(breakable)
    fill = breakable.eager_break_during_capture(lambda buffer: buffer.fill_(FILLED))

    def model():
        static.add_(1)
        result = fresh()
        fill(result)
        return result + 1

    output, others = capture_churn_replay(breakable, model)
    assert output.unique().tolist() == [FILLED + 1]
    assert (others == {CHURN}) == (arm == "plugin")
