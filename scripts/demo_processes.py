"""The processes of the demo: started, read line by line, killed, never waited for without a bound."""

from __future__ import annotations

import queue
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

CKPTD = Path(sys.executable).with_name("ckptd")
COMMAND_TIMEOUT_S = 120.0
READY_TIMEOUT_S = 60.0
END_TIMEOUT_S = 20.0


def say(text: str = "") -> None:
    """A line of progress."""
    print(text, flush=True)


def fail(reason: str) -> NoReturn:
    """The demo proved nothing: say why and leave with 1."""
    sys.exit(f"demo FAILED: {reason}")


class Child:
    """A process whose output is read by a thread, so that it never blocks on a full pipe."""

    alive: list[Child] = []  # noqa: RUF012 - what end_all() has to end

    def __init__(self, command: list[str]) -> None:
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._last: deque[str] = deque(maxlen=30)
        threading.Thread(target=self._read, daemon=True).start()
        Child.alive.append(self)

    def _read(self) -> None:
        if self._process.stdout is not None:
            for line in self._process.stdout:
                self._last.append(line.rstrip("\n"))
                self._lines.put(line.rstrip("\n"))
        self._lines.put(None)

    def lines(self, timeout_s: float) -> Iterator[str]:
        """Its lines as they come, until it closes its output; fails the demo after timeout_s."""
        end = time.monotonic() + timeout_s
        while True:
            try:
                line = self._lines.get(timeout=max(0.0, end - time.monotonic()))
            except queue.Empty:
                fail(f"nothing more for {timeout_s:.0f} s from {self._process.args!r}:\n{self.tail()}")
            if line is None:
                return
            yield line

    def tail(self) -> str:
        """Its last lines, for an error."""
        return "\n".join(self._last)

    def running(self) -> bool:
        return self._process.poll() is None

    def wait(self, timeout_s: float = COMMAND_TIMEOUT_S) -> int:
        """Its exit code; negative when a signal ended it."""
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            fail(f"did not end in {timeout_s:.0f} s: {self._process.args!r}\n{self.tail()}")

    def sigkill(self) -> int:
        """SIGKILL; returns the exit code, which is not -9 when it had ended before."""
        self._process.send_signal(signal.SIGKILL)
        return self.wait()

    @classmethod
    def end_all(cls) -> None:
        """Leave no process behind, however the demo ends: the youngest first, so trainers before daemons."""
        for child in reversed(cls.alive):
            if child.running():
                child._process.terminate()  # a daemon removes its shared memory
                try:
                    child._process.wait(END_TIMEOUT_S)
                except subprocess.TimeoutExpired:
                    child._process.kill()
                    child._process.wait()


def ckptd(*arguments: str, check: bool = True, shown: bool = False) -> subprocess.CompletedProcess[str]:
    """Run one command of the command line and return its output; a failure fails the demo.

    `shown` leaves its output to the reader instead: a table on a terminal, plain lines in a pipe.
    """
    kept = None if shown else subprocess.PIPE
    done = subprocess.run(
        [str(CKPTD), *arguments], stdout=kept, stderr=kept, text=True, timeout=COMMAND_TIMEOUT_S, check=False
    )
    if check and done.returncode != 0:
        fail(f"`ckptd {' '.join(arguments)}` left with {done.returncode}: {(done.stderr or '').strip()}")
    return done


def start_daemon(root: Path, flags: list[str]) -> Child:
    """`ckptd start` in the foreground, as a child whose exit code can be seen; returns when it answers."""
    child = Child([str(CKPTD), "start", "--root", str(root), *flags])
    end = time.monotonic() + READY_TIMEOUT_S
    while ckptd("status", "--root", str(root), "--json", check=False).returncode != 0:
        if not child.running() or time.monotonic() > end:
            fail(f"the daemon does not answer:\n{child.tail()}")
        time.sleep(0.1)
    return child
