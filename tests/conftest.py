import os
import sys

import pytest
import torch

import weakref_ext

sys.setrecursionlimit(10_000)  # for the Python helpers on deep structures; the walk counts levels itself

OP = torch.ops.weakref_ext.weak_ref_tensors
ENTRIES = {"python": weakref_ext.weak_ref_tensors, "op": OP, "default": OP.default}


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available() or os.environ.get("WEAKREF_EXT_REQUIRE_CUDA") == "1":
        return
    for item in items:
        if item.get_closest_marker("cuda"):
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))


@pytest.fixture(params=ENTRIES.values(), ids=ENTRIES.keys())
def weaken(request):
    """Each Python entry of the one walk."""
    return request.param


@pytest.fixture
def fake(monkeypatch):
    """The wrappers over recorded operators instead of CUDA graphs."""
    from fake_graphs import FakeBackend

    from weakref_ext.cudagraph import _backend

    backend = FakeBackend()
    monkeypatch.setattr(_backend, "BACKEND", backend)
    return backend
