"""One client's dealings with the daemon, one short look at a time: slots, pushes, notices, attaching again.

Nothing here waits for long; ckptd.link.daemon_writer makes the waits out of looks.
"""

from __future__ import annotations

import contextlib
import math
import time
from typing import Any, Final

from ckptd.disk.rootdir import Root
from ckptd.disk.series_entries import read_series
from ckptd.errors import CkptdError, NoDaemon
from ckptd.link import wire
from ckptd.link.client_options import Transport
from ckptd.link.failures import Failures
from ckptd.link.hurrying import Hurrying
from ckptd.link.inherited import Inherited
from ckptd.link.outbox import Outbox
from ckptd.link.session import DaemonMode, Session
from ckptd.link.skipped import SkippedSteps
from ckptd.link.stages import Stages
from ckptd.link.staging import Staged
from ckptd.link.wire import Accepted, Drained, Notice, Refused, StatusReply
from ckptd.snapshot.slots import Slot, SlotState

__all__ = ["ANSWER_S", "DaemonLink"]

ANSWER_S: Final = 10.0  #: bound of one short request

_CHECK_EVERY_S: Final = 0.5  # how often a look in passing makes sure that the daemon lives


class DaemonLink:
    """Not safe for use by several threads at once.

    Attributes:
        session: The attachment.
        outbox: What is on its way.
        inherited: What an earlier client left and this one restored.
        stages: Where they are staged.
    """

    def __init__(
        self, root: Root, run: str, client_id: str, *, mode: DaemonMode, slots: int, failures: Failures,
        transport: Transport = "auto",
    ) -> None:  # fmt: skip
        self.owner = (client_id, run)
        self._root = root
        self.session = Session(root, run, client_id, mode)
        self.stages = Stages(root, self.owner, self.session, slots, transport)
        self.outbox = Outbox(client_id, root.run_dir(run), failures)
        self.inherited = Inherited(root, run, failures)
        self.filling: Slot | None = None  #: the slot that is filled beside the training
        self._epoch, self._checked_at, self.asked_at = 0, 0.0, 0.0
        self._hurrying = Hurrying(self.session, client_id)
        self._pushes: dict[int, int] = {}  # message → snapshot, until it is answered
        self._drained: dict[int, int] = {}  # message → how many failed
        self._questions: set[int] = set()  # whether a snapshot gives way
        self._skipped, self._withdrawn = SkippedSteps(client_id), SkippedSteps(client_id, gave_way=True)

    # --- looking ---------------------------------------------------------------------------------

    def look(self, timeout_s: float) -> None:
        """Take in what has arrived, waiting up to `timeout_s` for the first; attach again if need be."""
        now = time.monotonic()
        if not self.session.connected:
            self.session.attach(0.0)
        elif now - self._checked_at > _CHECK_EVERY_S:
            self._checked_at = now
            self.session.check()
        self.greet()
        for reply in self.session.poll(timeout_s):
            self._take(reply)
        self._take_news()
        self._tell_left_out()
        if timeout_s > 0 and not self.session.connected:
            time.sleep(timeout_s)

    def greet(self) -> None:
        """After an attachment: take this daemon's slots, and ask it about what is on its way."""
        attached = self.session.attached
        if attached is None or self.session.epoch == self._epoch:
            return
        self._epoch = self.session.epoch
        self._hurrying.forgotten()
        self._pushes.clear()
        self._drained.clear()
        self._questions.clear()
        for left_out in (self._skipped, self._withdrawn):
            left_out.forgotten()
        staged = self.outbox.staged
        self.stages.greet(attached, self._held(), [one.ticket.snapshot for one in staged])
        for one in staged:  # a later one, staged before the answers are here, must not be pushed first
            if self.stages.is_slot(one.slot) and one.in_slot(SlotState.SEALED):
                self.push(one)
        self.ask_again()

    def ask_again(self) -> None:
        """Ask what became of every snapshot on its way, and of those that may be verified by now."""
        self.asked_at = time.monotonic()
        for ticket in [*(staged.ticket for staged in self.outbox.staged), *self.outbox.watched()]:
            self.session.send(wire.Resolve(id=0, client_id=self.owner[0], snapshot=ticket.snapshot))

    def look_on_disk(self) -> None:
        """With no daemon to ask: what has left its slot and lies in the run was committed, and its notice was lost.

        A slot is freed only after its checkpoint is durable; one still in its slot waits for the next daemon. What is
        streamed stays in this process's memory until its notice comes.
        """
        self.inherited.look_on_disk()
        out = {
            staged.ticket.snapshot for staged in self.outbox.staged
            if self.stages.is_private(staged.slot) or not staged.in_slot()
        }  # fmt: skip
        if not out:
            return
        with contextlib.suppress(OSError, CkptdError):  # then it can't be told, which is what the caller says
            for entry in read_series(self._root, self.owner[1]).entries:
                index = entry.index
                if index is not None and index.client_id == self.owner[0] and index.snapshot in out:
                    notice = Notice(
                        id=0, client_id=index.client_id, snapshot=index.snapshot, step=index.step,
                        state="committed", sequence=index.sequence, name=entry.name,
                    )  # fmt: skip
                    self.outbox.take(notice, time.monotonic())

    def _take(self, reply: wire.Reply) -> None:
        if isinstance(reply, Notice) and not self.inherited.take(reply):
            if reply.slot and not reply.slot_free:
                self.stages.forget(reply.slot)
            again = self.outbox.take(reply, time.monotonic())
            if again is not None:
                self._push_again(again)
            else:
                self.stages.streaming.heard(reply.snapshot)
            if reply.state in ("committed", "verified"):
                self.inherited.replaced()
        elif isinstance(reply, Accepted):
            self.outbox.accepted(reply)
            self.stages.streaming.heard(reply.snapshot)
        elif isinstance(reply, Drained):
            self._drained[reply.id] = reply.failed
        elif isinstance(reply, Refused) and reply.id in self._pushes:
            self.outbox.refused(self._pushes[reply.id], reply.error.exception())
            self.stages.streaming.heard(self._pushes[reply.id])
        self._pushes.pop(reply.id, None)
        self._questions.discard(reply.id)
        for left_out in (self._skipped, self._withdrawn):
            left_out.answered(reply.id)

    # --- slots -----------------------------------------------------------------------------------

    def reserve(self, size: int, timeout_s: float) -> None:
        """Have the slots made, mapped and touched, or the memory to stream from where there can be none.

        Raises what Session.ask raises: SharedMemoryTooSmall where there is no room for either, OverBudget.
        """
        self.stages.reserve(size, timeout_s, self._held())

    def find_free(self, size: int) -> Slot | None:
        return self.stages.find_free(size)

    def must_grow(self, size: int) -> bool:
        """Whether there is something to make before a slot of `size` bytes can come free."""
        return self.stages.must_grow(size)

    def _held(self) -> list[Slot]:
        """Slots with snapshots that aren't saved yet."""
        filling = [] if self.filling is None else [self.filling]
        return [*(staged.slot for staged in self.outbox.staged), *filling]

    # --- pushing ---------------------------------------------------------------------------------

    def stage(self, staged: Staged) -> None:
        """A slot was sealed: tell the daemon, in another slot when it has this one no more."""
        staged.ticket.become("staged")
        self.outbox.add(staged)
        self._hurrying.staged(staged.slot.capacity)
        self._push_again(staged)

    def push(self, staged: Staged) -> None:
        """Tell the daemon of a sealed slot. When that fails, the next attachment asks and pushes again."""
        number = self.session.send(
            wire.Push(
                id=0, client_id=self.owner[0], slot=staged.slot.name,
                generation=staged.generation, snapshot=staged.ticket.snapshot,
            )
        )  # fmt: skip
        if number is not None:
            self._pushes[number] = staged.ticket.snapshot

    def _push_again(self, staged: Staged) -> None:
        if not (self.stages.still_there(staged.slot) or self.stages.is_private(staged.slot)):
            # The daemon has this slot no more, but its memory is still mapped here: it moves to another one.
            with contextlib.suppress(CkptdError):
                self.stages.move(staged, ANSWER_S, self._held())
        streaming = self.stages.streaming
        if self.stages.is_slot(staged.slot):
            streaming.expect(staged.ticket.snapshot)
            self.push(staged)
            return
        if self.stages.is_private(staged.slot):
            streaming.send(staged)
        streaming.heard(staged.ticket.snapshot)

    def _take_news(self) -> None:
        """What has become of streams, and the memory of those that are over."""
        for news in self.stages.streaming.news():
            if isinstance(news, Accepted):
                self.outbox.accepted(news)
            else:
                self.outbox.refused(news.snapshot, news.error)
        self.stages.settle(self.outbox.staged, self._held())

    # --- what is left out ------------------------------------------------------------------------

    def ask_to_give_way(self, staged: Staged, until: float) -> int | None:
        """Ask for a snapshot to be superseded before `until`; the question's number, or None when it couldn't be sent."""
        ticket = staged.ticket
        if self.stages.streaming.withdraw(staged):
            notice = Notice(
                id=0, client_id=self.owner[0], snapshot=ticket.snapshot, step=ticket.step, state="superseded"
            )  # fmt: skip
            self.outbox.take(notice, time.monotonic())
            self._withdrawn.add(ticket.step)
            self._take_news()
            return 0  # no message has this number: it is answered
        request = wire.Supersede(
            id=0, client_id=self.owner[0], snapshot=ticket.snapshot, step=ticket.step, until=until
        )
        number = self.session.send(request)
        if number is not None:
            self._questions.add(number)
        return number

    def answered(self, question: int) -> bool:
        """Whether the daemon has answered it, or is gone."""
        return question not in self._questions or not self.session.connected

    def skipped(self, step: int) -> None:
        """A snapshot was never taken: the daemon is told, as soon as there is one."""
        self._skipped.add(step)
        self._tell_left_out()

    def _tell_left_out(self, *, at_last: bool = False) -> None:
        for left_out in (self._skipped, self._withdrawn):
            message = left_out.due(at_last=at_last) if self.session.connected else None
            if message is not None and (number := self.session.send(message)) is not None:
                left_out.sent(number)

    def hurry(self, proof_of: int = 0, waited_s: float = math.inf) -> None:
        """Say that this process waits for what it has pushed, and for this one to be verified; see Hurrying."""
        pushed = max((staged.ticket.snapshot for staged in self.outbox.staged), default=0)
        self._hurrying.say(pushed, proof_of, waited_s)

    # --- questions -------------------------------------------------------------------------------

    def ask_drained(self, *, verified: bool) -> tuple[int, int] | None:
        """Send the question; its token, or None when it couldn't be sent."""
        number = self.session.send(wire.Drain(id=0, run=self.owner[1], verified=verified))
        return None if number is None else (self._epoch, number)

    def is_void(self, token: tuple[int, int] | None) -> bool:
        """Whether the question must be asked (again): it was lost with the daemon it was put to."""
        return token is None or token[0] != self._epoch or not self.session.connected

    def drained(self, token: tuple[int, int] | None) -> int | None:
        """The answer: how many failed; None while there is none."""
        return None if token is None or token[0] != self._epoch else self._drained.get(token[1])

    def status(self) -> dict[str, Any]:
        """The daemon's own account."""
        return self.session.ask(wire.Status(id=0), StatusReply, ANSWER_S).data

    def detach(self, timeout_s: float) -> None:
        """Say goodbye if somebody listens."""
        self._tell_left_out(at_last=True)
        with contextlib.suppress(CkptdError):
            if self.session.connected:
                self.session.ask(wire.Detach(id=0, client_id=self.owner[0]), wire.Done, timeout_s)

    def no_daemon(self) -> CkptdError:
        """Why it isn't attached."""
        return self.session.trouble or NoDaemon("not attached to a daemon")

    def close(self) -> None:
        """Let go of everything without a word. What is sealed stays sealed."""
        self.session.close()
        self.stages.close()
        for staged in self.outbox.staged:
            staged.slot.close()
