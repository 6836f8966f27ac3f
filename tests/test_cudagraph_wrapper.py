"""CUDAGraphWrapper on the CPU: pass-through, and its logic over recorded operators in place of CUDA graphs."""

import subprocess
import sys

import pytest
import torch
from fake_graphs import RUBBISH, model, values

from weakref_ext import is_weak_ref
from weakref_ext.cudagraph import BreakableCUDAGraphWrapper, CUDAGraphWrapper

BOTH = pytest.mark.parametrize("wrapper", [CUDAGraphWrapper, BreakableCUDAGraphWrapper])


# Pass-through


@BOTH
def test_without_cuda_calls_pass_through(wrapper):
    wrapped = wrapper(model, enabled=False)
    x = torch.arange(3.0)
    assert values(wrapped(x, scale=2)) == values(model(x, scale=2))
    assert not is_weak_ref(wrapped(x)[0])
    assert wrapped.report() == []


@BOTH
def test_pass_through_refuses_what_a_capture_would_refuse(wrapper):
    with pytest.raises(ValueError, match="NoneType"):
        wrapper(lambda x: (x, None), enabled=False)(torch.ones(1))
    with pytest.raises(TypeError, match=r"args\[0\]"):
        wrapper(model, enabled=False)(object())


@pytest.mark.parametrize("enabled", [False, True])
def test_a_call_that_differs_from_its_key_says_where(fake, enabled):
    wrapped = CUDAGraphWrapper(model, key=lambda x, scale=1: "k", enabled=enabled)
    wrapped(torch.ones(3))
    with pytest.raises(ValueError, match=r"key 'k': args\[0\] is float32\[4\] cpu, was float32\[3\] cpu"):
        wrapped(torch.ones(4))
    with pytest.raises(ValueError, match=r"kwargs\['scale'\] \(2\) was not there"):
        wrapped(torch.ones(3), scale=2)
    wrapped(torch.ones(3))


def test_enabled_without_cuda_says_so():
    if torch.cuda.is_available():
        pytest.skip("there is CUDA")
    with pytest.raises(RuntimeError, match="CUDA is not available"):
        CUDAGraphWrapper(model, enabled=True)(torch.ones(1))


def test_construction_and_import_do_no_cuda_work():
    code = "import torch, weakref_ext.cudagraph as c; c.CUDAGraphWrapper(len); assert not torch.cuda.is_initialized()"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


@pytest.mark.parametrize(
    "wrong", [{"outputs": "maybe"}, {"warmup": -1}, {"outputs": "strong", "warmup": 0}, {"capture_sizes": [1]}], ids=str
)
def test_options_that_make_no_sense_are_refused(wrong):
    with pytest.raises(ValueError, match=r"outputs|warmup|make_inputs"):
        CUDAGraphWrapper(model, **wrong)


# Capture and replay


@BOTH
@pytest.mark.parametrize("outputs", ["weak", "strong", "copy"])
def test_the_first_call_and_every_later_one_are_right(fake, wrapper, outputs):
    calls = []

    def counted(x):
        calls.append(x)
        return model(x)

    wrapped = wrapper(counted, outputs=outputs)
    for i in range(3):
        x = torch.arange(3.0) + i
        assert values(wrapped(x)) == values(model(x))
    assert len(calls) == 2  # warm-up and capture


def test_the_stand_in_runs_no_kernel_at_the_capture(fake):
    graph = fake.begin(None, "global")
    out = torch.ones(2) * 2
    fake.end(graph)
    assert out.tolist() == [RUBBISH] * 2
    graph.replay()
    assert out.tolist() == [2, 2]


@pytest.mark.parametrize(
    ("outputs", "weak", "same"), [("weak", True, True), ("strong", False, True), ("copy", False, False)]
)
def test_what_a_call_returns_by_policy(fake, outputs, weak, same):
    wrapped = CUDAGraphWrapper(model, outputs=outputs)
    first, second = wrapped(torch.ones(2)), wrapped(torch.ones(2))
    assert is_weak_ref(first[1][0]) is weak
    assert (first is second) is same


@pytest.mark.parametrize("outputs", ["strong", "copy"])
def test_an_output_can_be_read_after_another_size_ran(fake, outputs):
    wrapped = CUDAGraphWrapper(model, outputs=outputs)
    small, large = wrapped(torch.ones(2)), wrapped(torch.ones(5) * 9)
    assert (values(small), values(large)) == (values(model(torch.ones(2))), values(model(torch.ones(5) * 9)))
    again = wrapped(torch.zeros(2))
    assert (values(small) == values(again)) is (outputs == "strong")


def test_strong_outputs_keep_the_identity_of_a_tensor_returned_twice(fake):
    wrapped = CUDAGraphWrapper(lambda x: (y := x + 1, [y]), outputs="strong")
    y, (again,) = wrapped(torch.zeros(2))
    assert y is again


