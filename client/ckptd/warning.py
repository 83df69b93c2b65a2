"""Saying a CheckpointWarning: at the caller's own line, and never in the middle of a restore.

Where warnings are errors one that is said while a restore writes would leave the state half written. What is known
before is said before anything is written, the rest once all is done.
"""

from __future__ import annotations

import os
import sys
import warnings
from contextvars import ContextVar, Token
from pathlib import Path
from typing import Final

import ckptd
from ckptd.errors import CheckpointWarning

__all__ = ["HeldBack", "warn", "warn_after", "warn_after_all"]

#: Where a warning is never said to come from: the whole package, with the separator behind it.
_PACKAGE: Final = str(Path(ckptd.__file__).parent) + os.sep


class _Held:
    """What is said later; `all` from some point on, also of what `warn` is given."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.all = False


_held: ContextVar[_Held | None] = ContextVar("held", default=None)


def warn(text: str) -> None:
    """A CheckpointWarning that points at the caller's own line, outside this package."""
    held = _held.get()
    if held is not None and held.all:
        held.texts.append(text)
    else:
        _say(text)


def warn_after_all() -> None:
    """Have `warn` too say everything once what a HeldBack surrounds is done: it must not end half-way from here on."""
    held = _held.get()
    if held is not None:
        held.all = True


def _say(text: str) -> None:
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        level, frame = level + 1, frame.f_back
    warnings.warn(text, CheckpointWarning, stacklevel=level)


def warn_after(text: str) -> None:
    """warn once what a HeldBack surrounds is done; at once outside of one."""
    held = _held.get()
    if held is None:
        warn(text)
    else:
        held.texts.append(text)


class HeldBack:
    """Surrounds what must be done whole: what `warn_after` is given meanwhile is said at its end, that of the outermost.

    Nothing is said when it fails: its error says more.
    """

    def __init__(self) -> None:
        self._own = _Held()
        self._token: Token[_Held | None] | None = None

    def __enter__(self) -> None:
        if _held.get() is None:
            self._token = _held.set(self._own)

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if self._token is not None:
            _held.reset(self._token)
            for text in self._own.texts if kind is None else ():
                warn(text)
