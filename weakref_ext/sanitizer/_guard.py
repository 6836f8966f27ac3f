"""Raises where code uses an output whose values are gone."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from ._trace import Output, Trace
from ._verdict import Event, Span

# These read memory without calling an operator.
_READERS = frozenset(
    getattr(torch.Tensor, name)
    for name in ("numpy", "tolist", "__array__", "__dlpack__", "__deepcopy__", "__repr__", "__format__")
)


class StaleTensorError(RuntimeError):
    """A weak ref was used after its memory went to somebody else.

    Attributes:
        path: where the weak ref stands in its capture's output.
        capture: the name of that capture.
        overwritten_by: the name of the capture that overwrote it: its own one for a block that was handed out again in
            the same capture, "" for memory that no pool keeps.
    """

    def __init__(self, message: str, path: str, capture: str, overwritten_by: str) -> None:
        super().__init__(message)
        self.path, self.capture, self.overwritten_by = path, capture, overwritten_by


def error(output: Output, by: Span | Event | None) -> StaleTensorError:
    alias = output.alias
    what = f"{alias.path} of capture {alias.capture!r} is stale: "
    keep = "clone it, or own() the output,"
    if isinstance(by, Event):
        what += f"its memory went to {by} later in the same capture, so it is wrong after every replay. Keep it strong "
        what += f"in the capture for as long as it is read, or {keep} before that."
        overwritten = alias.capture
    elif by is None:
        what += "it was not in the graph pool and its owner is gone, so nothing keeps its memory. Keep its owner "
        what += "alive, or pass pool= to weak_ref_tensors, which then keeps such tensors strong."
        overwritten = ""
    elif by.is_open:
        what += f"{by.capture!r}, which is being captured, has used its memory before this read, and would at every "
        what += f"replay. {keep[0].upper()}{keep[1:]} before the capture, and capture the read of the clone."
        overwritten = by.capture
    else:
        after = " (a later segment of it)" if by.capture == alias.capture else ""
        what += f"the replay of {by.capture!r}{after} overwrote it, which uses the same memory. "
        what += f"Consume it before that replay, or {keep} before it."
        overwritten = by.capture
    return StaleTensorError(what, alias.path, alias.capture, overwritten)


def _tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


class _Check:
    def __init__(self, trace: Trace) -> None:
        super().__init__()
        self.trace = trace

    def check(self, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        for tensor in _tensors([*args, *kwargs.values()]):
            if tensor.layout is torch.strided:
                found = self.trace.find_stale(tensor)
                if found is not None:
                    raise error(*found)


class OperatorGuard(_Check, TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace != "weakref_ext":  # another weak ref of it is no use yet
            with torch._C.DisableTorchFunction():  # the other guard need not see what this one asks
                self.check(args, kwargs)
        return func(*args, **kwargs)


class ReaderGuard(_Check, TorchFunctionMode):
    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _READERS:
            self.check(args, {})
        return func(*args, **(kwargs or {}))
