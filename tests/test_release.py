"""What is released is complete: an sdist that builds, a wheel with the package alone, one version everywhere."""

import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

import weakref_ext

ROOT = Path(__file__).parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
VERSION = PYPROJECT["project"]["version"]


def run(*command: str, cwd: Path = ROOT) -> str:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


@pytest.fixture(scope="module")
def sdist(tmp_path_factory) -> Path:
    """The sdist, unpacked."""
    pytest.importorskip("build.__main__")  # a folder named build is a package too
    folder = tmp_path_factory.mktemp("sdist")
    run(sys.executable, "-m", "build", "--sdist", "--no-isolation", "--outdir", str(folder))
    (archive,) = folder.glob("*.tar.gz")
    assert archive.name == f"weakref_ext-{VERSION}.tar.gz"
    with tarfile.open(archive) as tar:
        tar.extractall(folder, filter="data")
    return folder / f"weakref_ext-{VERSION}"


def test_the_version_is_written_in_pyproject_alone():
    assert weakref_ext.__version__ == VERSION
    tracked = run("git", "ls-files", ":!benchmarks/results").split() if (ROOT / ".git").exists() else []
    named = [
        name for name in tracked if re.search(rf"\b{re.escape(VERSION)}\b", (ROOT / name).read_text("utf8", "ignore"))
    ]
    assert set(named) <= {"pyproject.toml", "CHANGELOG.md"}


def test_the_sdist_has_every_tracked_file_that_a_build_a_test_or_a_reader_needs(sdist):
    if not (ROOT / ".git").exists():
        pytest.skip("no checkout to compare with")
    kinds = ("csrc/", "cmake/", "examples/", "fuzz/", "scripts/", "tests/", "weakref_ext/")
    needed = {name for name in run("git", "ls-files").split() if name.startswith(kinds) or "/" not in name}
    missing = sorted(name for name in needed if not name.startswith(".") and not (sdist / name).exists())
    assert missing == []
    assert not (sdist / "weakref_ext" / "_build.py").exists(), "another build's facts"
    assert not list(sdist.rglob("*.so"))


def test_the_wheel_built_from_the_sdist_has_the_package_and_its_licence_and_nothing_else(sdist):
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(sdist / "dist"), cwd=sdist)
    (wheel,) = (sdist / "dist").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        metadata = archive.read(f"weakref_ext-{VERSION}.dist-info/METADATA").decode()
    sources = {
        str(path.relative_to(sdist))
        for path in (sdist / "weakref_ext").rglob("*")
        if path.suffix in (".py", ".pyi", ".typed")
    }
    sources |= {"weakref_ext/py.typed", "weakref_ext/_build.py"}
    built = {name for name in names if name.startswith("weakref_ext/")} - sources
    assert len(built) == 1
    assert re.fullmatch(r"weakref_ext/_C\..*\.so", built.pop())
    assert sources <= names
    rest = {name.split("/", 1)[1] for name in names if not name.startswith("weakref_ext/")}
    assert rest <= {"METADATA", "WHEEL", "RECORD", "top_level.txt", "entry_points.txt", "licenses/LICENSE"}
    assert re.findall(r"^Requires-Dist: ([^;\n]*)$", metadata, re.MULTILINE) == ["torch>=2.11"]
    pytest.importorskip("twine")
    assert "PASSED" in run(sys.executable, "-m", "twine", "check", "--strict", str(wheel))
