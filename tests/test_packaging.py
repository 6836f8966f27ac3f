"""What is installed, how it is typed, and what a broken build says."""

import subprocess
import sys
import tarfile
from importlib import metadata, resources
from pathlib import Path

import pytest
import torch

import weakref_ext
from weakref_ext import _load

ROOT = Path(__file__).parents[1]


def test_the_version_is_the_distribution_s():
    assert weakref_ext.__version__ == metadata.version("weakref_ext")


def test_torch_is_the_only_requirement():
    assert [r for r in metadata.requires("weakref_ext") if "extra ==" not in r] == ["torch>=2.11"]


def test_the_package_is_typed():
    files = resources.files("weakref_ext")
    assert files.joinpath("py.typed").is_file()
    always, cuda_only = files.joinpath("_C.pyi").read_text().split("# with the CUDA part only")
    stub = always + cuda_only if _load.build_facts()["cuda_part"] else always
    native = {name for name in dir(weakref_ext._C) if not name.startswith("__")}
    assert native == {line.split("(")[0].split()[1] for line in stub.splitlines() if line.startswith("def ")}


def test_public_names_are_documented():
    for name in weakref_ext.__all__:
        assert name == "__version__" or getattr(weakref_ext, name).__doc__


def test_import_does_no_cuda_work_and_warns_of_nothing():
    code = (
        "import weakref_ext, torch, sys\n"
        "assert not torch.cuda.is_initialized()\n"
        "assert 'torch._dynamo' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-X", "dev", "-W", "error", "-c", code], check=True, cwd="/")


def test_a_native_module_that_does_not_load_says_what_and_the_way_out(monkeypatch):
    real = _load.importlib.import_module

    def broken(name):
        if name == "weakref_ext._C":
            raise ImportError("undefined symbol: _ZN3c10")
        return real(name)

    monkeypatch.setattr(_load.importlib, "import_module", broken)
    monkeypatch.setattr(_load, "build_facts", lambda: {"torch": torch.__version__, "cuda": "13.0", "python": "3.12.1"})
    with pytest.raises(ImportError) as error:
        _load.native()
    text = str(error.value)
    assert "undefined symbol: _ZN3c10" in text
    assert f"torch: built with {torch.__version__}, running {torch.__version__}" in text
    assert "cuda: built with 13.0" in text
    assert "python: built with 3.12.1" in text
    assert _load.REINSTALL in text


def test_build_facts_are_those_of_this_build():
    assert _load.build_facts()["torch"] == torch.__version__
    assert _load.build_facts()["cuda"] == torch.version.cuda


def test_an_sdist_holds_all_that_a_build_needs(tmp_path):
    code = f"from setuptools import build_meta; build_meta.build_sdist({str(tmp_path)!r})"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True)
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        names = {name.split("/", 1)[1] for name in tar.getnames() if "/" in name}
    wanted = {str(p.relative_to(ROOT)) for p in (ROOT / "csrc").rglob("*.*")}
    assert wanted | {"setup.py", "LICENSE", "README.md", "weakref_ext/_C.pyi", "weakref_ext/py.typed"} <= names
    assert not {name for name in names if name.endswith((".so", "_build.py"))}
