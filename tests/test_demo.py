"""The demo's table says what it measured, and its exit code whether it is good."""

import json
import os
import subprocess
import sys

import pytest
import torch

from weakref_ext import _demo

SIZES = [1, 2, 8]


def run(*args, **variables):
    command = [sys.executable, "-m", "weakref_ext", *args]
    env = {"PYTHONWARNINGS": "error", **os.environ, **variables}
    return subprocess.run(command, capture_output=True, text=True, env=env)


def test_cpu_rows_count_the_bytes_of_each_way():
    rows = {row.way: row for row in _demo.measure("cpu", 32, SIZES)}
    tensor_mib = sum(SIZES) * 32 * 4 / 2**20
    assert {way: (row.pinned_mib / tensor_mib, row.owners_alive, row.equals_eager) for way, row in rows.items()} == {
        "strong": (4, 12, True),
        "one level weak": (3, 9, True),
        "nested weak": (0, 0, True),
        "dropped (floor)": (0, 0, None),
    }


@pytest.mark.cuda
def test_gpu_rows_nested_is_at_the_floor():
    rows = {row.way: row for row in _demo.measure("cuda", 1024, [1, 64, 512, 1024])}
    floor = rows["dropped (floor)"]
    assert rows["nested weak"].pool_mib - floor.pool_mib <= _demo.TOLERANCE_MIB
    assert rows["nested weak"].pinned_mib - floor.pinned_mib <= _demo.TOLERANCE_MIB
    assert rows["nested weak"].owners_alive == 0
    aux_mib = 3 * (1 + 64 + 512 + 1024) * 1024 * 2 / 2**20
    assert rows["one level weak"].pinned_mib - floor.pinned_mib >= aux_mib
    assert rows["strong"].pinned_mib > rows["one level weak"].pinned_mib
    assert all(row.equals_eager for way, row in rows.items() if row is not floor)


def test_the_command_writes_json(tmp_path):
    file = tmp_path / "demo.json"
    done = run("demo", "--json", str(file), "--hidden", "64", "--sizes", "1,4,16")
    assert done.returncode == 0, done.stderr
    result = json.loads(file.read_text())
    assert [row["way"] for row in result["rows"]] == list(_demo.WAYS)
    assert result["sizes"] == [1, 4, 16]
    assert result["machine"]["torch"] == torch.__version__


def test_the_demo_fails_when_weak_refs_are_off():
    args = ("demo", "--hidden", "64", "--sizes", "4")
    assert run(*args, CUDA_VISIBLE_DEVICES="").returncode == 0
    off = run(*args, CUDA_VISIBLE_DEVICES="", WEAKREF_EXT_DISABLE="1", PYTHONWARNINGS="default")
    assert off.returncode == 1
    assert off.stderr.count("WEAKREF_EXT_DISABLE is set") == 1


def test_info_prints_the_facts():
    done = run("info")
    assert done.returncode == 0
    assert f"torch {torch.__version__}" in done.stdout
    assert done.stdout.startswith("weakref_ext ")
