"""Who is attached: one live client per run, known by pid *and* start time, and noticed when it dies."""

from __future__ import annotations

import contextlib
import os
import secrets
import select
from collections.abc import Iterator
from dataclasses import dataclass, field

from ckptd.disk.rootdir import process_started
from ckptd.errors import CkptdError, ProtocolError, RunTaken
from ckptd.limits import MAX_CLIENTS


@dataclass(frozen=True, slots=True)
class Process:
    """A process that can't be confused with a later one of the same pid.

    Attributes:
        pidfd: Readable once it has ended; -1 where the kernel has none.
    """

    pid: int
    started: int
    pidfd: int

    @classmethod
    def find(cls, pid: int, started: int) -> Process | None:
        """That process, if it lives."""
        try:
            pidfd = os.pidfd_open(pid)
        except (ProcessLookupError, OverflowError, ValueError):
            return None
        except OSError:
            pidfd = -1  # an old kernel, or no descriptor free: /proc alone must do
        if (
            pid and process_started(pid) == started
        ):  # looked at with the pidfd open: it can't change hands now
            return cls(pid, started, pidfd)
        if pidfd >= 0:
            os.close(pidfd)
        return None

    def alive(self) -> bool:
        if self.pidfd >= 0:
            ended = select.poll()
            ended.register(self.pidfd, select.POLLIN)
            return not ended.poll(0)
        return process_started(self.pid) == self.started

    def close(self) -> None:
        if self.pidfd >= 0:
            os.close(self.pidfd)


@dataclass
class Session:
    """One client that is alive.

    Attributes:
        identity: Its connection; None while it hasn't come back since this daemon started.
        stream_token: What it proves with that it streams.
        streams: Whether it does.
        skipped: How many snapshots it has told of that it never took.
        withdrawn: The same of those that gave way before they were sent.
        waits_for: The newest snapshot that its trainer waits for, or has waited for.
        waits_for_proof_of: The same of what it wants verified.
    """

    client_id: str
    run: str
    process: Process
    identity: bytes | None
    version: str = ""
    stream_token: str = field(default_factory=lambda: secrets.token_hex(16), repr=False)
    streams: bool = False
    skipped: int = 0
    withdrawn: int = 0
    waits_for: int = 0
    waits_for_proof_of: int = 0

    def hurry(self, snapshot: int, *, verified: bool) -> None:
        """Its trainer waits for this one."""
        if verified:
            self.waits_for_proof_of = snapshot
        else:
            self.waits_for = snapshot

    @property
    def owner(self) -> tuple[int, int]:
        return self.process.pid, self.process.started


class Sessions:
    """All sessions, by client and by run."""

    def __init__(self) -> None:
        self._by_client: dict[str, Session] = {}

    def __iter__(self) -> Iterator[Session]:
        return iter(list(self._by_client.values()))

    def __len__(self) -> int:
        return len(self._by_client)

    def get(self, client_id: str) -> Session | None:
        return self._by_client.get(client_id)

    def of_run(self, run: str) -> Session | None:
        return next((session for session in self._by_client.values() if session.run == run), None)

    def attached(self) -> list[Session]:
        """Those with a connection."""
        return [session for session in self if session.identity is not None]

    def dead(self) -> list[Session]:
        """Those whose process has ended."""
        return [session for session in self if not session.process.alive()]

    def add(self, session: Session) -> None:
        """Take in a session whose run is free.

        Raises:
            CkptdError: There are too many.
        """
        try:
            self.check_room()
        except CkptdError:
            session.process.close()
            raise
        self._by_client[session.client_id] = session

    def check_room(self) -> None:
        """Raise CkptdError when there are as many as there may be."""
        if len(self._by_client) >= MAX_CLIENTS:
            raise CkptdError("too many clients", wanted=f"at most {MAX_CLIENTS}", todo="use another root")

    def remove(self, session: Session) -> None:
        with contextlib.suppress(OSError):
            session.process.close()
        self._by_client.pop(session.client_id, None)


def refusal(
    known: Session | None, holder: Session | None, process: tuple[int, int], run: str
) -> CkptdError | None:
    """Why a client may not attach, or None; every session handed in is alive.

    Args:
        known: The session with the client's id, if any.
        holder: The session of the run, if any.
        process: The client's pid and start time.
        run: The run it asks for.
    """
    if known is not None and (known.run != run or known.owner != process):
        return ProtocolError(
            "this client id is another's", where=f"run {known.run}", seen=f"pid {process[0]}"
        )
    if holder is None or holder is known or may_take_over(holder, process[0]):
        return None
    if holder.owner == process:
        return RunTaken(
            f"this process already has a client for run {run}", where=f"run {run}",
            seen=f"pid {holder.process.pid}", todo="call its close() first",
        )  # fmt: skip
    return RunTaken(
        "the run already has a live client", where=f"run {run}", seen=f"pid {holder.process.pid}",
        todo="end that process, or use another run name",
    )  # fmt: skip


def may_take_over(holder: Session, pid: int) -> bool:
    """Whether a new client may have the run: its holder never came back, and was in the same process."""
    return holder.identity is None and holder.process.pid == pid
