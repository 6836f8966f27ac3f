"""An operator under a foreign name, for code that calls ``torch.ops._C.weak_ref_tensor(t)`` and has no such library."""

from typing import Any

import torch

import weakref_ext

Library: Any = torch.library.Library  # untyped
_defined: dict[tuple[str, str], Any] = {}


def weak_ref_tensor(tensor: torch.Tensor) -> torch.Tensor:
    alias: torch.Tensor = weakref_ext.weak_ref_tensors(tensor)
    return alias


def install(namespace: str = "_C", name: str = "weak_ref_tensor") -> bool:
    """Define ``torch.ops.<namespace>.<name>(Tensor) -> Tensor`` unless it is there already.

    A library that defines the same operator can no longer be loaded afterwards in this process (until
    :func:`uninstall`): load the engine's own libraries first.

    Returns:
        Whether the operator is ours; False when it was there before and stays as it is.
    """
    if (namespace, name) in _defined:
        return True
    if hasattr(getattr(torch.ops, namespace), name):
        return False
    library = Library(namespace, "FRAGMENT")
    library.define(f"{name}(Tensor tensor) -> Tensor")
    # Composite: with a backend's key, autograd would save the source, and the fallbacks of the conj and neg bits would
    # alias a temporary that dies at once.
    library.impl(name, weak_ref_tensor, "CompositeImplicitAutograd")
    _defined[namespace, name] = library
    return True


def uninstall(namespace: str = "_C", name: str = "weak_ref_tensor") -> bool:
    """Remove the operator if :func:`install` defined it; return whether it did."""
    library = _defined.pop((namespace, name), None)
    if library is None:
        return False
    library._destroy()
    return True
