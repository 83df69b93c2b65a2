"""Saving through the daemon: slots are filled here and written there.

Every wait is a loop of short looks at the socket, in the caller's own thread, up to a bound. A daemon that
died is replaced (mode "auto") or looked for again; what lies sealed in a slot meanwhile is safe there.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from ckptd.disk.rootdir import Root
from ckptd.disk.staged_line import Accepted
from ckptd.errors import CkptdError, ClientClosed, RootMoved, RunTaken, TimedOut
from ckptd.link.beside import BesideTraining
from ckptd.link.client_options import Transport
from ckptd.link.daemon_link import ANSWER_S, DaemonLink
from ckptd.link.earlier import EarlierSlots
from ckptd.link.failures import Failures
from ckptd.link.hurrying import PATIENCE_S
from ckptd.link.session import DaemonMode
from ckptd.link.slot_search import NO_NEWS_S, SlotSearch
from ckptd.link.staging import Payload, Staged, fill
from ckptd.link.ticket import Ticket
from ckptd.link.wire import Waiting, WaitingReply, WaitingSnapshot

_SLICE_S: Final = 0.05  # how long one look waits
_SILENCE_S: Final = 5.0  # a wait asks again after so long without news: a notice may have been lost
_DISK_EVERY_S: Final = 1.0  # with no daemon to ask, how often a wait looks on disk for what it waits for
_SAYS_S: Final = 1.0  # for an answer that makes a wait shorter and isn't needed: it mustn't make it longer


class DaemonWriter:
    """The part of a client that talks to the daemon. Each public method takes `lock`.

    Args:
        root: The root.
        run: The run's name.
        client_id: 32 hex digits.
        mode: Whether it may start a daemon.
        slots: How many slots to have.
        failures: Where failures of snapshots are entered.
        start_timeout_s: Bound for a daemon to come up. A snapshot or close() waits no longer than this for
            a daemon that is gone.
        transport: See ClientOptions.
        gives_way: Whether an older snapshot that isn't being written yet gives way where no slot is free.
    """

    def __init__(
        self, root: Root, run: str, client_id: str, *,
        mode: DaemonMode, slots: int, failures: Failures, start_timeout_s: float, gives_way: bool = False,
        transport: Transport = "auto",
    ) -> None:  # fmt: skip
        self.lock = threading.RLock()
        self._failures, self._start_timeout_s = failures, start_timeout_s
        self._link = DaemonLink(
            root, run, client_id, mode=mode, slots=slots, failures=failures, transport=transport
        )
        self._beside = BesideTraining(self.lock, self._link, failures)
        self._search = SlotSearch(self._link, start_timeout_s=start_timeout_s, gives_way=gives_way)
        self._disk_at = 0.0
        self._over = ""  # why this client does nothing any more

    def open(self) -> None:
        """Attach for the first time; raises what Session.open raises."""
        with self.lock:
            self._link.session.open(self._start_timeout_s)
            self._link.greet()

    @property
    def run_id(self) -> str:
        attached = self._link.session.attached
        return attached.run_id if attached is not None else ""

    # --- snapshots -------------------------------------------------------------------------------

    def reserve(self, size: int) -> None:
        """Have the slots of at least `size` bytes made, mapped and touched.

        Raises:
            SharedMemoryTooSmall: They don't fit; nothing was made.
            NoDaemon, TimedOut: No daemon answers.
        """
        deadline = time.monotonic() + self._start_timeout_s
        with self.lock:
            self._link.look(0.0)
            if not self._link.session.attach(self._start_timeout_s):
                raise self._link.no_daemon()
            self._link.greet()
            self._link.reserve(size, max(NO_NEWS_S, deadline - time.monotonic()))

    def submit(self, ticket: Ticket, payload: Payload, *, busy_timeout_s: float) -> None:
        """Copy a snapshot into a slot, seal it, tell the daemon. From here on it survives this process.

        One with a `beside` is sealed later, once all of it is copied; the next submit() waits for that.

        Raises:
            TimedOut, NoDaemon: No slot came free within the bound, or the call interrupts the copy before. Nothing was
                taken.
            SharedMemoryTooSmall: No slot can be large enough. Nothing was taken.
        """
        with self.lock:
            self.finish_copy()
            slot = self._search.obtain(payload.size, busy_timeout_s)
            if payload.beside is not None:
                self._beside.begin(slot, ticket, payload)
            else:
                generation = fill(slot, self._link.owner, ticket.snapshot, payload)
                self._link.stage(Staged(ticket, slot, generation))

    def take_notes(self) -> list[str]:
        """What happened to shared memory since the last call."""
        note = self._link.stages.removed_note()
        return [note] if note else []

    def memories(self) -> list[memoryview]:
        """The memory snapshots are copied to, as far as it is reserved."""
        with self.lock:
            return self._link.stages.memories()

    def finish_copy(self) -> None:
        """Return when nothing is copied beside the training any more: the state may be changed.

        Raises:
            TimedOut: The call interrupts that copy in its own thread.
        """
        self._beside.finish()

    def interrupts_copy(self) -> bool:
        """Whether this call interrupts a copy in its own thread, which can't end before the call does."""
        return self._beside.interrupted_here

    def skipped(self, ticket: Ticket) -> None:
        """Nothing was taken for this ticket: tell the daemon, which can't know."""
        with self.lock:
            self._link.skipped(ticket.step)

    def look(self) -> None:
        """Take in what has arrived, attach again if need be; waits for next to nothing. Not once it is closed: a look
        at a ticket would take the run from the next client of this process."""
        with self.lock:
            if not self._over:
                self._link.look(0.0)

    # --- waiting ---------------------------------------------------------------------------------

    def wait_for(self, ticket: Ticket, state: str, timeout_s: float) -> None:
        """Return when the ticket has reached `state` or can't any more. Raises TimedOut, RunTaken, RootMoved."""
        self._wait(
            lambda: ticket.has_reached(state) or ticket.cannot_reach(state), timeout_s, f"step {ticket.step}",
            proof_of=ticket.snapshot if state == "verified" else 0,
        )  # fmt: skip

    def was_told(self, ticket: Ticket) -> None:
        self._failures.was_told(ticket.snapshot)

    def wait_all(self, timeout_s: float, *, no_daemon_s: float | None = None) -> None:
        """Return when every snapshot of this client, and the one it restored from a slot, is committed or lost.

        Raises:
            TimedOut: Not within the bound.
            NoDaemon: With no_daemon_s: no daemon was there for so long.
            RunTaken: Another client has the run now.
            RootMoved: The root isn't where it was.
        """
        self._wait(self._nothing_left, timeout_s, "the snapshots to be committed", no_daemon_s)

    def drain(self, timeout_s: float, *, verified: bool = False) -> int:
        """Wait for everything of this run, earlier clients' snapshots too; returns how many failed."""
        return self._drain(timeout_s, verified=verified)

    def await_earlier(self, timeout_s: float, slots: EarlierSlots | None = None) -> int:
        """Wait until no snapshot of this or an earlier client is on its way; returns how many failed.

        Args:
            timeout_s: Bound in seconds.
            slots: Once the newest is found in an earlier client's slot, nothing more is waited for.
        """
        with self.lock:
            self._link.look(0.0)
            attached = self._link.session.attached
            pending = bool(self._link.outbox) or (attached is not None and attached.pending > 0)
            lost = attached.lost if attached is not None else 0
        return lost + (self._drain(timeout_s, slots=slots) if pending else 0)

    def waiting(self) -> Sequence[WaitingSnapshot] | None:
        """Which snapshots of the run were accepted and aren't written; None when nobody says so now."""
        with self.lock, contextlib.suppress(CkptdError):
            request = Waiting(id=0, run=self._link.owner[1])
            return self._link.session.ask(request, WaitingReply, _SAYS_S).snapshots
        return None

    def slot_dir(self) -> Path:
        """Where the daemon said that slots lie."""
        attached = self._link.session.attached
        return Path(attached.slot_dir if attached is not None else "")

    def inherit(self, accepted: Accepted) -> None:
        """An earlier client's snapshot was restored from its slot: wait for it too, wherever own ones are waited for."""
        with self.lock:
            self._link.inherited.begin(accepted)

    def _drain(self, timeout_s: float, *, verified: bool = False, slots: EarlierSlots | None = None) -> int:
        token: tuple[int, int] | None = None

        def done() -> bool:
            nonlocal token
            if slots is not None and slots.look():
                return True
            if self._link.is_void(token):
                token = self._link.ask_drained(verified=verified)
            drained = self._link.drained(token) is not None and not self._link.outbox
            return drained and not (slots is not None and slots.coming)

        try:
            self._wait(done, timeout_s, "the run to be drained")
        except TimedOut:
            if self._link.drained(token) is None or self._link.outbox:
                raise
        return self._link.drained(token) or 0

    def status(self) -> dict[str, Any]:
        """The daemon's own account, as `ckptd status --json` prints it. Raises NoDaemon, TimedOut."""
        with self.lock:
            self._link.look(0.0)
            return self._link.status()

    def close(self, timeout_s: float) -> None:
        """Wait for what is staged, leave, let go of the slots. What isn't done in time is entered as unknown.

        Never raises for a daemon that is gone or silent, and takes little more than `timeout_s`.
        """
        deadline = time.monotonic() + timeout_s
        with self.lock:
            try:
                self.wait_all(timeout_s, no_daemon_s=min(timeout_s, self._start_timeout_s))
            except CkptdError as error:
                self._beside.give_up(error)
                self._link.look_on_disk()
                self._link.outbox.give_up(error)
                self._link.inherited.give_up(error)
            self._link.detach(min(ANSWER_S, max(0.5, deadline - time.monotonic())))
            self._over = "the client is closed"
            self._link.close()

    def abandon(self) -> None:
        """In a forked child all of this is the parent's; a lock held at the fork would be held for ever."""
        self.lock, self._over = threading.RLock(), "the client belongs to the parent of this forked process"
        self._beside.forget()

    def _wait(
        self, done: Callable[[], bool], timeout_s: float, what: str, no_daemon_s: float | None = None, *,
        proof_of: int = 0,
    ) -> None:  # fmt: skip
        started = time.monotonic()
        # The lock is free between two looks: another thread's call waits for one slice at most.
        while True:
            self._beside.finish(max(0.0, started + timeout_s - time.monotonic()))
            with self.lock:
                if not self._over:
                    self._link.hurry(proof_of, waited_s := time.monotonic() - started)
                    self._link.inherited.ask(self._link.session)
                    self._link.look(max(0.0, min(_SLICE_S, waited_s + PATIENCE_S, timeout_s - waited_s)))
                if done():
                    return
                self._check_wait(started, timeout_s, what, no_daemon_s)

    def _nothing_left(self) -> bool:
        return not self._link.outbox and not self._beside and not self._link.inherited

    def _check_wait(self, started: float, timeout_s: float, what: str, no_daemon_s: float | None) -> None:
        if self._over:
            raise ClientClosed(self._over, todo="wait where and while it is open; see: ckptd list")
        link, now = self._link, time.monotonic()
        if now - max(started, link.session.last_heard, link.asked_at) > _SILENCE_S:
            link.ask_again()
        if not link.session.connected:
            if now - self._disk_at > _DISK_EVERY_S:
                self._disk_at = now
                link.look_on_disk()
            over = no_daemon_s is not None and now - started >= no_daemon_s
            if over or isinstance(link.session.trouble, (RootMoved, RunTaken)):
                raise link.no_daemon()
        if now - started >= timeout_s:
            raise TimedOut(
                f"waited {timeout_s:.3g} s for {what}", seen=self._state_of_things(),
                todo=f"{link.stages.what_remains}; see: ckptd status",
            )  # fmt: skip

    def _state_of_things(self) -> str:
        count = len(self._link.outbox)
        if not self._link.session.connected:
            return f"no daemon ({self._link.no_daemon()})"
        said = f"{count} snapshot{'' if count == 1 else 's'} of this client still on the way"
        return f"{said}, and the one that was restored from shared memory" if self._link.inherited else said
