"""Creates .venv with a fitting torch: over the packages of the running Python if it has one, else installed.

Usage: python3 scripts/make_venv.py DIR [TORCH_REQUIREMENT]
"""

import importlib.util
import subprocess
import sys
import venv
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

OLDEST = (2, 11)


def has_torch():
    if importlib.util.find_spec("torch") is None:
        return False
    try:
        return tuple(int(part) for part in version("torch").split(".")[:2]) >= OLDEST
    except PackageNotFoundError:
        return False


def main(folder, requirement=None):
    folder = Path(folder)
    venv.create(folder, with_pip=True, clear=True)
    python = folder / "bin" / "python"
    if requirement is None and has_torch():
        # A .pth file, not --system-site-packages: the running Python may itself be that of a virtual environment.
        here = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
        print(f"{folder}: using torch {version('torch')} of {sys.executable}")
        next(folder.glob("lib/python*/site-packages")).joinpath("parent.pth").write_text("\n".join(here) + "\n")
    else:
        pip = [python, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
        subprocess.run([*pip, "setuptools>=77", "ninja", "numpy", requirement or "torch>=2.11"], check=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
