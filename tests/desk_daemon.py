"""A daemon in this process, all of it but its sockets and its verifier's process, and clients of bare messages."""

from __future__ import annotations

import contextlib
import select
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from ckptd.disk.commit import Committed, commit_snapshot
from ckptd.disk.lock import RootLock
from ckptd.disk.rootdir import Root, process_started
from ckptd.disk.slot_folder import record_root
from ckptd.disk.verification import check
from ckptd.link import wire
from ckptd.snapshot.descriptor import Descriptor
from ckptd.snapshot.slots import Slot
from ckptd_daemon.core import recovery
from ckptd_daemon.core.clients import Clients
from ckptd_daemon.core.disk import Disk
from ckptd_daemon.core.late_slots import LateSlots
from ckptd_daemon.core.lookup import Lookup
from ckptd_daemon.core.pipeline import Pipeline
from ckptd_daemon.core.service import Service
from ckptd_daemon.core.slotpool import SlotPool
from ckptd_daemon.core.streams import Streams
from ckptd_daemon.core.worker import Worker
from ckptd_daemon.series.budget import Budget
from ckptd_daemon.series.policy import RetentionPolicy
from ckptd_daemon.series.settings_file import Settings
from daemon_parts import fill_slot, slot_size

PATIENCE_S: Final = 60.0

#: Told what the daemon does, and what its clients hear: a word, then what it is about.
Tell = Callable[..., None]


