"""What the operator does where tensors have no memory: under torch.compile, export and fake tensors."""

from typing import NoReturn

import torch

from ._load import native

native()  # defines the operator


def _refuse(out: object) -> NoReturn:
    # torch.compile turns this exception into a graph break at the call, and into an error under fullgraph=True.
    from torch._subclasses.fake_tensor import UnsupportedFakeTensorException

    raise UnsupportedFakeTensorException(
        "weak_ref_tensors belongs outside compiled and traced regions: a weak ref aliases memory that exists, and a "
        "traced tensor has none. Call it on the compiled function's output."
    )


torch.library.register_fake("weakref_ext::weak_ref_tensors", _refuse)
