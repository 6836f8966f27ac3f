"""The two wrappers: which entry serves a call, how one is made, and what its output is made of."""

import contextlib
import functools
import importlib
import threading
import warnings
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.utils import _pytree as pytree

import weakref_ext

from . import _backend, _recording
from ._inputs import Call, Signature, StaticInputs, describe, difference
from ._outputs import EntryReport, buffers_of, into
from ._recording import Recording, Run, Step, refuse_nesting, running

Outputs = Literal["weak", "strong", "copy"]
Key = Callable[..., Hashable]
MakeInputs = Callable[[int], Sequence[Any]]

_one_capture = threading.RLock()  # torch captures one graph at a time in a process


@dataclass(eq=False)
class _Entry:
    signature: Signature
    pool: _backend.Pool
    inputs: list[torch.Tensor]
    steps: list[Step]
    out: Any
    pool_bytes: int


def _progress(sizes: Iterable[int], wanted: bool) -> Iterable[int]:
    if wanted:
        with contextlib.suppress(ImportError):
            bar: Iterable[int] = importlib.import_module("tqdm").tqdm(sizes, desc="CUDA graphs", unit="size")
            return bar
    return sizes


class CUDAGraphWrapper:
    """Call ``fn`` through CUDA graphs, one per input signature, all in one memory pool.

    The first call of a signature runs ``fn`` for warm-up, captures it and replays the capture; later ones copy their
    tensors to the graph's static inputs and replay. ``fn`` must do the same work at every call of a signature: Python
    code runs at the capture only. Tensors that it closes over (weights, a KV cache) are read and written in place.
    What it writes to an argument stays in the static input, unless ``copy_inputs=False``. For inference: no gradient
    flows through a replay.

    Args:
        fn: takes tensors and plain values (int, float, str, None, dtype, layer names), nested in lists, tuples, dicts
            and pytree nodes. A plain value is part of the signature, so each value gets a capture of its own. Returns
            what :func:`weakref_ext.weak_ref_tensors` accepts.
        pool: graph pool handle to share with other wrappers and captures; None for a pool of this wrapper's own. The
            graphs of one pool must replay on one stream, one at a time.
        key: ``key(*args, **kwargs)`` names the entry that serves a call, for callers who know it already. The call must
            then match what was captured under that key. None: the signature (shapes, strides, dtypes, devices, plain
            values and containers of all arguments).
        copy_inputs: False makes the graph read the arguments of the capture where they are; every later call must pass
            tensors at the same addresses, and the caller keeps them alive.
        capture_sizes: sizes to capture at the first call, or by :meth:`capture`, the largest first: smaller ones then
            fit into its memory, and read leading slices of its static inputs.
        make_inputs: ``make_inputs(size)`` gives the positional arguments of a call of that size.
        outputs: ``"weak"``: the stored output refers to pool memory that it does not keep. It holds this call's values
            until the next replay of any graph in the pool: read or clone it before. For callers that read it later:
            ``"strong"``: every entry has output buffers outside the pool (a copy inside the graph, and the bytes of
            every size's outputs); they change only at this entry's next replay. ``"copy"``: every call returns clones
            that never change.
        warmup: how often ``fn`` runs on a side stream before each capture. 0 for a ``fn`` that must not run once more
            than it is called; ``outputs="strong"`` needs 1.
        enabled: None: if CUDA is available. False calls ``fn`` as it is, and still checks arguments and outputs.
        capture_error_mode: of ``torch.cuda.graph``.

    Raises:
        TypeError: for an argument that may hold tensors out of sight.
        ValueError: for a call that differs from what was captured under its key, or a CPU tensor among the arguments;
            the message says what differs and where.
        RuntimeError: for a call inside another wrapper's capture, and for what CUDA refuses to capture.
        An exception in a capture leaves no entry behind, and the device and the pool usable.
    """

    _breakable = False

    def __init__(
        self,
        fn: Callable[..., Any],
        *,
        pool: _backend.Pool | None = None,
        key: Key | None = None,
        copy_inputs: bool = True,
        capture_sizes: Sequence[int] = (),
        make_inputs: MakeInputs | None = None,
        outputs: Outputs = "weak",
        warmup: int = 1,
        enabled: bool | None = None,
        capture_error_mode: str = "global",
    ) -> None:
        if outputs not in ("weak", "strong", "copy"):
            raise ValueError(f'outputs is "weak", "strong" or "copy", got {outputs!r}')
        if warmup < (outputs == "strong"):
            raise ValueError('warmup is at least 0, and at least 1 with outputs="strong", whose buffers it sizes')
        if capture_sizes and make_inputs is None:
            raise ValueError("capture_sizes needs make_inputs, which gives the arguments of a call of a size")
        self.fn = fn
        self.outputs = outputs
        self._backend = _backend.BACKEND
        self._pool = pool
        self._own_pool = pool is None
        self._keeper: Any = None
        self._key = key
        self._copy_inputs = copy_inputs
        self._sizes = tuple(capture_sizes)
        self._make_inputs = make_inputs
        self._warmup = warmup
        self._enabled = enabled
        self._mode = capture_error_mode
        self._static = StaticInputs()
        self._entries: dict[Hashable, _Entry] = {}
        self._seen: dict[Hashable, Signature] = {}

    @property
    def enabled(self) -> bool:
        """Whether calls go through graphs."""
        return self._backend.available() if self._enabled is None else self._enabled

    @property
    def pool(self) -> _backend.Pool:
        """The handle of the graph pool: made on first use, and again after :meth:`clear`."""
        if self._pool is None:
            self._pool = self._backend.new_pool()
        return self._pool

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call = Call.of(args, kwargs)
        key = call.signature if self._key is None else self._key(*args, **kwargs)
        if not self.enabled:
            return self._pass_through(key, call, args, kwargs)
        if self._sizes and not self._entries:
            self.capture()
        entry = self._entries.get(key)
        if entry is None:
            entry = self._capture(key, call)
        else:
            self._check(key, entry, call)
            self._replay(entry, call)
        return weakref_ext.own(entry.out) if self.outputs == "copy" else entry.out

    def capture(
        self, sizes: Sequence[int] | None = None, make_inputs: MakeInputs | None = None, *, progress: bool = True
    ) -> None:
        """Capture the given sizes, or ``capture_sizes``, the largest first; those that exist are left alone.

        Shows a progress bar if tqdm is installed. When disabled, calls ``fn`` once for each size instead.
        """
        make = make_inputs or self._make_inputs
        if make is None:
            raise ValueError("capture needs make_inputs, which gives the arguments of a call of a size")
        wanted = self._sizes if sizes is None else sizes
        for size in _progress(sorted(set(wanted), reverse=True), progress):
            args = tuple(make(size))
            call = Call.of(args, {})
            key = call.signature if self._key is None else self._key(*args)
            if not self.enabled:
                self._pass_through(key, call, args, {})
            elif key not in self._entries:
                self._capture(key, call)

    def report(self) -> list[EntryReport]:
        """What each entry costs, in the order of the captures."""
        return [
            EntryReport(
                describe(entry.signature),
                output_bytes=weakref_ext.nbytes(entry.out),
                pinned_bytes=sum(nbytes for _, nbytes in weakref_ext.pinned(entry.out)),
                pool_bytes=entry.pool_bytes,
                segments=(len(entry.steps) + 1) // 2,
            )
            for entry in self._entries.values()
        ]

    def clear(self) -> None:
        """Forget every entry, and give the pool's memory back once nobody else uses it. Weak outputs become invalid."""
        if self._entries and self._backend.available():
            self._backend.synchronize()  # a graph may still be running
        self._entries.clear()
        self._seen.clear()
        self._static.clear()
        self._keeper = None
        if self._own_pool:
            self._pool = None

    def _pass_through(self, key: Hashable, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        seen = self._seen.setdefault(key, call.signature)
        self._raise_if_different(key, seen, call)
        out = self.fn(*args, **kwargs)
        weakref_ext.weak_ref_tensors(out)  # raises for what a capture would refuse
        return out

    def _raise_if_different(self, key: Hashable, captured: Signature, call: Call) -> None:
        changed = difference(captured, call.signature) if self._key is not None else None
        if changed is not None:
            raise ValueError(f"this call does not fit what was captured for key {key!r}: {changed}")

    def _check(self, key: Hashable, entry: _Entry, call: Call) -> None:
        self._raise_if_different(key, entry.signature, call)
        if not self._copy_inputs:
            call.require_addresses(entry.inputs)

    def _fill(self, inputs: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        if self._copy_inputs and inputs:
            torch._foreach_copy_(inputs, sources)

    def _replay(self, entry: _Entry, call: Call) -> None:
        refuse_nesting(entry.pool)
        self._fill(entry.inputs, self._static.sources(call.tensors))
        entry.steps[0].replay()

    def _capture(self, key: Hashable, call: Call) -> _Entry:
        if not self._backend.available():
            raise RuntimeError("CUDA is not available here: enabled=None or False calls the function as it is")
        refuse_nesting(self._pool)
        if self._backend.capturing():
            raise RuntimeError("Nested captures are not supported: the current stream is being captured")
        call.require_device(self._backend.device_type)
        with _one_capture:
            inputs = self._static.bind(call) if self._copy_inputs else call.tensors
            sources = self._static.sources(call.tensors)
            self._fill(inputs, sources)
            args, kwargs = call.with_tensors(inputs)
            out, warm = self._warm_up(args, kwargs)
            finish: Callable[[Any], Any] = self._weaken
            if self.outputs == "strong":
                finish = functools.partial(into, *buffers_of(out, self._backend.device_type), self._backend.device_type)
            del out
            self._fill(inputs, sources)  # the warm-up may have written to them
            self._backend.prepare()
            if self._keeper is None:
                self._keeper = self._backend.keep_alive(self.pool)
            recording = Recording(self._backend, self.pool, self._mode)
            try:
                out = recording.record(lambda: self.fn(*args, **kwargs), finish, warm if self._breakable else None)
            except BaseException:
                if not recording.pool_usable:
                    self._change_pool()
                raise
            entry = _Entry(call.signature, self.pool, inputs, recording.steps, out, recording.grown)
            self._entries[key] = entry
            if _recording.captured is not None:
                graphs = [step for step in entry.steps if not isinstance(step, _recording.Break)]
                _recording.captured(self._name(key, call), graphs, out)
            return entry

    def _name(self, key: Hashable, call: Call) -> str:
        name = getattr(self.fn, "__qualname__", type(self.fn).__name__)
        given = ", ".join(str(list(tensor.shape)) for tensor in call.tensors) if self._key is None else f"key={key!r}"
        return f"{name}({given})"

    def _warm_up(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, list[list[Any]]]:
        """The output of the last warm-up, and what its eager breaks returned, one list of leaves each."""
        out: Any = None
        returned: list[list[Any]] = []

        def note(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            returned.append(pytree.tree_leaves(result))
            return result

        run = Run(self._pool, breaks=note)
        with running(run), self._backend.side_stream():
            for _ in range(self._warmup):
                returned.clear()
                out = self.fn(*args, **kwargs)
        return out, returned

    def _weaken(self, out: Any) -> Any:
        return self._backend.weaken(out, self.pool)

    def _change_pool(self) -> None:
        if not self._own_pool:
            warnings.warn(
                "torch cannot capture into this graph pool again after a capture that CUDA invalidated: later captures "
                "of this wrapper go to a pool of their own",
                RuntimeWarning,
                stacklevel=2,
            )
        self._own_pool, self._pool, self._keeper = True, None, None


class BreakableCUDAGraphWrapper(CUDAGraphWrapper):
    """A :class:`CUDAGraphWrapper` that captures ``fn`` in segments around the calls marked with :func:`eager_break`.

    A break runs eagerly at every call, between the replays of the segments around it: for attention that cannot be
    captured, or anything that reads the device. At the capture the segment before a break is replayed first, so a
    break sees real values from the start, and runs once for the call. See :func:`eager_break` for what it may return.
    """

    _breakable = True

    def _replay(self, entry: _Entry, call: Call) -> None:
        with running(Run(entry.pool)):
            self._fill(entry.inputs, self._static.sources(call.tensors))
            for step in entry.steps:
                step.replay()
