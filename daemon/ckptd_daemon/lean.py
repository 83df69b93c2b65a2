"""What a process of the daemon's does before it imports anything else, so that it takes little memory beside a training.

A sixth of what the daemon and its verifier would have loaded is there because what they import imports it for what
neither ever does: taking functions apart, looking for libraries, addresses in URLs. Such a module is loaded when
something of it is used, and not before.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import threading
import types
from typing import Any, Final

from ckptd.memory_calls import allocate_from_one_heap

__all__ = ["begin", "import_without"]

#: Imported by dataclasses, watchdog, urllib.parse, secrets, subprocess and shutil. dataclasses uses it for a class that
#: has no docstring.
_SELDOM_USED: Final = ("inspect", "ctypes.util", "ipaddress", "base64", "locale", "bz2", "lzma")
_giving_way: Final = threading.Lock()


def begin() -> None:
    """Before there are threads. What is loaded already stays as it is."""
    allocate_from_one_heap()
    for name in _SELDOM_USED:
        if name not in sys.modules:
            later = sys.modules[name] = _Later(name)
            parent, _, child = name.rpartition(".")
            if parent:
                setattr(importlib.import_module(parent), child, later)


def import_without(name: str, dispensable: str) -> None:
    """Import a module that does without another where that isn't installed, as if it weren't."""
    if dispensable in sys.modules:
        return
    sys.modules[dispensable] = None  # type: ignore[assignment]  # by this an import is refused
    try:
        with contextlib.suppress(ImportError):  # it doesn't: whoever needs it imports it with the other
            importlib.import_module(name)
    finally:
        del sys.modules[dispensable]


class _Later(types.ModuleType):
    """Stands for a module in those that have imported it. Unlike importlib's, two threads may use it first at once."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # asked of all modules there are, by who looks for something else
            raise AttributeError(name)
        with _giving_way:
            if sys.modules.get(self.__name__) is self:
                del sys.modules[self.__name__]
        return getattr(importlib.import_module(self.__name__), name)
