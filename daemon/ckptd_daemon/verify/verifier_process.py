"""The daemon's handle on its verifier: starts it, asks, reads its reports, restarts it when it dies.

The verifier is spawned, never forked: it inherits neither the root's lock nor any descriptor but its three
pipes, has a session of its own (Ctrl-C is the daemon's business), and dies with its parent.
"""

from __future__ import annotations

import logging
import os
import select
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from ckptd.disk.verification import Report
from ckptd.errors import ProtocolError
from ckptd_daemon.verify.verifier_lines import (
    MAX_LINE_BYTES,
    Hurry,
    LogLine,
    Request,
    ScrubState,
    Verdict,
    WatchState,
    Writing,
    from_line,
    to_line,
)

log = logging.getLogger(__name__)

BACKOFF_FIRST_S: Final = 1.0
BACKOFF_MOST_S: Final = 60.0


class Verifier:
    """One verifier process of one root. Never blocks; used by one thread only.

    That thread must outlive the process: Linux kills the child when the *thread* that started it ends. It
    calls `read_reports` whenever `fileno()` is readable and at least once a second: restarts are due by time.

    Args:
        root: The root, absolute.
        rescan_s: Seconds between the child's listings of everything, beside the events. Default 10.
        poll_s: The same where there are no events. Default 2.
        settle_s: How long a folder that nobody announced must stay unchanged before it is judged. Default 1.
        scrub_every_s: Seconds within which everything is read again, see `rota`; 0 (default) for never.
        backoff_first_s: Wait before the first restart; doubled for each further one, up to 60. Default 1.
    """

    def __init__(
        self, root: Path, *, rescan_s: float = 10.0, poll_s: float = 2.0, settle_s: float = 1.0,
        scrub_every_s: float = 0.0, backoff_first_s: float = BACKOFF_FIRST_S,
    ) -> None:  # fmt: skip
        self._root = root
        self._timing = (rescan_s, poll_s, settle_s, scrub_every_s)
        self._epoll = select.epoll()  # one descriptor to poll, the same one across restarts
        self._process: subprocess.Popen[bytes] | None = None
        self._wanted = False
        self._asked: dict[
            tuple[str, str], bytes
        ] = {}  # sent or to be sent, not yet reported; sent anew to a new child
        self._told: set[type[Hurry | Writing]] = set()  # what the child was told to be so
        self._scrub: ScrubState | None = None
        self._scrub_at = 0.0  # when it said so
        self._out = bytearray()
        self._in = bytearray()
        self._watch = WatchState("starting", "")
        self._restarts = 0
        self._backoff_first_s = backoff_first_s
        self._backoff_s = backoff_first_s
        self._restart_at = 0.0

    def __repr__(self) -> str:
        return f"<Verifier pid={self.pid} asked={len(self._asked)} {self._watch.mode}>"

    @property
    def pid(self) -> int | None:
        """Of the running child, else None."""
        return self._process.pid if self._process is not None else None

    @property
    def pending(self) -> int:
        """How many requests haven't been reported on yet."""
        return len(self._asked)

    def start(self) -> None:
        """Start the child unless it runs.

        Raises:
            OSError: It can't be started (no processes, no memory). `read_reports` tries again.
        """
        self._wanted = True
        if self._process is None:
            self._spawn()

    def fileno(self) -> int:
        """A descriptor that is readable when `read_reports` has something; the same across restarts."""
        return self._epoll.fileno()

    def verify(self, run: str, name: str) -> None:
        """Have this checkpoint re-hashed before anything nobody asked for; see `read_reports`."""
        if (run, name) not in self._asked:
            line = to_line(Request(run, name))
            self._asked[run, name] = line
            self._out += line
            self._flush()

    def hurry(self, now: bool) -> None:
        """Whether somebody waits for it: then it reads at normal priority. Call again and again, as for read_reports."""
        self._tell(Hurry(now))

    def writing(self, now: bool) -> None:
        """Whether checkpoints are being written: meanwhile the scrub waits. Call again and again, as for read_reports."""
        self._tell(Writing(now))

    def read_reports(self) -> list[tuple[str, Report]]:
        """All reports that came in, as (run, report), also on what nobody asked about. Never blocks."""
        reports: list[tuple[str, Report]] = []
        if self._process is not None:
            ended = self._receive()
            for line in self._lines():
                self._take(line, reports)
            if ended:
                self._bury()
            else:
                self._flush()
        if self._wanted and self._process is None and time.monotonic() >= self._restart_at:
            self._respawn()
        return reports

    def stop(self, timeout_s: float = 5.0) -> None:
        """End the child: closing its stdin asks it to leave; after the timeout it is killed."""
        self._wanted = False
        if self._process is not None:
            self._end(self._process, timeout_s)
        if not self._epoll.closed:
            self._epoll.close()

    def status(self) -> dict[str, Any]:
        """For `ckptd status`: pid, how it watches and why so, requests not yet answered, restarts so far."""
        return {
            "pid": self.pid, "watching": self._watch.mode, "reason": self._watch.reason,
            "pending": len(self._asked), "restarts": self._restarts, "scrub": self._scrub_status(),
        }  # fmt: skip

    def _scrub_status(self) -> dict[str, Any]:
        """As its child has said last, its times brought up to now."""
        every = {"every_s": self._timing[-1], "gives_way": Writing in self._told}
        if (state := self._scrub) is None:
            return every
        since_s = time.monotonic() - self._scrub_at
        times = {
            "oldest_s": None if state.oldest_s is None else state.oldest_s + since_s,
            "next_s": None if state.next_s is None else max(0.0, state.next_s - since_s),
        }
        return every | asdict(state) | times

    def _tell(self, line: Hurry | Writing) -> None:
        """When it changes. While the pipe is full the next call tries again."""
        kind = type(line)
        if line.now != (kind in self._told) and self._process is not None and not self._out:
            (self._told.add if line.now else self._told.discard)(kind)
            self._out += to_line(line)
            self._flush()

    # --- the child's life -------------------------------------------------------------------------

    def _spawn(self) -> None:
        rescan_s, poll_s, settle_s, scrub_every_s = self._timing
        command = [
            sys.executable, "-P", "-m", "ckptd_daemon.verify", "--root", str(self._root),
            "--parent", str(os.getpid()),
            "--rescan-s", str(rescan_s), "--poll-s", str(poll_s), "--settle-s", str(settle_s),
            "--scrub-every-s", str(scrub_every_s),
        ]  # fmt: skip
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            close_fds=True,
            start_new_session=True,
            bufsize=0,
        )
        self._process = process
        for pipe in (process.stdin, process.stdout):
            os.set_blocking(_fd(pipe), False)
        self._epoll.register(_fd(process.stdout), select.EPOLLIN)
        self._in.clear()
        self._told.clear()
        self._scrub = None
        self._out = bytearray(b"".join(self._asked.values()))
        self._watch = WatchState("starting", "")
        log.info("verifier.started pid=%d", process.pid)
        self._flush()

    def _respawn(self) -> None:
        self._restarts += 1
        try:
            self._spawn()
        except OSError as error:
            self._put_off(f"can't be started: {error}")

    def _bury(self) -> None:
        process = self._process
        if process is None:
            return
        self._epoll.unregister(_fd(process.stdout))
        self._end(process, 1.0)
        self._put_off(f"ended with {process.returncode}")

    def _put_off(self, what: str) -> None:
        self._watch = WatchState("down", what)
        self._restart_at = time.monotonic() + self._backoff_s
        log.warning("verifier.down %s; starting it again in %.0f s", what, self._backoff_s)
        self._backoff_s = min(BACKOFF_MOST_S, self._backoff_s * 2)

    def _end(self, process: subprocess.Popen[bytes], timeout_s: float) -> None:
        self._process = None
        if process.stdin is not None:
            process.stdin.close()
        try:
            process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdout is not None:
            process.stdout.close()

    # --- lines ------------------------------------------------------------------------------------

    def _flush(self) -> None:
        """Send what the pipe takes; a stopped child leaves the rest here, not the daemon waiting."""
        while self._process is not None and self._out:
            try:
                sent = os.write(_fd(self._process.stdin), self._out[:65536])
            except BlockingIOError:
                return
            except OSError:  # the child is gone: read_reports sees it and starts another
                return
            del self._out[:sent]

    def _receive(self) -> bool:
        """Read what is there; True when the child is gone."""
        while self._process is not None:
            try:
                data = os.read(_fd(self._process.stdout), 65536)
            except BlockingIOError:
                return False
            except OSError:
                return True
            if not data:
                return True
            self._in += data
        return True

    def _lines(self) -> list[bytes]:
        *lines, rest = bytes(self._in).split(b"\n")
        self._in = bytearray(rest if len(rest) <= MAX_LINE_BYTES else b"")
        return lines

    def _take(self, data: bytes, reports: list[tuple[str, Report]]) -> None:
        try:
            line = from_line(data)
        except ProtocolError as error:
            log.warning("verifier.line_dropped %s", error)
            return
        if isinstance(line, Verdict):
            self._asked.pop((line.run, line.report.name), None)
            self._backoff_s = self._backoff_first_s
            reports.append((line.run, line.report))
        elif isinstance(line, LogLine):
            log.log(line.level, "%s", line.text)
        elif isinstance(line, WatchState):
            self._watch = line
        elif isinstance(line, ScrubState):
            self._scrub, self._scrub_at = line, time.monotonic()


def _fd(pipe: Any) -> int:
    return int(pipe.fileno())
