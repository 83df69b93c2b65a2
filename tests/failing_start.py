"""A real daemon is started while one of its calls fails, and once more when none does."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from ckptd import errors
from ckptd.errors import CkptdError, NoSpace
from ckptd.names import parse_work_folder
from ckptd_places import daemon_of
from daemon_parts import BareClient
from failing_stories import Told
from nth_call import environment, orders_of

PATIENCE_S: Final = 60.0
_NO_SPACE: Final = ("ENOSPC", "EDQUOT")


class Starts:
    """One root, of which daemons are started one after the other.

    Args:
        root: It; made by the first daemon.
        control: A folder for the orders.
    """

    def __init__(self, root: Path, control: Path) -> None:
        control.mkdir(parents=True, exist_ok=True)
        self._root, self._step = root, 0
        self._shm, self._runtime = (Path(os.environ[name]) for name in ("CKPTD_SHM_DIR", "CKPTD_RUNTIME_DIR"))
        self._env = os.environ | environment(control, root.parent, self._shm, self._runtime)
        self._orders = orders_of(control, "daemon")

    def round(self, kind: str, number: int, how: str, *, lasting: bool = False) -> Told:
        """A start while a call fails: it serves, or ends and says why. Then one that nothing keeps from serving."""
        wrong = list[str]()
        self._orders.fail(kind, number, how, lasting=lasting)
        with self._started() as daemon:
            serves = self._ready(daemon)
            self._orders.works()
            wrong += self._saved(daemon) if serves else self._ended(daemon, how)
        met = self._orders.met
        if not serves:
            with self._started() as daemon:
                wrong += self._saved(daemon) if self._ready(daemon) else [_last_words(daemon)]
        return Told(number, met, (*wrong, *self._left()))

    @contextlib.contextmanager
    def _started(self) -> Iterator[subprocess.Popen[str]]:
        command = [sys.executable, "-m", "ckptd_daemon", "--root", str(self._root)]
        with subprocess.Popen(
            command, env=self._env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
            start_new_session=True,
        ) as daemon:  # fmt: skip
            try:
                yield daemon
            finally:
                daemon.kill()

    def _ready(self, daemon: subprocess.Popen[str]) -> bool:
        """Whether it serves; False once it has ended."""
        until = time.monotonic() + PATIENCE_S
        while daemon.poll() is None:
            record = daemon_of(self._root)
            if record is not None and record.pid == daemon.pid:
                return True
            if time.monotonic() > until:
                raise TimeoutError("the daemon neither serves nor ends")
            time.sleep(0.01)
        return False

    def _saved(self, daemon: subprocess.Popen[str]) -> Iterator[str]:
        """It saves, and leaves when it is asked to."""
        self._step += 1
        try:
            client = BareClient(self._root)
            client.attach()
            client.reserve(1000)
            client.save(self._step, bytes(1000))
            client.wait_for(self._step, "committed", timeout_s=PATIENCE_S)
            client.detach()
            client.close()
        except (AssertionError, CkptdError, OSError) as error:
            yield f"it serves, and doesn't save: {error!r}"
        daemon.send_signal(signal.SIGTERM)
        if (code := daemon.wait(PATIENCE_S)) != 0:
            yield f"it left with {code}: {_last_words(daemon)}"

    def _ended(self, daemon: subprocess.Popen[str], how: str) -> Iterator[str]:
        """It said why in one line, and left with the code for that."""
        said = _last_words(daemon)
        if not said or "\n" in said or os.strerror(getattr(errno, how, 0)) not in said:
            yield f"it ended with {daemon.returncode}, and said {said!r}"
        named = getattr(errors, said.partition(":")[0], None)
        other = NoSpace.exit_code if how in _NO_SPACE else 1
        if daemon.returncode != (other if named is None else named.exit_code):
            yield f"it left with {daemon.returncode}: {said}"

    def _left(self) -> Iterator[str]:
        for path in (*self._runtime.rglob("*"), *self._shm.rglob("*")):
            if not path.is_dir():
                yield f"left over: {path}"
        for path in self._root.rglob("*"):
            if parse_work_folder(path.name) is not None:
                yield f"left over: {path}"
        if daemon_of(self._root) is not None:
            yield "its record is left"


def _last_words(daemon: subprocess.Popen[str]) -> str:
    return (daemon.stderr.read() if daemon.stderr is not None else "").strip()
