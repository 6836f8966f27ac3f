"""A stand-in for CUDA graphs on the CPU: records the operators of a segment and runs them again on the same memory.

As on a GPU, a captured kernel does not run at the capture (outputs hold rubbish until the replay), and a replay reads
and writes the addresses of the capture. There is no pool: recorded tensors stay alive, so re-use of memory is not
simulated.
"""

import contextlib
import threading

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import weakref_ext

RUBBISH = 77


class FakeGraph(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        mutable = func._schema.is_mutable
        before = [(t, t.clone()) for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        out = func(*args, **kwargs)
        self.calls.append((func, args, kwargs, out))
        if mutable:
            for tensor, values in before:
                tensor.copy_(values)
        elif "empty" not in func.__name__ and not func.is_view:
            for tensor in pytree.tree_leaves(out):
                if isinstance(tensor, torch.Tensor):
                    tensor.fill_(RUBBISH)
        return out

    @torch.inference_mode()  # a replay does not care about modes, and may write to inference tensors
    def replay(self):
        for func, args, kwargs, out in self.calls:
            if "empty" in func.__name__ or func.is_view:
                continue
            again = func(*args, **kwargs)
            if not func._schema.is_mutable:
                for old, new in zip(pytree.tree_leaves(out), pytree.tree_leaves(again), strict=True):
                    if isinstance(old, torch.Tensor):
                        old.copy_(new)


class FakeBackend:
    """``log`` names what was asked for, in order; ``fail_at`` raises at the n-th begin or end of a capture."""

    device_type = "cpu"

    def __init__(self):
        self.log = []
        self.pools = 0
        self._thread = threading.local()
        self.fail_at = None
        self.invalidated = False

    @property
    def active(self):
        return getattr(self._thread, "graph", None)

    @active.setter
    def active(self, graph):
        self._thread.graph = graph

    def _step(self, name):
        self.log.append(name)
        if self.fail_at == (name, self.log.count(name)):
            self.invalidated = name == "end"
            raise RuntimeError(f"CUDA error at {name}")

    def available(self):
        return True

    def capturing(self):
        return self.active is not None

    def new_pool(self):
        self.pools += 1
        return (0, self.pools)

    def weaken(self, out, pool):
        return weakref_ext.weak_ref_tensors(out)

    def side_stream(self):
        return contextlib.nullcontext()

    def synchronize(self):
        self.log.append("synchronize")

    def prepare(self):
        self.log.append("prepare")

    def keep_alive(self, pool):
        return object()

    def reserved(self):
        return 0

    def begin(self, pool, mode):
        self._step("begin")
        self.active = FakeGraph()
        self.active.__enter__()
        return self.active

    def _stop(self, graph):
        assert self.active is graph
        self.active = None
        graph.__exit__(None, None, None)

    def end(self, graph, *, may_be_empty=False):
        self._stop(graph)
        self._step("end")

    def abort(self, graph):
        self.log.append("abort")
        if self.active is graph:
            self._stop(graph)
        return not self.invalidated

    def heal(self, pool):
        self.log.append("heal")
        self.invalidated = False
        return False


def model(x, scale=1):
    h = x * 2
    return h + scale, [h * 3, (h - 1, 7)]


def values(out):
    h, (a, (b, n)) = out
    return h.tolist(), a.tolist(), b.tolist(), n
