"""The examples run; on a GPU with the checks that they make there."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parents[1] / "examples"


def run(*command):
    done = subprocess.run([sys.executable, *command], cwd=EXAMPLES, capture_output=True, text=True, timeout=570)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def check(result):
    for row in result["rows"]:
        assert row["tokens"] == row["equal"] == row["equal_again"] > 0


def test_decoding_through_the_wrappers_equals_eager(tmp_path):
    sizes = [1, 2, 4, 8, 16, 32] if torch.cuda.is_available() else [1, 2]
    said = run("llm.py", "--batches", *map(str, sizes), "--json", str(tmp_path / "r.json"))
    assert "RANDOM weights" in said
    result = json.loads((tmp_path / "r.json").read_text())
    check(result)
    assert {(row["batch"], row["way"]) for row in result["rows"]} == {
        (size, way) for size in sizes for way in ("full", "full, strong", "breakable")
    }
    assert (result["pool_mib"] is None) is (result["device"] == "cpu")


@pytest.mark.skipif("WEAKREF_EXT_LLM" not in os.environ, reason="WEAKREF_EXT_LLM names the GGUF file of a Llama")
def test_real_weights_decode_as_eager(tmp_path):
    said = run("llm.py", "--weights", os.environ["WEAKREF_EXT_LLM"], "--json", str(tmp_path / "r.json"))
    check(json.loads((tmp_path / "r.json").read_text()))
    if "SmolLM2" in os.environ["WEAKREF_EXT_LLM"]:
        assert "Paris" in said


def test_a_token_that_differs_fails_the_example(monkeypatch, capsys):
    spec = importlib.util.spec_from_file_location("llm", EXAMPLES / "llm.py")
    llm = importlib.util.module_from_spec(spec)
    monkeypatch.setattr(sys, "path", [str(EXAMPLES), *sys.path])
    spec.loader.exec_module(llm)
    monkeypatch.setattr(llm, "POOL_SIZES", (1, 2))

    class Wrong(llm.CUDAGraphWrapper):
        def __call__(self, tokens, positions):
            hidden, aux = super().__call__(tokens, positions)
            return hidden, [a + 1 for a in aux]

    monkeypatch.setattr(llm, "CUDAGraphWrapper", Wrong)
    assert llm.main(["--batches", "2", "--tokens", "2"]) == 1
    assert "DIFFERENT FROM EAGER" in capsys.readouterr().out


@pytest.mark.cuda
def test_tensor_parallel_ranks_agree_with_eager():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    said = run("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "tensor_parallel.py")
    assert said.count("every check holds") == 2
