"""The scrub: re-reads, one after the other and slowly, every checkpoint about which nothing seems to have changed.

It is a thread of the verifier's. What it finds goes the way of every other check: a failure counts once a second
check, by the verifier's main thread, has failed too; the daemon acts, and the mark that it writes says when each was
read last, so that a restart goes on where this one stopped.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Final

from ckptd.disk.priority import Urgency, lower_this_thread
from ckptd.disk.verification import Report, check
from ckptd_daemon.verify.backlog import Job, Key
from ckptd_daemon.verify.rota import Rota
from ckptd_daemon.verify.turn import GivenUp, Turn
from ckptd_daemon.verify.verifier_lines import MAX_FAULT_CHARS, Line, LogLine, ScrubState

RETRY_S: Final = 3_600.0  #: after one that couldn't be read, or that failed and hasn't been checked again
_TELL_EVERY_S: Final = 5.0
_TELL_IDLE_S: Final = 60.0
#: What is told goes through all checkpoints: not at each that is new.
_TELL_NEWS_S: Final = 1.0
_MOST_CHARS: Final = 500  #: of a text in the status: that is one message


class Scrub:
    """`run` is the thread; everything else may be called from others.

    Args:
        root: The root's path.
        every_s: The period in seconds.
        send: Takes each line for the daemon.
        judge: Takes each report, with the job it is of.
        now: A monotonic clock in seconds.

    Attributes:
        turn: When it may read.
    """

    def __init__(
        self, root: Path, every_s: float, send: Callable[[Line], None], judge: Callable[[Job, Report], None],
        *, now: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self._root, self._send, self._judge, self._now = root, send, judge, now
        self.turn = Turn(now)
        self._changed = threading.Condition()  # guards what follows
        self._rota = Rota(every_s)
        self._suspects: dict[Key, str] = {}  # failed here, not yet checked again: what is wrong
        self._unread: dict[Key, str] = {}  # couldn't be read: why
        self._reading, self._read_bytes, self._passed, self._found = "", 0, 0, 0
        self._last_found = ""
        self._tell_at, self._news_at, self._has_news = now(), 0.0, False

    def __repr__(self) -> str:
        return f"<Scrub {self._rota!r} reading={self._reading!r} found={self._found}>"

    # --- what it is told --------------------------------------------------------------------------

    def known(self, run: str, ages_s: Mapping[str, float | None]) -> None:
        """These were verified in earlier lives, so many seconds ago; None: nobody knows when."""
        with self._changed:
            for name, age_s in ages_s.items():
                self._rota.read((run, name), self._now(), age_s=age_s)
            self._has_news = True
            self._changed.notify()

    def was_read(self, run: str, report: Report) -> None:
        """It was read in full just now, by whomever, and that is reported; or it is gone."""
        key = (run, report.name)
        with self._changed:
            self._unread.pop(key, None)
            suspected = self._suspects.pop(key, "")
            if report.gone:
                self._rota.forget(key)
            else:
                self._rota.read(key, self._now())
            if suspected and not (report.ok or report.gone):
                self._found, self._last_found = self._found + 1, f"{run}/{report.name}: {suspected}"
            self._has_news = True
            self._changed.notify()

    def listed(self, run: str, names: Collection[str]) -> None:
        """These are all there are in the run."""
        with self._changed:
            self._rota.listed(run, names)
            for memory in (self._suspects, self._unread):
                for key in [key for key in memory if key[0] == run and key[1] not in names]:
                    del memory[key]

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """While something else is checked."""
        self.turn.others("checks", True)
        try:
            yield
        finally:
            self.turn.others("checks", False)

    # --- the thread -------------------------------------------------------------------------------

    def run(self) -> None:
        """Never returns."""
        lower_this_thread()
        while True:
            self.turn.begin()
            self.read(*self._next())
            self.turn.end()

    def read(self, run: str, name: str) -> None:
        """Re-read this one; returns when that is done, or put off."""
        self._begin(f"{run}/{name}")
        path = self._root / run / name
        try:
            report = check(
                path, uncached=True, progress=partial(self._piece, path), urgency=Urgency(False), at_once=1
            )
        except GivenUp:
            self._gone((run, name))
        except (OSError, RuntimeError) as error:  # not a fault of the checkpoint; the latter: no thread
            self._put_off((run, name), self._unread, str(error), "scrub.unread")
        else:
            self._passed += 1
            if not (report.ok or report.gone):
                self._put_off((run, name), self._suspects, report.faults[0], "scrub.failed")
            self._judge(Job(run, name), report)
        self._begin("")

    def _next(self) -> Key:
        with self._changed:
            while (key := self._rota.next(self._now())) is None:
                self._changed.wait(self._pause_s())
            return key

    def _pause_s(self) -> float:
        """Until one is due, or there is something to tell again; what is to be told now is told."""
        if self._now() >= self._news_at:
            self._tell()
            self._news_at = self._now() + _TELL_NEWS_S
            self._has_news = False
        pause_s = self._news_at - self._now() if self._has_news else _TELL_IDLE_S
        due_s = self._rota.due_in(self._now())
        return pause_s if due_s is None else min(due_s, pause_s)

    def _begin(self, reading: str) -> None:
        with self._changed:
            self._reading, self._read_bytes = reading, 0
            self._tell()

    def _piece(self, path: Path, count: int) -> None:
        with self._changed:
            self._read_bytes += count
            if self._now() >= self._tell_at:
                self._tell()
        self.turn.end_of_piece(lambda: os.path.lexists(path))

    def _gone(self, key: Key) -> None:
        """Retention removed it, or it was moved to quarantine; its files must not be held open."""
        with self._changed:
            self._rota.forget(key)

    def _put_off(self, key: Key, why: dict[Key, str], what: str, event: str) -> None:
        with self._changed:
            known = why.get(key) == what
            why[key] = what
            self._rota.put_off(key, self._now() + RETRY_S)
        if not known:
            again = "it is checked again at once" if why is self._suspects else "it is tried again in an hour"
            self._send(
                LogLine(
                    logging.WARNING, f"{event} run={key[0]} name={key[1]} {what[:MAX_FAULT_CHARS]}; {again}"
                )
            )

    def _tell(self) -> None:
        now = self._now()
        self._tell_at = now + _TELL_EVERY_S
        self._send(
            ScrubState(
                **asdict(self._rota.standing(now)), reading=self._reading, read_bytes=self._read_bytes,
                passed=self._passed, found=self._found, last_found=self._last_found[:_MOST_CHARS],
                unread=len(self._unread), last_unread=next(reversed(self._unread.values()), "")[:_MOST_CHARS],
            )
        )  # fmt: skip
