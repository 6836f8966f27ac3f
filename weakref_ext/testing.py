"""For the test suites of code that uses weak refs: assertions, and a corpus of structures that engines return.

from weakref_ext import testing

weak = my_wrapper.stored_output
testing.assert_weak(weak)       # every tensor is a weak ref
testing.assert_released(weak)   # and nothing but the graph pool keeps the memory
"""

import gc
import types
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from . import _load
from ._inspect import Passthrough, nbytes, own
from ._layer_name import LayerName

_C = _load.native()

__all__ = ["CORPUS", "assert_released", "assert_weak", "churn"]


def assert_weak(out: Any, *, passthrough: Passthrough = ()) -> None:
    """Fail unless every tensor in `out` is a weak ref.

    Raises:
        AssertionError: naming the path and shape of every strong tensor.
        ValueError: for a value that is not understood, with its path.
    """
    strong = [(path, tensor) for path, tensor in _C.leaves(out, passthrough) if not _C.is_weak_ref(tensor)]
    rows = [f"{path}: strong tensor {tuple(tensor.shape)} {tensor.dtype}" for path, tensor in strong]
    assert not strong, "\n  ".join([f"{len(strong)} tensors own their memory", *rows])


def assert_released(weak: Any, *, passthrough: Passthrough = ()) -> None:
    """Fail if anything in `weak` still has an owner: a strong tensor, or a weak ref whose source is alive.

    Raises:
        AssertionError: with the path and bytes of each, and who holds it, as far as the garbage collector knows: the
            owner's Python tensors and what refers to them.
        ValueError: for a value that is not understood, with its path.
    """
    held = [(path, tensor) for path, tensor in _C.leaves(weak, passthrough) if _C.owner_alive(tensor)]
    rows = [f"{path}: {nbytes(tensor)} bytes, {_holders(tensor)}" for path, tensor in held]
    assert not held, "\n  ".join([f"{len(held)} tensors are still owned", *rows])


def _holders(tensor: torch.Tensor) -> str:
    if not _C.is_weak_ref(tensor):
        return "it owns its memory itself"
    objects = gc.get_objects()
    owners = [
        candidate for candidate in objects if issubclass(type(candidate), torch.Tensor) and _C.owns(candidate, tensor)
    ]
    del objects
    names = [f"a {type(owner).__name__} {tuple(owner.shape)} held by {_referrers(owner, owners)}" for owner in owners]
    return "; ".join(names) or "owned from C++ (autograd, another thread, a storage)"


def _referrers(owner: torch.Tensor, found: list[torch.Tensor]) -> str:
    texts = []
    for referrer in gc.get_referrers(owner):
        if referrer is found or (isinstance(referrer, types.FrameType) and referrer.f_code is _holders.__code__):
            continue
        if isinstance(referrer, types.FrameType):
            texts.append(f"a variable of {referrer.f_code.co_qualname}() at line {referrer.f_lineno}")
        elif isinstance(referrer, dict):
            keys = [key for key, value in referrer.items() if value is owner]
            texts.append(f"a dict under {keys[0]!r}" if keys else "a dict")
        else:
            length = f" of {len(referrer)}" if isinstance(referrer, list | tuple) else ""
            texts.append(f"a {type(referrer).__name__}{length}")
    return ", ".join(texts) or "a local variable"


