"""Drop-ins for the weak ref functions of inference and training engines: ``install()`` and ``uninstall()`` in each.

Importing this package imports no engine; a submodule is imported when it is asked for.
"""

import importlib
from types import ModuleType

__all__ = ["sglang", "tensorrt_llm", "torch_ops", "transformer_engine", "vllm"]


def __getattr__(name: str) -> ModuleType:
    if name in __all__:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *__all__]
