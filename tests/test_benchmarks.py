"""The benchmarks run, say on what they ran, and are what figures in the README and in docs/ are made from."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import _harness, readme  # noqa: E402

KIND = "gpu" if torch.cuda.is_available() else "cpu"


def run(*args):
    command = [sys.executable, "-m", *args]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=570)


@pytest.mark.parametrize("name", _harness.NAMES)
def test_every_benchmark_runs_alone_and_writes_what_it_measured_and_on_what(name, tmp_path):
    done = run(f"benchmarks.{name}", "--quick", "--out", str(tmp_path))
    if KIND == "cpu" and importlib.import_module(f"benchmarks.{name}").NEEDS_GPU:
        assert (done.returncode, done.stdout) == (1, f"== {name} needs a GPU\n")
        assert list(tmp_path.iterdir()) == []
        return
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{name} took " in done.stdout
    result = json.loads((tmp_path / f"{name}_{KIND}.json").read_text())
    assert result["machine"]["torch"] == torch.__version__
    assert set(result["machine"]) >= {"cpu", "cores", "gpu", "gpus", "cuda", "python", "weakref_ext", "date"}
    assert len(result) > 1


def test_one_command_runs_the_named_ones(tmp_path):
    done = run("benchmarks", "replay", "memory", "--quick", "--out", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert {file.name for file in tmp_path.iterdir()} == {f"replay_{KIND}.json", f"memory_{KIND}.json"}
    assert run("benchmarks", "nonsense").returncode == 2


def test_a_benchmark_that_fails_fails_the_command_and_not_the_others(monkeypatch, tmp_path, capsys):
    broken, sound = (importlib.import_module(f"benchmarks.{name}") for name in ("replay", "memory"))
    monkeypatch.setattr(broken, "measure", lambda quick: 1 / 0)
    monkeypatch.setattr(sound, "measure", lambda quick: dict(claims=[_harness.claim("one", 1, most=0)]))
    monkeypatch.setattr(sound, "report", lambda sections: "a table")
    assert _harness.main("replay", "memory", "--out", str(tmp_path)) == 1
    said = capsys.readouterr()
    assert "ZeroDivisionError" in said.err
    assert "a table\n  FAILS: one: 1, at most 0" in said.out
    assert _harness.main("memory", "--out", str(tmp_path)) == 0
    assert _harness.main("memory", "--out", str(tmp_path), "--strict") == 1


def test_contenders_take_turns():
    turns = []
    calls = {name: lambda name=name: turns.append(name) for name in "abc"}
    taken = _harness.samples(calls, rounds=2, round_s=0)
    assert [len(values) for values in taken.values()] == [2, 2, 2]
    assert "".join(turns[-6:]) == "abcbca"


def test_a_ratio_is_taken_within_a_round():
    assert _harness.ratio([10, 200, 90], [1, 20, 30])["median"] == 10


@pytest.mark.skipif(KIND == "gpu", reason="the CPU's accounting")
def test_the_memory_that_is_pinned_is_what_arithmetic_expects():
    from benchmarks import memory

    for row in memory.measure(quick=True)["rows"]:
        strong = {"strong": 1 + row["num_aux"], "one level weak": row["num_aux"]}.get(row["way"], 0)
        assert row["expected_mib"] == strong * (1 + 2 + 4) * 32 * 4 / 2**20
        assert row["unexplained_mib"] == 0
        assert row["pool_mib"] == row["expected_mib"] + row["rounding_mib"] + row["free_mib"]


def test_a_slope_lies_in_its_interval():
    from benchmarks import growth

    found = growth.fit({x: [3 * x + 10 + noise for noise in (-1, 0, 1)] for x in (1, 10, 100)})
    assert found["ns"] == {1: 13, 10: 40, 100: 310}
    step = found["ns_per_step"]
    assert step["slope"] == pytest.approx(3, abs=0.01)
    assert step["low"] < step["slope"] < step["high"]
    assert step["high"] - step["low"] < 0.1


def test_the_figures_are_drawn_from_the_committed_results(tmp_path):
    pytest.importorskip("matplotlib")
    from benchmarks import plot

    if not plot.FIGURES.exists():
        pytest.skip("an sdist has no docs/")
    drawn = {file.name for file in plot.main(figures=tmp_path)}
    committed = {file.name for file in plot.FIGURES.iterdir()}
    assert drawn == committed
    again = tmp_path / "again"
    for file in plot.main(figures=again):
        if file.suffix == ".svg":
            assert file.read_bytes() == (tmp_path / file.name).read_bytes()


def test_the_readme_s_numbers_are_the_committed_results():
    text = readme.README.read_text()
    assert text == readme.rewritten(text), "run python -m benchmarks.readme"


def test_the_blocks_are_rewritten_and_nothing_around_them():
    text = "before\n<!-- numbers -->\n1 ns, by hand\n<!-- /numbers -->\nafter\n<!-- faults -->\n<!-- /faults -->\nend\n"
    new = readme.rewritten(text)
    assert new.startswith("before\n<!-- numbers -->\nOne call for `(2:T,[3:T])`")
    assert "<!-- /numbers -->\nafter\n<!-- faults -->\n| released function |" in new
    assert new.endswith("<!-- /faults -->\nend\n")
    assert "by hand" not in new
    assert readme.rewritten(new) == new
    with pytest.raises(ValueError, match="no block between"):
        readme.rewritten("a README without markers")
