"""The verifier: `python -m ckptd_daemon.verify`, a process that re-reads checkpoints and reports.

It never changes the root: it reads the medium, not the page cache, and tells its parent, who holds the lock
and acts. It learns of checkpoints in four ways: the parent asks; events (`watch`); a listing of everything at
the start, on a timer and whenever events were lost; and polling where there are no events at all.

What it reads it reads at the lowest priority, unless the parent says that somebody waits: then other threads go on
with it at once (`ckptd.disk.crew`), which the main thread starts, and so it keeps the priority it was born with.

A thread of its own reads again what seems unchanged (`scrub`); it waits while this one checks anything.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import math
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Generator
from pathlib import Path
from typing import Final

from ckptd.disk.crew import in_one_step
from ckptd.disk.verification import Report, check, stat_signature
from ckptd.errors import CkptdError, ProtocolError
from ckptd.names import parse_step_folder
from ckptd_daemon.verify.backlog import Backlog, Job
from ckptd_daemon.verify.listing import ages_of_verified, folders_of, runs_of
from ckptd_daemon.verify.pace import Pace
from ckptd_daemon.verify.scrub import Scrub
from ckptd_daemon.verify.verifier_lines import (
    Hurry,
    Line,
    LogLine,
    Request,
    Sender,
    Verdict,
    WatchState,
    Writing,
    from_line,
)
from ckptd_daemon.verify.watch import Watch

_PR_SET_PDEATHSIG: Final = 1
_RETRY_EVENTS_S: Final = 60.0  #: how long it polls before it tries events again
_SECONDS: Final = ("--rescan-s", "--poll-s", "--settle-s", "--scrub-every-s")
_LISTING_SHARE: Final = 20.0  #: listing everything takes at most 1/20 of the time, however many there are


class VerifierLoop:
    """The main thread of the verifier; the others only put something into the backlog and wake it.

    Args:
        root: The root's path.
        send: Takes each line for the parent.
        rescan_s, poll_s: Seconds between listings, with and without events.
        settle_s: See `Backlog`.
        scrub_every_s: The scrub's period; infinite for never.

    Attributes:
        pace: Whether somebody waits.
        scrub: Reads again what seems unchanged; its `run` is for a thread of its own.
    """

    def __init__(
        self, root: Path, send: Sender, *, rescan_s: float, poll_s: float, settle_s: float,
        scrub_every_s: float = math.inf,
    ) -> None:  # fmt: skip
        self._root, self._send, self.pace = root, send, Pace()
        self.scrub = Scrub(root, scrub_every_s, send, self._judge)
        self._rescan_s, self._poll_s, self._settle_s = rescan_s, poll_s, settle_s
        self._backlog = Backlog(settle_s)
        self._wake = threading.Condition()
        self._watch = Watch(root, self._appeared, self._events_lost)
        self._lost = "starting"  # why there are no events; "" while there are
        self._try_events_at = 0.0
        self._list_at = 0.0
        self._marks_read: set[str] = set()
        self._complained: set[str] = set()

    def run(self) -> None:
        """Never returns; the process ends when its stdin does."""
        while True:
            if not (self.pace.hurried and self._backlog.any_asked()):  # who waits goes first
                self._tend_events()
                if time.monotonic() >= self._list_at:
                    self.pace.background(self._list_everything())
            with self._wake:
                job = self._backlog.take(time.monotonic())
                if job is None:
                    self._wake.wait(self._idle_s())
            if job is not None:
                self._check(job)

    def heed(self, line: Line) -> None:
        """What the parent says; called from the thread that reads stdin."""
        if isinstance(line, Hurry):
            self.pace.hurry(line.now)
        elif isinstance(line, Writing):
            self.scrub.turn.others("writes", line.now)
        elif isinstance(line, Request):
            with self._wake:
                self._backlog.ask(line.run, line.name)
                self._wake.notify()

    # --- learning of checkpoints ------------------------------------------------------------------

    def _appeared(self, run: str, name: str | None) -> None:
        """Something appeared; called from watchdog's threads."""
        if name is None:
            with self._wake:
                self._list_at = 0.0
                self._wake.notify()
        elif parse_step_folder(name) is not None:
            signature = stat_signature(self._root / run / name)
            with self._wake:
                self._backlog.saw(run, name, signature, time.monotonic())
                self._wake.notify()

    def _events_lost(self, reason: str) -> None:
        """Called from watchdog's threads, or the one that looks after them."""
        with self._wake:
            self._lost = self._lost or reason
            self._try_events_at = 0.0
            self._wake.notify()

    def _tend_events(self) -> None:
        now = time.monotonic()
        if self._lost and now >= self._try_events_at:
            first = self._lost == "starting"
            if not first and self._try_events_at == 0.0:  # just lost
                self._poll_from_now(self._lost)
                return
            self._lost = ""
            if reason := self.pace.background(in_one_step(self._watch.start)):  # its threads too
                self._poll_from_now(reason)
            else:
                self._send(WatchState("events", ""))
            self._list_at = 0.0

    def _poll_from_now(self, reason: str) -> None:
        self._watch.stop()
        self._lost = reason
        self._try_events_at = time.monotonic() + _RETRY_EVENTS_S
        self._list_at = 0.0
        self._send(WatchState("polling", reason))
        self._complain(f"verifier.polling every {self._poll_s:g} s: {reason}")

    def _list_everything(self) -> Generator[None, None, None]:
        started = time.monotonic()
        runs = list(runs_of(self._root))
        if not self._lost:
            _, reason = self._watch.follow(
                runs
            )  # before the listing: what appears between them causes an event
            if reason:
                self._poll_from_now(reason)
        for run in runs:
            self._read_marks(run)
            self._list_run(run)
            yield
        took = time.monotonic() - started
        pause = self._poll_s if self._lost else self._rescan_s
        self._list_at = time.monotonic() + max(pause, _LISTING_SHARE * took)

    def _list_run(self, run: str) -> None:
        run_dir = self._root / run
        try:
            names = [name for name in folders_of(run_dir) if parse_step_folder(name) is not None]
        except OSError as error:
            self._complain(f"verifier.unreadable run={run} {error}")
            return
        signatures = {name: stat_signature(run_dir / name) for name in names}
        with self._wake:
            now = time.monotonic()
            for name, signature in signatures.items():
                self._backlog.saw(run, name, signature, now)
            self._backlog.listed(run, signatures.keys())
        self.scrub.listed(run, signatures.keys())

    def _read_marks(self, run: str) -> None:
        """Learn once what was verified in earlier lives, so that a restart doesn't read everything again."""
        if run in self._marks_read:
            return
        self._marks_read.add(run)
        try:
            verified = ages_of_verified(self._root, run, time.time())
        except (OSError, CkptdError) as error:
            self._complain(f"verifier.marks_unread run={run} {error}")
            return
        with self._wake:
            for name in verified:
                self._backlog.known_good(run, name, stat_signature(self._root / run / name))
        self.scrub.known(run, verified)

    # --- checking ---------------------------------------------------------------------------------

    def _check(self, job: Job) -> None:
        path = self._root / job.run / job.name
        with self._wake:
            if not self._backlog.needs_check(job, stat_signature(path), time.monotonic()):
                return
        try:
            with self.scrub.aside():
                report = check(path, uncached=True, urgency=self.pace.urgency)
        except OSError as error:  # not a fault of the checkpoint: no descriptors, no memory, no permission
            self._complain(f"verifier.check_failed run={job.run} name={job.name} {error}")
            with self._wake:
                self._backlog.put_off(job, stat_signature(path), time.monotonic() + self._rescan_s)
        else:
            self._judge(job, report)

    def _judge(self, job: Job, report: Report) -> None:
        """Called from the scrub's thread too."""
        after = stat_signature(self._root / job.run / job.name)
        with self._wake:
            goes_out = self._backlog.may_report(
                job,
                time.monotonic(),
                ok=report.ok,
                gone=report.gone,
                before=report.stat_signature,
                after=after,
            )
            self._wake.notify()  # or it may be to check again
        if goes_out or report.gone:
            self.scrub.was_read(job.run, report)
        if goes_out:
            self._send(Verdict(job.run, report))

    # --- small ------------------------------------------------------------------------------------

    def _idle_s(self) -> float:
        now = time.monotonic()
        due = [self._list_at - now]
        if (soonest := self._backlog.due_in(now)) is not None:
            due.append(soonest)
        if self._lost:
            due.append(self._try_events_at - now)
        return max(0.0, min(due))

    def _complain(self, text: str) -> None:
        """Once in this process's life: a rescan every few seconds must not fill the log."""
        if text not in self._complained:
            self._complained.add(text)
            self._send(LogLine(logging.WARNING, text))


