"""One forward as a list of steps: captured segments and the eager calls between them.

Why a replay gives the right values. While a forward is captured, every tensor that its code can reach is strong: code
never sees a weak ref, so the allocator hands out a block again only after its last use in program order. A replay runs
the same steps in the same order, and each step writes what later ones read. So a weak ref that is read at its place in
that order (a break's argument, the buffer of what a break returned, the output after the last step) finds what was
written for it, whatever other captures of the pool left there before. Only a replay of another graph of the same pool
in between would disturb that, and :class:`Run` refuses it.
"""

import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ParamSpec, Protocol, TypeVar

import torch
from torch.utils import _pytree as pytree

from ._backend import Cuda, Pool
from ._inputs import Signature, difference, meta, paths
from ._outputs import buffers_for, outline

P = ParamSpec("P")
R = TypeVar("R")


class Step(Protocol):
    def replay(self) -> None: ...


@dataclass(eq=False)
class Run:
    """What a wrapper is doing on this thread. ``breaks``: called at an eager break, None while breaks run inline."""

    pool: Pool | None
    capturing: bool = False
    breaks: Callable[..., Any] | None = None
    outer: "Run | None" = None


class _Thread(threading.local):
    run: Run | None = None


_thread = _Thread()

# A sanitizer's trace, while one is on: captured(name, graphs, outputs).
captured: Callable[[str, list[Any], Any], None] | None = None


@contextmanager
def running(run: Run) -> Iterator[Run]:
    """Make ``run`` this thread's innermost one.

    Raises:
        RuntimeError: inside a segment that is being captured, and inside a run over the same pool, whose live tensors
            this one would overwrite.
    """
    refuse_nesting(run.pool)
    run.outer = _thread.run
    _thread.run = run
    try:
        yield run
    finally:
        _thread.run = run.outer


def refuse_nesting(pool: Pool | None) -> None:
    outer = _thread.run
    if outer is None:
        return
    if outer.capturing:
        raise RuntimeError(
            "Nested captures are not supported: a wrapper was called inside a segment that another one is capturing. "
            "Call the wrapped function itself there, or move the call into an eager_break."
        )
    while outer is not None:
        if pool is not None and outer.pool == pool:
            raise RuntimeError(
                "a wrapper was called in an eager break of another one with the same pool: its graph would overwrite "
                "the outer one's tensors. Give the inner wrapper a pool of its own."
            )
        outer = outer.outer


def eager_break(function: Callable[P, R]) -> Callable[P, R]:
    """Mark a function to run eagerly between two captured segments of a :class:`BreakableCUDAGraphWrapper`.

    Elsewhere, in a :class:`CUDAGraphWrapper` and inside another break it is called as it is. At a replay it is called
    with the arguments of the capture: tensors at the same addresses with the replay's values, all else the same
    objects. What it returns must have the structure, shapes, dtypes and plain values of the capture. A tensor that it
    returns is copied to where the next segments read it, unless it is an argument or the same memory at every call.
    An argument or result that is kept longer than the forward is valid until another graph of the pool replays.
    """

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        run = _thread.run
        if run is None or run.breaks is None:
            return function(*args, **kwargs)
        at, run.breaks = run.breaks, None
        try:
            return at(function, args, kwargs)  # type: ignore[no-any-return]
        finally:
            run.breaks = at

    return call


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a is b or (a.numel() > 0 and a.data_ptr() == b.data_ptr() and meta(a) == meta(b))


@dataclass(eq=False)
class Break:
    """An eager call between two segments, with weak refs of the arguments that the pool owns.

    ``buffers``: where the next segments read a returned tensor, which a replay copies there. ``fixed``: a returned
    tensor that they read where it is.
    """

    function: Callable[..., Any]
    leaves: list[Any]
    spec: pytree.TreeSpec
    device_type: str
    returned: Signature
    buffers: dict[int, torch.Tensor]
    fixed: dict[int, torch.Tensor]

    def replay(self) -> None:
        # Containers are made anew: the function may keep or change them.
        args, kwargs = pytree.tree_unflatten(self.leaves, self.spec)
        leaves, spec = pytree.tree_flatten(self.function(*args, **kwargs))
        changed = difference(self.returned, outline(leaves, spec, self.device_type), ())
        if changed is not None:
            raise RuntimeError(
                f"{self._name()} returned something else than at its capture: {changed}. "
                "The segments captured after it cannot follow."
            )
        for i, tensor in self.fixed.items():
            if leaves[i].data_ptr() != tensor.data_ptr():
                raise RuntimeError(
                    f"{self._name()} returned a tensor at another address than at its capture: {paths(spec, ())[i]} "
                    "was an argument, or the same memory at every call. Return a clone to have it copied."
                )
        self.fill(leaves)

    def fill(self, leaves: Sequence[Any] | Mapping[int, Any]) -> None:
        for i, buffer in self.buffers.items():
            buffer.copy_(leaves[i].detach())

    def _name(self) -> str:
        return f"the eager break {getattr(self.function, '__qualname__', repr(self.function))}"