def test_every_signature_gets_its_entry(fake):
    wrapped = CUDAGraphWrapper(model)
    for n, scale, times in [(4, 1, 2), (2, 1, 1), (4, 2, 1)]:
        for _ in range(times):
            assert values(wrapped(torch.ones(n), scale)) == values(model(torch.ones(n), scale))
    assert [row.signature for row in wrapped.report()] == [
        "args[0]: float32[4] cpu, args[1]: 1",
        "args[0]: float32[2] cpu, args[1]: 1",
        "args[0]: float32[4] cpu, args[1]: 2",
    ]
    assert wrapped.report()[0].output_bytes == 3 * 4 * 4


def test_nested_arguments_are_copied_to_the_static_inputs(fake):
    wrapped = CUDAGraphWrapper(lambda batch, *, extra: batch["x"] + batch["more"][0][1] * extra[0])
    for i in range(3):
        x = torch.ones(2) * i
        assert wrapped({"x": x, "more": [("a", x * 10)]}, extra=(x + 1,)).tolist() == (x + x * 10 * (x + 1)).tolist()


def test_what_the_function_writes_to_its_input_does_not_reach_the_replay(fake):
    def in_place(x):
        x.add_(1)
        return x * 1

    wrapped = CUDAGraphWrapper(in_place)
    x = torch.zeros(2)
    assert [wrapped(x).tolist() for _ in range(2)] == [[1, 1], [1, 1]]
    assert x.tolist() == [0, 0]


def test_outputs_fed_back_crosswise_are_read_before_they_are_overwritten(fake):
    wrapped = CUDAGraphWrapper(lambda a, b: (a, b, a - b))
    a, b, _ = wrapped(torch.ones(2), torch.zeros(2))
    assert wrapped(b, a)[2].tolist() == [-1, -1]


def test_outputs_fed_back_crosswise_to_a_new_capture_are_read_before_the_warm_up(fake):
    wrapped = CUDAGraphWrapper(lambda a, b, n=0: (a, b, a - b))
    a, b, _ = wrapped(torch.ones(2), torch.zeros(2))
    assert wrapped(b, a, 1)[2].tolist() == [-1, -1]


def test_fixed_addresses_are_checked(fake):
    x = torch.ones(2)
    wrapped = CUDAGraphWrapper(lambda x: x * 2, copy_inputs=False)
    wrapped(x)
    x.fill_(5)
    assert wrapped(x).tolist() == [10, 10]
    with pytest.raises(ValueError, match=r"args\[0\] is at address 0x\w+, was at 0x\w+"):
        wrapped(torch.ones(2))


def test_a_cpu_tensor_among_the_arguments_is_refused(fake):
    fake.device_type = "meta"
    with pytest.raises(ValueError, match=r"args\[1\] is a cpu tensor: .* pass a plain number"):
        CUDAGraphWrapper(lambda x, y: x)(torch.ones(1, device="meta"), torch.tensor(1))


def test_a_source_that_requires_grad_leaves_the_static_inputs_out_of_its_graph(fake):
    seen = []
    wrapped = CUDAGraphWrapper(lambda x: seen.append(x) or x * 2)
    for _ in range(2):
        wrapped(torch.ones(2, requires_grad=True) * 1)
    assert not any(x.requires_grad for x in seen)


# Sizes


def test_sizes_are_captured_the_largest_first(fake):
    seen = []
    wrapped = CUDAGraphWrapper(
        lambda x: seen.append(len(x)) or x * 2, capture_sizes=[1, 4, 2, 4], make_inputs=lambda n: [torch.zeros(n)]
    )
    assert wrapped(torch.ones(2)).tolist() == [2, 2]
    assert seen == [4, 4, 2, 2, 1, 1]
    seen.clear()
    wrapped.capture([4, 3], progress=False)
    assert seen == [3, 3]


@pytest.mark.parametrize("enabled", [True, False])
def test_capture_shows_progress_where_tqdm_is_and_works_without(fake, monkeypatch, capsys, enabled):
    wrapped = CUDAGraphWrapper(model, make_inputs=lambda n: [torch.zeros(n)], enabled=enabled)
    monkeypatch.setitem(sys.modules, "tqdm", None)
    wrapped.capture([1, 2])
    assert capsys.readouterr().err == ""
    monkeypatch.undo()
    pytest.importorskip("tqdm")
    CUDAGraphWrapper(model, make_inputs=lambda n: [torch.zeros(n)], enabled=False).capture([1, 2])
    assert "2/2" in capsys.readouterr().err


def test_capture_needs_to_know_the_arguments():
    with pytest.raises(ValueError, match="make_inputs"):
        CUDAGraphWrapper(model).capture([1])


def test_a_pool_is_prepared_before_it_is_kept(fake, monkeypatch):
    """torch 2.11 refuses a pool whose graphs are gone until its cache is emptied."""
    before = []
    monkeypatch.setattr(fake, "keep_alive", lambda pool: before.extend(fake.log))
    CUDAGraphWrapper(lambda x: x * 2, pool=(0, 7))(torch.ones(2))
    assert before[-1] == "prepare"
