"""Start a daemon for a root, as a process that outlives this one.

It gets its own session and none of this process's descriptors, standard streams among them: a
trainer in a pipe (`train.py | tee`) ends when the trainer ends, and Ctrl-C reaches only the trainer.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from ckptd.disk.rootdir import DaemonRecord, Root
from ckptd.disk.too_full import no_space
from ckptd.errors import CkptdError, NoDaemon, NoSpace, RootLocked, TimedOut
from ckptd.link.connection import connect

__all__ = ["START_TIMEOUT_S", "DaemonStart", "start_daemon"]

START_TIMEOUT_S: Final = 30.0  #: default bound of start_daemon()

_LOOK_EVERY_S: Final = 0.02
_AGAIN_AFTER_S: Final = 1.0  # between two starts while another process holds the lock
_LOG_TAIL_BYTES: Final = 2000
#: What others send: an out-of-memory killer, whoever ends a job.
_ENDED_BY_OTHERS: Final = frozenset({-signal.SIGKILL, -signal.SIGTERM, -signal.SIGINT, -signal.SIGHUP})


def start_daemon(
    root: Root,
    *,
    timeout_s: float = START_TIMEOUT_S,
    extra_args: Sequence[str] = (),
    autostarted: bool = True,
) -> DaemonRecord:
    """Start a daemon and wait until it takes connections. When one serves the root already, that is success.

    Args:
        root: The opened root.
        timeout_s: Bound in seconds, start included.
        extra_args: More arguments for `python -m ckptd_daemon`.
        autostarted: The daemon may leave by itself when it is idle.

    Raises:
        NoDaemon: It ended at once; `seen` has the end of its log.
        NoSpace: It did, because the disk is full.
        RootLocked: Another process, which is no daemon that answers, holds the root's lock.
        TimedOut: Neither ready nor dead within the bound; it may still come up.
    """
    start = DaemonStart(root, extra_args=extra_args, autostarted=autostarted)
    deadline = time.monotonic() + timeout_s
    while (record := start.ready(max(0.0, deadline - time.monotonic()))) is None:
        if time.monotonic() >= deadline:
            raise start.late(timeout_s)
        time.sleep(_LOOK_EVERY_S)
    return record


class DaemonStart:
    """One attempt to get a daemon for a root; ready() may be called often and waits for little."""

    def __init__(self, root: Root, *, extra_args: Sequence[str] = (), autostarted: bool = True) -> None:
        self._root, self._extra_args, self._autostarted = root, tuple(extra_args), autostarted
        self._log = root.service_dir / "daemon.log"
        self._process: _Outliving | None = None
        self._silent: CkptdError | None = None
        self._log_from, self._not_before, self._locked = 0, 0.0, False
        self._killed = ""

    def ready(self, timeout_s: float = 0.0) -> DaemonRecord | None:
        """The record of a daemon that takes connections; None while there is none yet. Starts one if needed.

        Raises:
            NoDaemon: The process that was started has ended by an error of its own.
            NoSpace: It has, because the disk is full.
        """
        record = DaemonRecord.read(self._root)
        if record is not None and record.alive():
            try:
                connect(self._root, timeout_s=max(timeout_s, _LOOK_EVERY_S)).close()
                return record
            except CkptdError as error:
                self._silent = error
        elif self._process is None and time.monotonic() >= self._not_before:
            self._spawn()
        elif self._process is not None and (code := self._process.poll()) is not None:
            self._process = None
            self._ended(code)
        return None

    def late(self, timeout_s: float) -> CkptdError:
        """The error for a caller whose bound has passed."""
        if self._silent is not None:
            return self._silent
        if self._locked:
            return RootLocked(
                "another process holds the root's lock, and no daemon answers", where=str(self._root.path),
                todo='wait for it or end it (a client with daemon="off" holds the lock too)',
            )  # fmt: skip
        return TimedOut(
            f"the daemon isn't ready after {timeout_s:.3g} s",
            where=str(self._root.path),
            seen=f"one was ended by {self._killed} at its start" if self._killed else "",
            todo=f"see {self._log}",
        )

    def _spawn(self) -> None:
        # "-P": the working folder is no place to import from. "/" keeps no mount busy.
        command = [sys.executable, "-P", "-m", "ckptd_daemon", "--root", str(self._root.path)]
        command += ["--autostarted"] if self._autostarted else []
        _reap()
        with self._log.open("ab") as log_file:
            self._log_from = log_file.tell()
            self._process = _Outliving(
                [*command, *self._extra_args],
                stdin=subprocess.DEVNULL, stdout=log_file, stderr=log_file,
                start_new_session=True, close_fds=True, cwd="/", env=_environment(),
            )  # fmt: skip
        _started.append(self._process)

    def _ended(self, code: int) -> None:
        self._locked = code == RootLocked.exit_code
        self._not_before = time.monotonic() + _AGAIN_AFTER_S
        if code in _ENDED_BY_OTHERS:  # which says nothing against the next one
            self._killed = signal.Signals(-code).name
            return
        if code == NoSpace.exit_code:
            raise no_space(self._root.path)
        # 0: it found nothing to do and left; 6: lost the race for the lock, whose holder is looked for next.
        if code not in (0, RootLocked.exit_code):
            raise NoDaemon(
                "the daemon ended at its start", where=str(self._root.path),
                seen=f"exit code {code}, {self._log_tail() or 'no output'}", todo=f"see {self._log}",
            )  # fmt: skip

    def _log_tail(self) -> str:
        with contextlib.suppress(OSError), self._log.open("rb") as log_file:
            log_file.seek(max(self._log_from, self._log.stat().st_size - _LOG_TAIL_BYTES))
            lines = log_file.read(_LOG_TAIL_BYTES).decode("utf-8", errors="replace").strip().splitlines()
            return lines[-1] if lines else ""
        return ""


class _Outliving(subprocess.Popen[bytes]):
    """A child that is meant to outlive this process: leaving it running deserves no ResourceWarning."""

    def __del__(self) -> None:
        pass


_started: list[_Outliving] = []  # so that those which have left meanwhile don't stay zombies


def _reap() -> None:
    _started[:] = [process for process in _started if process.poll() is None]


def _environment() -> dict[str, str]:
    """Ours, with PYTHONPATH absolute, because the daemon runs elsewhere."""
    env = dict(os.environ)
    if env.get("PYTHONPATH"):
        env["PYTHONPATH"] = os.pathsep.join(
            str(Path(p or ".").absolute()) for p in env["PYTHONPATH"].split(os.pathsep)
        )
    return env
