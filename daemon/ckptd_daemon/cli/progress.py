"""Progress of long commands: a line on stderr now and then, never more than a person can read."""

from __future__ import annotations

import sys
import time
from typing import Final

from ckptd_daemon.cli import output, units

_FIRST_AFTER_S: Final = 0.5
_EVERY_S: Final = 1.0


class Progress:
    """Says how far the reading of a checkpoint is, once it takes long enough to be worth a word."""

    def __init__(self, what: str) -> None:
        self._what, self._done_bytes = what, 0
        self._next = time.monotonic() + _FIRST_AFTER_S
        self._shown = False

    def advance(self, more_bytes: int) -> None:
        """`more_bytes` more have been read."""
        self._done_bytes += more_bytes
        now = time.monotonic()
        if now >= self._next:
            self._next = now + _EVERY_S
            self._show()

    def _show(self) -> None:
        text = f"{self._what}: {units.show_bytes(self._done_bytes)} read"
        if sys.stderr.isatty():
            sys.stderr.write(f"\r\x1b[Kckptd: {output.printable(text)}")
            sys.stderr.flush()
            self._shown = True
        else:
            output.note(text)

    def end(self) -> None:
        """Leave the terminal's line empty for what comes next."""
        if self._shown:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
            self._shown = False
