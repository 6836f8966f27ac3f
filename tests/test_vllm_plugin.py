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


@functools.cache
def results(release):
    environment = {**os.environ, "VLLM_NO_USAGE_STATS": "1"}
    environment.pop("VLLM_PLUGINS", None)
    command = [sys.executable, "tests/vllm_cases.py", release]
    child = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    if child.returncode:
        pytest.fail(child.stderr)
    return json.loads(child.stdout.splitlines()[-1])


@pytest.mark.parametrize("release", engines.VLLM)
@pytest.mark.parametrize("case", vllm_cases.cases)
def test_vllm(release, case):
    engines.need(release, *engines.VLLM_IMPORTS)
    if traceback := results(release)[case]:
        pytest.fail(traceback, pytrace=False)


def test_absent_vllm_is_harmless(monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "vllm", None)
    assert not vllm.install()
    assert not vllm.uninstall()
    assert caplog.records == []