@dataclass(eq=False)
class Recording:
    """Captures a forward and runs each step as soon as it is recorded, so that an eager break sees the values it would
    see at a replay, and the last step leaves the outputs of this call."""

    backend: Cuda
    pool: Pool
    mode: str
    steps: list[Step] = field(default_factory=list)
    grown: int = 0
    pool_usable: bool = True
    _graph: Any = None
    _breakable: bool = False
    _reserved: int = 0
    _fill: Callable[[], None] | None = None
    _error: BaseException | None = None

    def record(self, forward: Callable[[], Any], finish: Callable[[Any], Any], warm: list[list[Any]] | None) -> Any:
        """Run ``forward`` and ``finish`` (on its result) under capture; return what ``finish`` returned.

        ``warm``: what the eager breaks returned in a run before, still alive; None captures them as part of the graph.
        """
        run = Run(self.pool)
        if warm is not None:
            self._breakable = True
            run.breaks = functools.partial(self._break, run, iter(warm))
        with running(run), self.backend.side_stream():
            try:
                self._begin(run)
                out = forward()
                if self._error is not None:
                    raise RuntimeError("an eager break failed, and the forward went on") from self._error
                out = finish(out)
                self._end(run)
                return out
            except BaseException:
                run.capturing = False
                self._abort()
                raise
            finally:
                run.breaks = None  # it refers to the run: graphs go with their last reference, not at a collection

    def _begin(self, run: Run) -> None:
        self._reserved = self.backend.reserved()
        self._graph = self.backend.begin(self.pool, self.mode)
        run.capturing = True

    def _end(self, run: Run) -> None:
        run.capturing = False
        self.backend.end(self._graph, may_be_empty=self._breakable)
        graph, self._graph = self._graph, None
        self.grown += self.backend.reserved() - self._reserved
        if self._fill is not None:
            self._fill()
            self._fill = None
        self.steps.append(graph)
        graph.replay()

    def _abort(self) -> None:
        self.steps.clear()
        self._fill = self._error = None
        graph, self._graph = self._graph, None
        if graph is not None and not self.backend.abort(graph):
            self.pool_usable = self.backend.heal(self.pool)

    def _break(self, run: Run, warm: Iterator[list[Any]], function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if self._error is not None:
            raise RuntimeError("an eager break failed before this one") from self._error
        try:
            self._end(run)
            arguments, arguments_spec = pytree.tree_flatten((args, kwargs))
            results, spec = pytree.tree_flatten(function(*args, **kwargs))
            returned = outline(results, spec, self.backend.device_type)
            self._begin(run)
            return self._adopt(function, arguments, arguments_spec, results, returned, next(warm, []))
        except BaseException as error:
            self._error = error
            raise

    def _adopt(
        self,
        function: Callable[..., Any],
        arguments: list[Any],
        arguments_spec: pytree.TreeSpec,
        results: list[Any],
        returned: Signature,
        before: list[Any],
    ) -> Any:
        """Record the break, at the start of the segment after it; return its result as that segment will read it."""
        tensors = {i: leaf for i, leaf in enumerate(arguments) if isinstance(leaf, torch.Tensor)}
        fixed: dict[int, torch.Tensor] = {}
        copied: list[int] = []
        for i, leaf in enumerate(results):
            if isinstance(leaf, torch.Tensor):
                known = [*tensors.values(), *before[i : i + 1]]
                if any(isinstance(other, torch.Tensor) and _same(leaf, other) for other in known):
                    fixed[i] = leaf
                else:
                    copied.append(i)
        # On the device these come from the pool, as a captured kernel's output does; _fill writes to them.
        made = buffers_for(results, copied)
        handed = [made.get(i, leaf) for i, leaf in enumerate(results)]
        with torch.inference_mode(False):  # replays write to these in any mode
            weak = iter(self.backend.weaken([*tensors.values(), *fixed.values(), *made.values()], self.pool))
        arguments = [next(weak) if i in tensors else leaf for i, leaf in enumerate(arguments)]
        step = Break(
            function,
            arguments,
            arguments_spec,
            self.backend.device_type,
            returned,
            fixed=dict(zip(fixed, weak, strict=False)),
            buffers=dict(zip(made, weak, strict=True)),
        )
        self.steps.append(step)
        self._fill = functools.partial(step.fill, {i: results[i] for i in copied})
        return pytree.tree_unflatten(handed, returned.spec)