class DeskDaemon:
    """As core/process.py puts it together. Everything happens in `settle`, and in the threads it waits for.

    Args:
        path: The root.
        keep_last: Its retention.
        tell: Called with "writing" (client, number) before a commit and "wrote" after it, and with "told" and each
            notice to a client.
    """

    def __init__(self, path: Path, keep_last: int, tell: Tell) -> None:
        self._tell = tell
        self.root = Root.open(path, create=True)
        self._up = contextlib.ExitStack()
        self._up.enter_context(RootLock(self.root))
        self._disk = Disk(
            self.root, Settings(policy=RetentionPolicy(keep_last=keep_last)), commit=self._commit
        )
        self.pool = SlotPool(self.root.slot_dir(), rooms=lambda _: [])
        record_root(self.pool.folder, self.root.path)
        facts = recovery.open_runs(self._disk, recovery.runs_on_disk(self.root))
        recovery.remove_stale_sockets(self.root)
        recovery.sweep(self.root)
        self._disk.writing.mode.find_out(self.root.service_dir)
        self._to_verify: list[tuple[str, str]] = []
        self._maker = Worker("desk-maker")
        self._clients = self._with_clients()
        for run, known in facts.items():
            self._clients.pipeline.opened(run, known)
        recovery.adopt(self._disk, self._clients, self.pool)
        self.late = LateSlots(self._disk, self._clients, self.pool, time.monotonic)
        self._up.callback(self._disk.close)
        for worker in (self._disk.worker, self._maker):
            worker.start()
            self._up.callback(worker.stop)

    def _with_clients(self) -> Clients:
        clients = Clients(
            daemon_id="d" * 16, disk=self._disk, pool=self.pool, maker=self._maker, send=self._send,
            say=lambda line: None, verify=lambda run, name: self._to_verify.append((run, name)), budget=Budget(),
        )  # fmt: skip
        clients.pipeline = Pipeline(self._disk, self.pool, clients, time.monotonic)
        clients.streams = Streams(
            clients.sessions, Worker("desk-streams"), self._maker, self._send, time.monotonic, clients.staged
        )
        clients.streams.pipeline = clients.pipeline
        self._service = Service(
            clients=clients, pipeline=clients.pipeline, pool=self.pool, send=self._send, status=dict,
            lookup=Lookup(self._disk, clients.pipeline),
        )  # fmt: skip
        self._replies: list[wire.Reply] = []
        return clients

    def _commit(
        self, run_dir: Any, descriptor: Descriptor, data: memoryview, position: Any, /, *, check: Any
    ) -> Committed:
        self._tell("writing", descriptor.client_id, descriptor.snapshot)
        how = self._disk.writing
        done = commit_snapshot(run_dir, descriptor, data, position, threads=1, writing=how, check=check)
        self._tell("wrote", descriptor.client_id, descriptor.snapshot, done.index.sequence)
        return done

    def _send(self, identity: bytes, message: wire.Reply) -> bool:
        if isinstance(message, wire.Notice) and message.state != "unknown":
            told = (message.client_id, message.snapshot, message.state, message.sequence, message.name)
            self._tell("told", *told)
        self._replies.append(message)
        return True

    def ask(self, message: wire.Request) -> wire.Reply:
        """The answer, once it is there."""
        before = len(self._replies)
        self._service.handle(b"client", wire.encode(message))
        deadline = time.monotonic() + PATIENCE_S
        while not (found := [reply for reply in self._replies[before:] if reply.id == message.id]):
            self._turn()
            if time.monotonic() > deadline:
                raise TimeoutError(f"no answer to {message}")
        return found[0]

    def submit(self, work: Callable[[], Any]) -> None:
        """Have the disk's thread do something of the test's own."""
        self._disk.submit(work, lambda _: None)

    def settle(self, *, verify: bool = True) -> None:
        """Return once everything accepted is written, and verified."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            self._barrier()
            if verify:
                for run, name in self._take_names():
                    report = check(self.root.run_dir(run) / name)
                    self._clients.pipeline.report(run, report)
                self._barrier()
            if not self._clients.pipeline.unwritten() and not (verify and self._to_verify):
                return
            if time.monotonic() > deadline:
                raise TimeoutError("it doesn't settle")

    def _take_names(self) -> list[tuple[str, str]]:
        names, self._to_verify[:] = list(dict.fromkeys(self._to_verify)), []
        return names

    def _barrier(self) -> None:
        """What was submitted so far is done, and what came of it delivered."""
        idle: list[object] = []
        self._disk.submit(lambda: None, idle.append)
        deadline = time.monotonic() + PATIENCE_S
        while not idle:
            self._turn()
            if time.monotonic() > deadline:
                raise TimeoutError("the disk's thread doesn't answer")

    def _turn(self) -> None:
        workers = [self._disk.worker, self._maker]
        for worker in select.select(workers, [], [], 1.0)[0]:
            worker.deliver()

    def close(self) -> None:
        """A clean exit: what nobody lives to use goes."""
        self._clients.bury_dead()
        self.pool.close()
        self._up.close()


class DeskClient:
    """A client of a run, as what is left of it after a restart too.

    Args:
        daemon: Whoever serves the root now.
        client_id: 32 hex digits.
        pid: The process it is to be.
        slots: How many.
    """

    def __init__(
        self, daemon: DeskDaemon, client_id: str, pid: int, *, run: str = "default", slots: int = 2
    ) -> None:
        self._daemon, self.client_id, self._run, self._ids = daemon, client_id, run, iter(range(1, 10**6))
        attached = daemon.ask(
            wire.Attach(
                id=next(self._ids), protocol=wire.PROTOCOL, run=run, client_id=client_id, pid=pid,
                pid_started=process_started(pid) or 0, version="test",
            )
        )  # fmt: skip
        reserved = daemon.ask(
            wire.Reserve(
                id=next(self._ids), client_id=client_id, slot_bytes=slot_size(4096) + 8192, slots=slots
            )
        )
        if not isinstance(attached, wire.Attached) or not isinstance(reserved, wire.Reserved):
            raise TypeError(f"{attached} {reserved}")
        self.slots = [Slot.open(daemon.pool.folder / info.name) for info in reserved.slots]

    def free(self) -> Slot | None:
        return next((slot for slot in self.slots if slot.header().state.name == "FREE"), None)

    def seal(self, slot: Slot, descriptor: Descriptor, data: bytes) -> int:
        """The generation: from here on it is to be written."""
        return fill_slot(slot, descriptor, data)

    def push(self, slot: Slot, generation: int, number: int) -> wire.Reply:
        return self._daemon.ask(
            wire.Push(
                id=next(self._ids), client_id=self.client_id, slot=slot.name, generation=generation,
                snapshot=number,
            )
        )  # fmt: skip

    def give_way(self, number: int, step: int) -> wire.Reply:
        return self._daemon.ask(
            wire.Supersede(
                id=next(self._ids), client_id=self.client_id, snapshot=number, step=step,
                until=time.monotonic() + PATIENCE_S,
            )
        )  # fmt: skip

    def leave(self) -> None:
        self._daemon.ask(wire.Detach(id=next(self._ids), client_id=self.client_id))
        for slot in self.slots:
            slot.close()
