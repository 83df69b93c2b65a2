"""The daemon's log: written by a thread of its own, so that a slow disk never holds up the loop."""

from __future__ import annotations

import contextlib
import io
import logging
import logging.handlers
import os
import queue
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Final

_LOGGERS: Final = ("ckptd", "ckptd_daemon")
_SAID: Final = "ckptd_daemon.said"
_MOST_BYTES: Final = 8 * 1024 * 1024
_MOST_QUEUED: Final = 10_000  # while the disk hangs; what comes on top is lost

#: What is logged here is printed on stdout when the daemon runs in the foreground, and nowhere else.
say_log = logging.getLogger(_SAID)


class Logs:
    """Sends everything that is logged to a file, while it is entered.

    Args:
        path: The log; the one before it is kept as `<path>.1` once it has 8 MiB.
        to_stdout: Also print what is said, one line per snapshot.
    """

    def __init__(self, path: Path, *, to_stdout: bool) -> None:
        handlers: list[logging.Handler] = [_file_handler(path)]
        if to_stdout:
            handlers.append(_stdout_handler())
        records: queue.Queue[logging.LogRecord] = queue.Queue(_MOST_QUEUED)
        self._queue = logging.handlers.QueueHandler(records)
        self._queue.setFormatter(_OneLine())
        self._listener = logging.handlers.QueueListener(records, *handlers)
        self._handlers = handlers

    def __enter__(self) -> Logs:
        # A log that can't be written (disk full, reader of stdout gone) must not print tracebacks.
        self._raised, logging.raiseExceptions = logging.raiseExceptions, False
        self._before = {name: _settings(logging.getLogger(name)) for name in _LOGGERS}
        for name in _LOGGERS:
            logger = logging.getLogger(name)
            logger.addHandler(self._queue)
            logger.setLevel(logging.INFO)
            logger.propagate = False
        self._listener.start()
        return self

    def flush(self) -> None:
        """Write what was logged so far; for who leaves without __exit__."""
        self._listener.stop()
        self._listener.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._listener.stop()
        for name, (level, propagate) in self._before.items():
            logger = logging.getLogger(name)
            logger.removeHandler(self._queue)
            logger.setLevel(level)
            logger.propagate = propagate
        for handler in self._handlers:
            with contextlib.suppress(OSError):  # what it couldn't write before it can't write now
                handler.close()
        logging.raiseExceptions = self._raised


def _settings(logger: logging.Logger) -> tuple[int, bool]:
    return logger.level, logger.propagate


class _OneLine(logging.Formatter):
    """What a client or a path says can't begin a line of its own, nor tell a terminal anything; tracebacks may."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        if not record.message.isprintable():
            record.message = "".join(map(_shown, record.message))
        return super().formatMessage(record)


def _shown(char: str) -> str:
    return char if char.isprintable() else char.encode("unicode_escape").decode("ascii")


class _LogFile(logging.handlers.RotatingFileHandler):
    """Opened again when somebody removed it: what is written into a file without a name, nobody reads."""

    def emit(self, record: logging.LogRecord) -> None:
        path = Path(self.baseFilename)
        with contextlib.suppress(OSError):  # it can't be told now: the log's thread must live
            if self.stream and not path.exists() and path.parent.is_dir():
                self.stream.close()
                self.stream = None
        super().emit(record)

    def _open(self) -> io.TextIOWrapper:
        """Of a pipe that nobody reads too: to wait for a reader would keep the daemon from leaving."""
        return open(
            self.baseFilename, "a", encoding=self.encoding, errors=self.errors,
            opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o666),
        )  # fmt: skip


def _file_handler(path: Path) -> logging.Handler:
    handler = _LogFile(
        path, maxBytes=_MOST_BYTES, backupCount=1, encoding="utf-8", errors="backslashreplace", delay=True
    )
    formatter = logging.Formatter("%(asctime)sZ %(levelname)s %(message)s", "%Y-%m-%dT%H:%M:%S")
    formatter.converter = time.gmtime
    handler.setFormatter(formatter)
    handler.addFilter(lambda record: record.name != _SAID)  # events are logged in their own words
    return handler


def _stdout_handler() -> logging.Handler:
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
    handler.addFilter(lambda record: record.name == _SAID)
    return handler
