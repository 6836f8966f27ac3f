"""CUDA graphs the way the reports made them: torch.cuda.graph, one pool, weak refs of whatever is at hand."""

import torch

from weakref_ext import weak_ref_tensors

N = 2**20  # floats: 4 MiB, a block of its own, so that a block of the same size is handed out again whole


def full(value, n=N):
    return torch.full((n,), float(value), device="cuda")


def capture(function, pool, keep=weak_ref_tensors):
    """A graph of ``function()``, and what ``keep`` makes of its result inside the capture."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        out = function()
        kept = keep(out)
        del out
    return graph, kept


def strong(out):
    return out


def churn(value, weak, tries=64):
    """Allocate until a tensor lands on ``weak``'s memory; that tensor, filled with ``value``."""
    held = []
    for _ in range(tries):
        held.append(torch.full_like(weak, value))
        if held[-1].data_ptr() == weak.data_ptr():
            return held[-1]
    raise AssertionError("the allocator did not hand the block out again: the raw way shows nothing here")


def equal(tensor, value):
    return bool((tensor == value).all())
