"""Replaces an engine's functions everywhere they were imported, once, and undoes it."""

import importlib
import inspect
import logging
import os
import sys
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any


def swap(old: object, new: object) -> list[str]:
    """Put ``new`` in the place of ``old`` in every loaded module's globals but ours; return the places.

    Modules that load later take what the defining module holds by then.
    """
    places = []
    for name, module in list(sys.modules.items()):
        if isinstance(module, ModuleType) and name.partition(".")[0] != "weakref_ext":
            for key in [key for key, value in list(vars(module).items()) if value is old]:
                setattr(module, key, new)
                places.append(f"{name}.{key}")
    return places


class Patch:
    """The drop-ins for one module of an engine: installed at most once at a time, safe to call again."""

    def __init__(self, engine: str, module: str, log: logging.Logger, *drop_ins: Callable[..., Any]) -> None:
        self.engine = engine
        self.module = module
        self.log = log
        self.drop_ins = drop_ins
        self.originals: dict[Callable[..., Any], Any] = {}
        self._warned = False
        self._news, self._told = "", False
        self._lock = threading.RLock()
        os.register_at_fork(after_in_child=self._in_a_forked_child)

    def install(self) -> bool:
        """Whether the drop-ins are in place afterwards."""
        with self._lock:
            if self.originals:
                return True
            if os.environ.get("WEAKREF_EXT_DISABLE", "0") not in ("", "0"):
                self.log.info("weakref_ext: WEAKREF_EXT_DISABLE is set, %s is left as it is", self.engine)
                return False
            root = self.module.partition(".")[0]
            try:
                importlib.import_module(root)
                module = importlib.import_module(self.module)
            except Exception as error:  # an engine that we do not know; none at all is no reason to warn
                if not (isinstance(error, ModuleNotFoundError) and error.name == root):
                    self._left_untouched(f"{self.module} does not import ({error!r})")
                return False
            originals = {drop_in: getattr(module, drop_in.__name__, None) for drop_in in self.drop_ins}
            for drop_in, original in originals.items():
                if original is None or not set(parameters(original)) <= set(parameters(drop_in)):
                    self._left_untouched(f"{self.module} has no {drop_in.__name__}{inspect.signature(drop_in)}")
                    return False
            self.originals = originals
            places = [place for drop_in, original in originals.items() for place in swap(original, drop_in)]
            version = getattr(sys.modules[root], "__version__", "of unknown version")
            self._news = f"weakref_ext: patched {self.engine} {version}: {', '.join(sorted(places))}"
            self._told = False
            self.announce()
            return True

    def announce(self) -> None:
        """Log what was patched, once per process, but not before the engine set up the logging that shows it."""
        if self._news and not self._told and self.log.isEnabledFor(logging.INFO):
            self._told = True
            self.log.info(self._news)

    def uninstall(self) -> bool:
        """Put the originals back, also in modules that loaded since; whether there was anything to undo."""
        with self._lock:
            undone, self.originals, self._news = self.originals, {}, ""
            for drop_in, original in undone.items():
                swap(drop_in, original)
            return bool(undone)

    def _in_a_forked_child(self) -> None:
        self._told = False  # an engine's forked worker has the drop-ins from the start, and a log of its own
        self._lock = threading.RLock()  # another thread of the parent may have held it

    def _left_untouched(self, reason: str) -> None:
        if not self._warned:
            self._warned = True
            self.log.warning("weakref_ext: %s is left as it is: %s", self.engine, reason)


def parameters(function: Callable[..., Any]) -> list[str]:
    try:
        return list(inspect.signature(function).parameters)
    except ValueError:  # a builtin that does not tell
        return []
