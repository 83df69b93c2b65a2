"""A daemon in a thread, for what a real one doesn't do on demand: be silent, slow, lie, fail, die.

It speaks ckptd.link.wire and makes real slots, and writes no checkpoint. The process named in daemon.json is a
child that only sleeps: killing it is the daemon's death, stopping it is a stopped daemon (also set `silent`).
"""

from __future__ import annotations

import queue
import secrets
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable

import msgspec
import zmq

from ckptd.disk.rootdir import DaemonRecord, Root, own_start, process_started
from ckptd.errors import CkptdError, ProtocolError
from ckptd.link import wire
from ckptd.names import step_folder
from ckptd.snapshot.descriptor import Descriptor
from ckptd.snapshot.descriptor_codec import decode
from ckptd.snapshot.slots import Slot, SlotState
from told_signals import stop


class FakeDaemon:
    """Start it with `with`. Everything it was sent is in `requests`, what it took in `snapshots`."""

    def __init__(self, root: Root, *, hold: bool = False, slot_limit: int | None = None) -> None:
        self.root, self.hold, self.slot_limit = root, hold, slot_limit
        self.silent = False
        self.queues = False  #: what it holds isn't being written yet, so it may give way
        self.refuse: CkptdError | None = None  #: answer to the next Attach, Reserve and Push
        self.fail: CkptdError | None = None  #: what becomes of snapshots
        self.deaf_to: set[str] = set()  #: names of requests that get no answer
        self.not_taken_in: set[int] = set()  #: snapshots that it doesn't know yet when asked for their slots
        self.pending = 0
        self.requests: list[wire.Request] = []
        self.snapshots: list[tuple[Descriptor, bytes]] = []
        self.twist: Callable[[wire.Notice], wire.Notice] = lambda notice: notice
        self.slots: dict[str, Slot] = {}
        self._held: list[tuple[bytes, wire.Push]] = []
        self._waiting: list[tuple[bytes, int]] = []
        self._states: dict[int, wire.Notice] = {}
        self._todo: queue.Queue[Callable[[], None]] = queue.Queue()
        self._identity = b""
        self._sequence = 0
        self._stop = threading.Event()

    def __enter__(self) -> FakeDaemon:
        self.process = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"])
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        path = self.root.new_socket_path()
        self._socket.bind(f"ipc://{path}")
        self._path = path
        self.record = DaemonRecord(
            endpoint=f"ipc://{path}", pid=self.process.pid,
            pid_started=process_started(self.process.pid) or 0,
            daemon_id=uuid.uuid4().hex, started_at=time.time(), version="fake", log="/nowhere",
        )  # fmt: skip
        self.record.write(self.root)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(60)
        self._socket.close(linger=0)
        self._context.term()
        self.process.send_signal(signal.SIGCONT)
        self.die()
        for slot in self.slots.values():
            slot.close()
            slot.path.unlink(missing_ok=True)
        self._path.unlink(missing_ok=True)

    def die(self) -> None:
        """The process in daemon.json is gone."""
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        """As SIGSTOP to a daemon: alive and silent."""
        self.silent = True
        stop(self.process.pid)

    def release(self) -> None:
        """Commit everything that is held, and hold nothing from now on."""
        self.hold = False
        self.call(self._release)

    def call(self, act: Callable[[], None]) -> None:
        """Do something in the daemon's thread and wait for it."""
        done = threading.Event()

        def work() -> None:
            act()
            done.set()

        self._todo.put(work)
        assert done.wait(60)

    def say(self, reply: wire.Reply | bytes) -> None:
        """Send the client something out of the blue."""
        self.call(lambda: self._send(self._identity, reply))

    def named(self, kind: type[wire.Message]) -> list[wire.Request]:
        return [request for request in self.requests if isinstance(request, kind)]

    # --- in the thread ---------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stop.is_set():
            while not self._todo.empty():
                self._todo.get()()
            if self.silent or not self._socket.poll(5) or self.silent:
                self._stop.wait(0.002)
                continue
            identity, data = self._socket.recv_multipart()
            request = wire.decode_request(data)
            self._identity = identity
            self.requests.append(request)
            if type(request).__name__ not in self.deaf_to:
                self._handle(identity, request)

    def _send(self, identity: bytes, reply: wire.Reply | bytes) -> None:
        self._socket.send_multipart([identity, reply if isinstance(reply, bytes) else wire.encode(reply)])

    def _handle(self, identity: bytes, request: wire.Request) -> None:
        if self.refuse is not None and isinstance(request, (wire.Attach, wire.Reserve, wire.Push)):
            refused = wire.Refused(id=request.id, error=wire.WireError.of(self.refuse))
            self.refuse = None
            self._send(identity, refused)
        elif isinstance(request, wire.Push):
            self._push(identity, request)
        elif isinstance(request, wire.Drain):
            self._waiting.append((identity, request.id))
            self._answer_drains()
        else:
            self._send(identity, self._answer(request))

    def _answer(self, request: wire.Request) -> wire.Reply:
        if isinstance(request, wire.Attach):
            return wire.Attached(
                id=request.id, daemon_id=self.record.daemon_id, run_id="ab" * 16,
                slot_dir=str(self.root.slot_dir()), slots=self._infos(), pending=self.pending,
            )  # fmt: skip
        if isinstance(request, wire.Reserve):
            return wire.Reserved(id=request.id, slots=self._make(request))
        if isinstance(request, wire.Resolve):
            known = self._states.get(request.snapshot)
            unknown = wire.Notice(
                id=request.id, client_id=request.client_id, snapshot=request.snapshot, step=0, state="unknown"
            )
            return unknown if known is None else _with_id(known, request.id)
        if isinstance(request, wire.Supersede):
            return self._supersede(request)
        if isinstance(request, wire.Status):
            return wire.StatusReply(id=request.id, data={"schema": "ckpt.v2-status"})
        return wire.Done(id=request.id)

    def _infos(self) -> list[wire.SlotInfo]:
        return [wire.SlotInfo(name=slot.name, bytes=slot.capacity) for slot in self.slots.values()]

    def _make(self, request: wire.Reserve) -> list[wire.SlotInfo]:
        for slot in list(self.slots.values()):
            if slot.capacity < request.slot_bytes and slot.header().state is SlotState.FREE:
                self.slots.pop(slot.name).close()
                slot.path.unlink()
        while len(self.slots) < request.slots:
            name = f"slot-{request.client_id}-{len(self.slots)}-{secrets.token_hex(4)}"
            self.slots[name] = Slot.create(self.root.slot_dir() / name, request.slot_bytes, owner=own_start())
        return self._infos()

    def _push(self, identity: bytes, push: wire.Push) -> None:
        slot = self.slots.get(push.slot)
        if slot is None or (slot.header().generation, slot.header().state) != (
            push.generation,
            SlotState.SEALED,
        ):
            error = ProtocolError("not that slot", where=push.slot)
            self._send(identity, wire.Refused(id=push.id, error=wire.WireError.of(error)))
            return
        self._sequence += 1
        if not self.queues:
            slot.mark_writing(self._sequence)
        self._send(identity, wire.Accepted(id=push.id, snapshot=push.snapshot, sequence=self._sequence))
        self._held.append((identity, push))
        if not self.hold:
            self._release()

    def _supersede(self, request: wire.Supersede) -> wire.Notice | wire.Done:
        held = next((one for one in self._held if one[1].snapshot == request.snapshot), None)
        if held is None or request.snapshot in self.not_taken_in:
            return wire.Done(id=request.id)
        notice = wire.Notice(
            id=request.id, client_id=request.client_id, snapshot=request.snapshot, step=request.step,
            state="writing",
        )  # fmt: skip
        if self.slots[held[1].slot].header().state is not SlotState.SEALED:
            return notice
        self._held.remove(held)
        self.slots[held[1].slot].release()
        self._states[request.snapshot] = _with_state(notice, "superseded")
        return self._states[request.snapshot]

    def _release(self) -> None:
        for identity, push in self._held:
            self._commit(identity, push)
        self._held.clear()
        self._answer_drains()

    def _commit(self, identity: bytes, push: wire.Push) -> None:
        slot = self.slots[push.slot]
        header, descriptor = slot.header(), decode(slot.descriptor())
        self.snapshots.append((descriptor, bytes(slot.data[: header.data_bytes])))
        slot.release()
        self._notify(identity, push, descriptor.step, header.sequence)

    def _notify(self, identity: bytes, push: wire.Push, step: int, sequence: int) -> None:
        error = None if self.fail is None else wire.WireError.of(self.fail)
        notice = wire.Notice(
            id=0, client_id=push.client_id, snapshot=push.snapshot, step=step, sequence=sequence,
            state="failed" if error else "committed", name="" if error else step_folder(step),
            slot=push.slot, slot_free=True, error=error,
        )  # fmt: skip
        self._states[push.snapshot] = notice
        if "Notice" not in self.deaf_to:
            self._send(identity, self.twist(notice))

    def _answer_drains(self) -> None:
        if not self._held:
            for identity, number in self._waiting:
                self._send(identity, wire.Drained(id=number, failed=0))
            self._waiting.clear()


def _with_state(notice: wire.Notice, state: str) -> wire.Notice:
    replaced: wire.Notice = msgspec.structs.replace(notice, state=state)
    return replaced


def _with_id(notice: wire.Notice, number: int) -> wire.Notice:
    replaced: wire.Notice = msgspec.structs.replace(notice, id=number)
    return replaced


def wait_until(true: Callable[[], bool], timeout_s: float = 60.0) -> None:
    """Wait for an event that has no better sign."""
    deadline = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < deadline, "it didn't happen"
        time.sleep(0.01)
