"""One torch at a time: no deprecated names of it, and no import of a module that was built against another.

scripts/versions.py runs these against every release, and imports real builds under the wrong torch.
"""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import weakref_ext
from weakref_ext import _load


def test_import_and_use_log_no_deprecation_of_torch():
    code = (
        "import weakref_ext as w\n"
        "assert w.weak_ref_tensors([w.LayerName('x')]) == [w.LayerName('x')]\n"
        "try: w.weak_ref_tensors([None])\n"
        "except ValueError: pass\n"
    )
    done = subprocess.run([sys.executable, "-P", "-W", "error", "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def import_copy_built_against(version: str, folder: Path) -> str:
    """Import a copy of the package whose build facts name another torch; its standard error."""
    package = Path(weakref_ext.__file__).parent
    shutil.copytree(package, folder / "weakref_ext", ignore=shutil.ignore_patterns("__pycache__"))
    facts = {**_load.build_facts(), "torch": version}
    (folder / "weakref_ext" / "_build.py").write_text(f"FACTS = {facts!r}\n")
    code = f"import sys; sys.path.insert(0, {str(folder)!r}); import weakref_ext"
    return subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True).stderr


def test_a_build_against_another_release_of_torch_is_refused_with_both_versions_and_the_way_out(tmp_path):
    text = import_copy_built_against("1.13.1+cu117", tmp_path)
    assert "ImportError: weakref_ext's native module cannot be loaded" in text
    assert f"torch: built with 1.13.1+cu117, running {torch.__version__}" in text
    assert _load.REINSTALL in text


def test_a_build_against_another_patch_of_the_same_release_is_accepted(tmp_path):
    same = re.sub(r"^(\d+\.\d+)\..*", r"\1.99", torch.__version__)
    assert import_copy_built_against(same, tmp_path) == ""


def test_a_native_module_that_does_not_load_says_the_same(monkeypatch):
    def fail(name):
        if name == "weakref_ext._C":
            raise ImportError("undefined symbol: x")
        return sys.modules[name]

    monkeypatch.setattr(_load.importlib, "import_module", fail)
    with pytest.raises(ImportError, match=r"cannot be loaded: undefined symbol: x\n.*built with"):
        _load.native()
