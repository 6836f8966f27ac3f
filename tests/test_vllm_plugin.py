"""The vLLM plugin against vLLM's released Python: tests/vllm_cases.py, once per release in a process of its own."""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import engines
import pytest
import vllm_cases

from weakref_ext.integrations import vllm

ROOT = Path(__file__).parents[1]


START = """
import sys; sys.path.insert(0, sys.argv[1])
from vllm.plugins import load_general_plugins
load_general_plugins()
import torch, vllm.logger, vllm.utils.torch_utils
if hasattr(vllm.logger, "configure_logging"):  # newer: set up after the plugins were loaded, not by the import
    from vllm.config.logging import LoggingConfig
    vllm.logger.configure_logging(LoggingConfig())
for _ in range(2):
    load_general_plugins()
    vllm.utils.torch_utils.weak_ref_tensors([torch.empty(1, device="meta")])
"""

FORKED_WORKER = """
import os
if (worker := os.fork()) == 0:
    load_general_plugins()
    for _ in range(2):
        vllm.utils.torch_utils.weak_ref_tensors([torch.empty(1, device="meta")])
    sys.stdout.flush()
    os._exit(0)
assert os.waitpid(worker, 0)[1] == 0
"""


def child(*arguments):
    environment = {**os.environ, "VLLM_NO_USAGE_STATS": "1"}
    environment.pop("VLLM_PLUGINS", None)
    command = [sys.executable, *arguments]
    process = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    if process.returncode:
        pytest.fail(process.stderr)
    return process


@functools.cache
def results(release):
    return json.loads(child("tests/vllm_cases.py", release).stdout.splitlines()[-1])


@pytest.mark.parametrize("release", engines.VLLM)
@pytest.mark.parametrize("case", vllm_cases.cases)
def test_vllm(release, case):
    engines.need(release, *engines.VLLM_IMPORTS)
    if traceback := results(release)[case]:
        pytest.fail(traceback, pytrace=False)


@pytest.mark.parametrize("release", engines.VLLM)
@pytest.mark.parametrize(("code", "processes"), [(START, 1), (START + FORKED_WORKER, 2)], ids=["engine", "worker"])
def test_the_log_shows_one_line_for_each_vllm_process(release, code, processes):
    engines.need(release, *engines.VLLM_IMPORTS)
    process = child("-c", code, str(engines.FOLDER / release))
    shown = [line for line in (process.stdout + process.stderr).splitlines() if "weakref_ext" in line]
    assert len(shown) == processes
    for line in shown:
        assert f"patched vLLM {release.removeprefix('vllm-')}: vllm.utils.torch_utils.weak_ref_tensor, " in line


def test_absent_vllm_is_harmless(monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "vllm", None)
    assert not vllm.install()
    assert not vllm.uninstall()
    assert caplog.records == []
