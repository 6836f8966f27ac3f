"""The operator as torch.ops sees it: how it is called, and what it does where tensors have no memory."""

from typing import NoReturn

import torch

from ._load import native

_C = native()  # defines the operator


def _refuse(out: object) -> NoReturn:
    # torch.compile turns this exception into a graph break at the call, and into an error under fullgraph=True.
    from torch._subclasses.fake_tensor import UnsupportedFakeTensorException

    raise UnsupportedFakeTensorException(
        "weak_ref_tensors belongs outside compiled and traced regions: a weak ref aliases memory that exists, and a "
        "traced tensor has none. Call it on the compiled function's output."
    )


torch.library.register_fake("weakref_ext::weak_ref_tensors", _refuse)


def _call_directly() -> None:
    """Let torch.ops call the walk itself where no mode, transform, tracer or profiler would see the difference.

    torch's own way there costs more than a walk over four tensors. Where a torch keeps the function that it calls in
    another place than today's, nothing changes.
    """
    packet = torch.ops.weakref_ext.weak_ref_tensors
    ops = (packet, packet.default)
    if not all(hasattr(op, "_op") for op in ops):
        return
    for op in ops:
        op._op = _C.op_call(op._op)
    # TorchScript knows operators by the identity of that function.
    torch.jit._builtins._register_builtin(packet._op, "weakref_ext::weak_ref_tensors")


_call_directly()
