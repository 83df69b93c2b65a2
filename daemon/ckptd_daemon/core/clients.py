"""The clients: attaching, dying, leaving, and what each is told of its snapshots."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable

from ckptd.errors import CkptdError, NoDaemon, ProtocolError
from ckptd.link import wire
from ckptd.names import check_run_name
from ckptd.snapshot.slots import Slot, SlotHeader
from ckptd_daemon.core.disk import Disk, RunFacts
from ckptd_daemon.core.lifecycle import State
from ckptd_daemon.core.openings import Openings
from ckptd_daemon.core.pipeline import Pipeline
from ckptd_daemon.core.reservations import Reservations
from ckptd_daemon.core.sessions import Process, Session, Sessions, may_take_over, refusal
from ckptd_daemon.core.slotpool import SlotPool, adoption_order, header_of, holds_snapshot
from ckptd_daemon.core.snapshots import Snapshot
from ckptd_daemon.core.staged_bytes import StagedBytes
from ckptd_daemon.core.streams import Streams
from ckptd_daemon.core.worker import Worker
from ckptd_daemon.series.budget import Budget

log = logging.getLogger(__name__)

#: Sends to a connection; False when that is gone.
Send = Callable[[bytes, wire.Reply], bool]


class Clients:
    """All clients of the daemon. Of the loop's thread only.

    Args:
        daemon_id: Fresh for this process.
        disk: Opens runs.
        pool: The slots.
        maker: Makes slots.
        send: Sends a message to a connection, without waiting; False when that is gone.
        say: Prints a line for whoever watches the daemon in the foreground.
        verify: Asks for a checkpoint to be re-read; see Verifier.verify.
        budget: Bounds the bytes that clients may have.

    Attributes:
        pipeline: The snapshots; set once, right after construction.
        streams: The snapshots that are still coming in; set likewise.
        leaving: Why nobody new may attach; "" while anybody may.
        closed: The grace is over: nothing more is taken from anybody.
        staged: How many bytes they have.
    """

    pipeline: Pipeline
    streams: Streams

    def __init__(
        self, *, daemon_id: str, disk: Disk, pool: SlotPool, maker: Worker, send: Send,
        say: Callable[[str], None], verify: Callable[[str, str], None], budget: Budget,
    ) -> None:  # fmt: skip
        self.sessions = Sessions()
        self.leaving, self.closed = "", False
        self._verify = verify
        self._daemon_id, self._pool, self._send, self._say = daemon_id, pool, send, say
        self.staged, self._openings = StagedBytes(budget, pool.pieces), Openings(disk)
        self._reservations = Reservations(pool, maker, send, self.sessions.get, self.staged)

    # --- coming ----------------------------------------------------------------------------------

    def attach(self, identity: bytes, request: wire.Attach) -> None:
        """Let a client in, once its run is open. Raises the error to refuse it with."""
        if request.protocol != wire.PROTOCOL:
            raise ProtocolError(
                "another protocol version", seen=f"{request.protocol} (ckptd {request.version})",
                wanted=str(wire.PROTOCOL), todo="use one ckptd on both sides and restart the daemon",
            )  # fmt: skip
        check_run_name(request.run)
        if self.closed or (self.leaving and self.sessions.get(request.client_id) is None):
            raise NoDaemon("the daemon is leaving", seen=self.leaving, todo="attach to the next one")
        self.bury_dead()
        if self._known(request) is None:  # refused, if it is, before anything is made on disk
            self.sessions.check_room()
            self._process(request).close()
        if request.run in self.pipeline.books:
            self._admit(identity, request)
        else:
            self._openings.ask(
                identity, request.run, lambda facts: self._run_opened(identity, request, facts)
            )

    def _run_opened(self, identity: bytes, request: wire.Attach, facts: RunFacts | Exception) -> None:
        try:
            if isinstance(facts, CkptdError):
                raise facts
            if isinstance(facts, Exception):
                raise CkptdError("the run can't be opened", where=f"run {request.run}", seen=str(facts))
            self.pipeline.opened(request.run, facts)
            self._adopt_kept(request.run)
            self._admit(identity, request)
        except CkptdError as error:
            self._send(identity, wire.Refused(id=request.id, error=wire.WireError.of(error)))

    def _adopt_kept(self, run: str) -> None:
        """Write what dead clients left while the run couldn't be opened; its sequences are never given again."""
        headers = ((slot, header_of(slot)) for slot in self._pool)
        kept = [
            (slot, header)
            for slot, header in headers
            if header is not None and holds_snapshot(header) and header.run == run
            if self.sessions.get(header.client_id) is None
        ]
        for slot, header in adoption_order(kept):
            self._accept_left(slot, header, sequence=header.sequence)

    def _accept_left(self, slot: Slot, header: SlotHeader, *, sequence: int = 0) -> None:
        """Accept what a dead client left; a header that can't be changed harms nobody else."""
        try:
            self.pipeline.accept(slot, header, sequence=sequence)
        except ProtocolError as error:
            log.error("snapshot.not_adopted slot=%s error=%s", slot.name, error)

    def _admit(self, identity: bytes, request: wire.Attach) -> None:
        self.bury_dead()
        session = self._known(request) or self._newcomer(request)
        session.identity, session.version = identity, request.version
        log.info("client.attached run=%s pid=%d client=%s", session.run, request.pid, session.client_id)
        pending = [s for s in self.pipeline.unwritten(session.run) if s.client_id != session.client_id]
        book = self.pipeline.books[session.run]
        reply = wire.Attached(
            id=request.id, daemon_id=self._daemon_id, run_id=book.run_id,
            slot_dir=str(self._pool.folder), slots=self._reservations.infos(session), pending=len(pending),
            lost=book.lost(session.client_id),
            stream=self.streams.endpoint, stream_tcp=self.streams.endpoint_tcp, stream_token=session.stream_token,
        )  # fmt: skip
        self._send(identity, reply)

    def _known(self, request: wire.Attach) -> Session | None:
        """The living session of this client, if any. Raises when another one has its id or its run."""
        session, holder = self.sessions.get(request.client_id), self.sessions.of_run(request.run)
        if holder is not None and holder.identity is not None and holder.process.pid == request.pid:
            self._tell(holder, wire.Done(id=0))  # is its connection still there?
        error = refusal(session, holder, (request.pid, request.pid_started), request.run)
        if error is not None:
            raise error
        return session

    def _newcomer(self, request: wire.Attach) -> Session:
        holder = self.sessions.of_run(request.run)
        if holder is not None and may_take_over(holder, request.pid):
            self.bury(holder)
        session = Session(request.client_id, request.run, self._process(request), None)
        self.sessions.add(session)
        return session

    def _process(self, request: wire.Attach) -> Process:
        process = Process.find(request.pid, request.pid_started)
        if process is None:
            raise ProtocolError(
                "no such process here", where=f"pid {request.pid}", seen=f"started at {request.pid_started}",
                todo="client and daemon must run in one pid namespace",
            )  # fmt: skip
        return process

    def anybody_reserves(self) -> bool:
        """Whether somebody waits for slots."""
        return self._reservations.any_under_way()

    def reserve(self, session: Session, identity: bytes, request: wire.Reserve) -> None:
        """Have slots made; see Reservations."""
        self._reservations.ask(session, identity, request)

    def skipped(self, session: Session, request: wire.Skipped) -> None:
        """Enter what a client says that was never sent; each is counted once, however often it is told."""
        book, steps = self.pipeline.books[session.run], request.steps
        if request.gave_way:
            fresh, word = request.count - session.withdrawn, "superseded"
        else:
            fresh, word = request.count - session.skipped, "skipped"
        if fresh <= 0:
            return
        if request.gave_way:
            session.withdrawn, book.superseded = request.count, book.superseded + fresh
            step = steps[-1] if steps else 0
            book.last_superseded = Snapshot(
                session.run, session.client_id, 0, 0, None, State.SUPERSEDED, step
            )
        else:
            session.skipped, book.skipped = request.count, book.skipped + fresh
            book.last_skipped = steps[-1] if steps else book.last_skipped
        for step in steps[-fresh:]:
            log.info("snapshot.%s run=%s step=%d", word, session.run, step)
            self._say(f"{session.run} step {step}: {word}")
        if (unnamed := fresh - len(steps)) > 0:
            log.info("snapshot.%s run=%s more=%d", word, session.run, unnamed)

    # --- going -----------------------------------------------------------------------------------

    def bury_dead(self) -> None:
        """See to what dead clients left."""
        for session in self.sessions.dead():
            log.info("client.died run=%s pid=%d", session.run, session.process.pid)
            self.bury(session)

    def bury(self, session: Session) -> None:
        """A client has left or died: what it sealed is written, everything else of it is freed."""
        held = []
        for slot in self._pool.of(session.client_id):
            header = header_of(slot)
            if header is not None and holds_snapshot(header) and _is_of(session, header):
                held.append((slot, header))
            else:
                self._pool.remove(slot)
        opened = session.run in self.pipeline.books  # else the slots are kept until it can be
        for slot, header in adoption_order(held):
            with contextlib.suppress(ProtocolError):  # it must not keep the client from being buried
                slot.disown()
            if opened:
                self._accept_left(slot, header)
        self._reservations.forget(session)
        self.streams.forget(session)
        self.sessions.remove(session)

    # --- what the pipeline tells -----------------------------------------------------------------

    def to_verify(self, run: str, name: str) -> None:
        self._verify(run, name)

    def attached(self, client_id: str) -> bool:
        session = self.sessions.get(client_id)
        return session is not None and session.identity is not None and session.process.alive()

    def snapshot_changed(self, snapshot: Snapshot, freed: Slot | None) -> None:
        session = self.sessions.get(snapshot.client_id)
        if freed is not None and self.streams.owns(freed):
            self.streams.freed(freed)
            freed = None  # no slot of the client's: its own copy it knows itself
        free = freed is not None and self._keep_or_remove(session, snapshot.client_id, freed)
        if session is not None:
            name = freed.name if freed is not None else ""
            self._tell(session, snapshot.notice(0, slot=name, slot_free=free))
        if freed is not None:
            self._reservations.room_came()
        if snapshot.state in _SAID:
            self._say(_line(snapshot))

    def _tell(self, session: Session, message: wire.Reply) -> None:
        """Send something unasked. A connection that is gone is forgotten; its client may make another."""
        if session.identity is not None and not self._send(session.identity, message):
            log.info("client.lost run=%s pid=%d", session.run, session.process.pid)
            session.identity = None

    def _keep_or_remove(self, session: Session | None, client_id: str, slot: Slot) -> bool:
        """Whether a slot that was freed can be filled again; it is removed when nobody is there to do it, or its client
        has larger ones by now.
        """
        if self._pool.get(client_id, slot.name) is not slot:
            return False
        header = header_of(slot)
        wanted = (
            session is not None and not self._reservations.has_outgrown(session, slot) and slot.in_place()
        )
        if header is not None and (wanted or holds_snapshot(header)):
            return True
        self._pool.remove(slot)
        return False


def _is_of(session: Session, header: SlotHeader) -> bool:
    return (header.client_id, header.run) == (session.client_id, session.run)


_SAID = (State.COMMITTED, State.CORRUPT, State.FAILED, State.GONE, State.SUPERSEDED)


def _line(snapshot: Snapshot) -> str:
    read = snapshot.step or snapshot.state is not State.SUPERSEDED
    which = f"step {snapshot.step}" if read else f"snapshot {snapshot.number}"  # its descriptor wasn't read
    head = f"{snapshot.run} {which}: {snapshot.state.value}"
    if snapshot.error is not None:
        return f"{head}: {snapshot.error}"
    if snapshot.state is State.SUPERSEDED:
        return head
    speed = snapshot.nbytes / max(snapshot.seconds, 1e-9)
    return (
        f"{head} as {snapshot.name}, {_size(snapshot.nbytes)} in {snapshot.seconds:.2f} s ({_size(speed)}/s)"
    )


def _size(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"
