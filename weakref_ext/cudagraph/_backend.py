"""Everything the wrappers ask of CUDA, in one object, so that the logic above it also runs against a stand-in."""

import contextlib
import gc
import warnings
from collections.abc import Iterator
from typing import Any, TypeVar

import torch

import weakref_ext

from .. import _load

_C: Any = _load.native()

T = TypeVar("T")
Pool = Any  # a graph pool handle: (int, int), which torch's own annotations call by a private name


class Cuda:
    """Captures on the current device, the way ``torch.cuda.graph`` does. Construction does no CUDA work."""

    device_type = "cuda"

    def __init__(self) -> None:
        self._streams: dict[int, torch.cuda.Stream] = {}
        self._failed: list[torch.cuda.CUDAGraph] = []

    def available(self) -> bool:
        return torch.cuda.is_available()

    def capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def new_pool(self) -> Pool:
        return torch.cuda.graph_pool_handle()

    def weaken(self, out: T, pool: Pool) -> T:
        """Weak refs of what the pool owns; the rest stays strong, because nothing else would keep its memory."""
        weak: Any = weakref_ext.weak_ref_tensors
        return weak(out, pool=pool, outside="keep")  # type: ignore[no-any-return]

    @contextlib.contextmanager
    def side_stream(self) -> Iterator[None]:
        """The stream of every capture on this device, ordered after the current one and before what follows on it.

        A pool hands a freed block only to the stream it was allocated on, so all captures share torch's own capture
        stream. Leaving restores the caller's stream also where ``capture_end`` raised.
        """
        device = torch.cuda.current_device()
        if device not in self._streams:
            stream: Any = torch.cuda.graph(torch.cuda.CUDAGraph()).capture_stream
            new: Any = torch.cuda.Stream
            self._streams[device] = stream if stream.device_index == device else new()
        side, current = self._streams[device], torch.cuda.current_stream()
        side.wait_stream(current)
        try:
            with torch.cuda.stream(side):
                yield
        finally:
            current.wait_stream(side)

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def prepare(self) -> None:
        """What ``torch.cuda.graph`` does before a capture: finish pending work, give cached memory back."""
        torch.cuda.synchronize()
        if torch.compiler.config.force_cudagraph_gc:
            gc.collect()
        torch.cuda.empty_cache()
        torch._C._host_emptyCache()

    def begin(self, pool: Pool | None, mode: str) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        try:
            graph.capture_begin(pool=pool, capture_error_mode=mode)
        except RuntimeError:
            self._failed.append(graph)
            raise
        return graph

    def end(self, graph: torch.cuda.CUDAGraph, *, may_be_empty: bool = False) -> None:
        with warnings.catch_warnings():
            if may_be_empty:  # nothing to run between two eager breaks
                warnings.filterwarnings("ignore", message="The CUDA Graph is empty")
            graph.capture_end()

    def abort(self, graph: torch.cuda.CUDAGraph) -> bool:
        """Leave a capture that is not wanted any more; False if CUDA had invalidated it: :meth:`heal` then."""
        try:
            self.end(graph, may_be_empty=True)
        except RuntimeError:
            # torch's pinned-memory allocator may go on asking this graph which streams it captures
            self._failed.append(graph)
            return False
        graph.reset()
        return True

    def heal(self, pool: Pool) -> bool:
        """Undo what torch leaves behind when a capture fails; whether the pool can be captured into again.

        ``capture_end`` raises before it tells the allocator (which then no longer empties its cache) and the random
        number generators (which then refuse to run eagerly). A capture that succeeds resets the generators.
        """
        self._end_allocation(pool)
        try:
            self.keep_alive(pool)
        except RuntimeError:
            self._end_allocation(pool)
            self.keep_alive(None)
            return False
        return True

    def _end_allocation(self, pool: Pool) -> None:
        with contextlib.suppress(RuntimeError):  # where torch has done it
            torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), pool)

    def keep_alive(self, pool: Pool | None) -> torch.cuda.CUDAGraph:
        """A graph that keeps the pool while no other graph uses it, and takes no memory from it.

        A pool without graphs is given up. It can be captured into again after :meth:`prepare`, but not while a tensor
        of it lives (one in the traceback of a failed capture, say).

        Raises:
            RuntimeError: for a pool that was given up and has such a tensor.
        """
        flag = torch.zeros(1, device="cuda")
        with self.side_stream():
            try:
                graph = self.begin(pool, "thread_local")
            except RuntimeError as error:
                raise RuntimeError(
                    f"graph pool {pool} cannot be captured into: if all its graphs are gone, drop every tensor that it "
                    "still holds first, or take a new pool (torch.cuda.graph_pool_handle())"
                ) from error
            flag.zero_()
            self.end(graph)
        return graph

    def reserved(self) -> int:
        """Bytes the allocator holds: while nothing but a capture allocates, its growth is the pool's."""
        _load.require_cuda_part(_C, "graph wrappers ask the CUDA allocator what a pool owns")
        # torch's memory_reserved() makes a dict of all statistics.
        return _C.reserved_bytes(torch.cuda.current_device())  # type: ignore[no-any-return]


BACKEND = Cuda()