def _read_requests(loop: VerifierLoop) -> None:
    for data in sys.stdin.buffer:
        with contextlib.suppress(ProtocolError):
            loop.heed(from_line(data))
    os._exit(0)  # the parent closed our stdin or died; nothing here needs to be finished


def _run_or_end(scrub: Scrub) -> None:
    try:
        scrub.run()
    except BaseException:  # noqa: BLE001 - whatever it was: silently, nothing would be read again
        traceback.print_exc()
        os._exit(1)  # the parent hears of it and starts another


def _live_as_child(parent: int) -> None:
    """No life after the parent's."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before the line above
        os._exit(0)
    os.chdir("/")


def main(argv: list[str]) -> None:
    """Run the verifier; the arguments are those that `Verifier` gives: each name is followed by its value."""
    given = dict(zip(argv[::2], argv[1::2], strict=True))
    seconds = {name: float(given.get(name, 0.0)) for name in _SECONDS}
    _live_as_child(int(given["--parent"]))
    loop = VerifierLoop(
        Path(given["--root"]), Sender(sys.stdout.fileno()),
        rescan_s=seconds["--rescan-s"], poll_s=seconds["--poll-s"], settle_s=seconds["--settle-s"],
        scrub_every_s=seconds["--scrub-every-s"] or math.inf,
    )  # fmt: skip
    threading.Thread(target=_read_requests, args=(loop,), name="requests", daemon=True).start()
    if seconds["--scrub-every-s"]:
        threading.Thread(target=_run_or_end, args=(loop.scrub,), name="scrub", daemon=True).start()
    loop.run()
