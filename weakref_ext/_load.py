"""Imports the native module, or says why it cannot be imported and what to do."""

import importlib
import platform
from types import ModuleType
from typing import Any

import torch

REINSTALL = "pip install --no-build-isolation --force-reinstall --no-deps weakref_ext"


def build_facts() -> dict[str, Any]:
    """What this copy was built against: written by setup.py beside the native module, readable without loading it."""
    try:
        return dict(importlib.import_module("weakref_ext._build").FACTS)
    except ImportError:
        return {}


def running_facts() -> dict[str, Any]:
    """The same facts of the running interpreter and torch."""
    return {"torch": torch.__version__, "cuda": torch.version.cuda, "python": platform.python_version()}


def release(version: str) -> list[str]:
    """Major and minor number: what torch keeps its C++ ABI within."""
    return version.split(".")[:2]


def native() -> ModuleType:
    """Return ``weakref_ext._C``.

    Raises:
        ImportError: with build and running torch, CUDA and Python, and the command that mends it.
    """
    built, running = build_facts(), running_facts()
    try:
        # Often it would load all the same, and read the fields of a tensor where another release had them.
        if built and release(built["torch"]) != release(running["torch"]):
            raise ImportError("it was built against another release of torch")
        return importlib.import_module("weakref_ext._C")
    except ImportError as error:
        rows = "".join(f"\n  {name}: built with {built.get(name)}, running {running[name]}" for name in running)
        raise ImportError(
            f"weakref_ext's native module cannot be loaded: {error}{rows}\n"
            f"Rebuild it against the running torch: {REINSTALL}"
        ) from error


def require_cuda_part(module: Any, needed_by: str) -> None:
    """Raise RuntimeError where the native module has no CUDA part; ``needed_by`` says what it is needed for."""
    if not hasattr(module, "trace_start"):
        raise RuntimeError(
            f"{needed_by}, and weakref_ext was built without its CUDA part: rebuild it on a CUDA build of torch, with "
            "WEAKREF_EXT_CUDA=1"
        )