def churn(
    fn: Callable[[], Any], keep: Callable[[Any], Any] | None = None, *, blocks: int = 16
) -> list[tuple[str, str]]:
    """Capture ``fn``, drop its output, churn the allocator, capture again, replay, compare; return what changed.

    ``fn()`` runs once eagerly, which gives the right values, and twice under capture, into one graph pool: it must give
    the same values every time, and may not keep what it makes. ``keep(out)`` runs inside each capture; what it returns
    is kept instead of the output, in the same structure (by default weak refs of what the pool owns). Then ``blocks``
    tensors of the size of each kept one are allocated and filled with rubbish, so that memory that nobody owns gets new
    owners, and both graphs replay.

    Returns:
        ``[(path, when)]`` of every tensor that is not bitwise equal: ``when`` is ``"replay"`` for one that the first
        replay of the first graph did not make right, ``"churn"`` for one that was right, and is not after the churn and
        a replay of the second graph and then its own. ``[]`` if all is well.

    Raises:
        RuntimeError: without CUDA, and what a capture raises.
        ValueError: for an output that is not understood, with its path.
    """
    from .cudagraph import _backend

    backend = _backend.BACKEND
    if not backend.available():
        raise RuntimeError("churn() captures CUDA graphs, and CUDA is not available")
    pool = backend.new_pool()
    with backend.side_stream():
        expected = own(fn())

    def capture() -> tuple[Any, Any]:
        with backend.side_stream():
            backend.prepare()
            graph = backend.begin(pool, "global")
            try:
                out = fn()
                kept = backend.weaken(out, pool) if keep is None else keep(out)
                del out
            except BaseException:
                if not backend.abort(graph):
                    backend.heal(pool)
                raise
            backend.end(graph)
        return graph, kept

    first, kept = capture()
    first.replay()
    changed = {path: "replay" for path in _different(kept, expected)}
    rubbish = []
    for _, tensor in _C.leaves(expected, ()):
        for _ in range(blocks):
            rubbish.append(torch.empty(tensor.nbytes, dtype=torch.uint8, device=tensor.device).fill_(0xA5))
    second, again = capture()
    second.replay()
    first.replay()
    changed |= {path: "churn" for path in _different(kept, expected) if path not in changed}
    del again, rubbish  # until here they hold their memory
    return list(changed.items())


def _different(out: Any, expected: Any) -> list[str]:
    pairs = zip(_C.leaves(out, ()), _C.leaves(expected, ()), strict=True)
    return [path for (path, a), (_, b) in pairs if not torch.equal(_bytes(a), _bytes(b))]


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


class Point(NamedTuple):
    hidden: torch.Tensor
    aux: list[torch.Tensor]


@dataclass
class Output:
    hidden: torch.Tensor
    aux: tuple[torch.Tensor, ...]
    step: int = 0


@dataclass(frozen=True, slots=True)
class Frozen:
    scale: torch.Tensor
    inner: Output


_t = torch.randn

# name -> maker of a fresh structure of CPU tensors, each one that weak_ref_tensors takes
CORPUS: dict[str, Callable[[], Any]] = {
    "tensor": lambda: _t(2, 3),
    "views": lambda: (_t(4, 6).t(), _t(8)[2:5], _t(1, 3).expand(4, 3), _t(9)[3:3], torch.tensor(1.0)),
    "EAGLE3": lambda: (_t(4, 8), [_t(4, 8), _t(4, 8), _t(4, 8)]),
    "piecewise": lambda: [_t(2), _t(2), 7, True],
    "partition": lambda: (_t(2), _t(3), LayerName("model.layers.0.attn")),
    "empty": lambda: ([], (), {}, _t(0, 4)),
    "shared": lambda: [*_t(3, 4).unbind()],
    "repeated": lambda: [x := _t(2), (x, {"again": x})],
    "dict": lambda: {"hidden": _t(2), 3: [_t(1)], ("a", 1): {}},
    "OrderedDict": lambda: OrderedDict(b=_t(1), a=_t(2)),
    "defaultdict": lambda: defaultdict(list, aux=[_t(1), _t(2)]),
    "namedtuple": lambda: Point(_t(2), [_t(1), _t(1)]),
    "return_types": lambda: torch.max(_t(3, 4), dim=0),
    "Size": lambda: (_t(2), torch.Size([3, 4])),
    "dataclass": lambda: Output(_t(2), (_t(1), _t(3)), step=4),
    "frozen, slotted": lambda: Frozen(_t(1), Output(_t(2), ())),
    "dtypes": lambda: [torch.ones(8, dtype=torch.uint8).view(d) for d in (torch.bfloat16, torch.float8_e4m3fn)],
    "conj": lambda: torch.randn(3, dtype=torch.complex64).conj(),
}
