"""What tests of the daemon are built from: snapshots made by hand, a client of bare messages, a daemon."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, TypeVar

from ckptd.disk import slot_folder
from ckptd.disk.rootdir import DaemonRecord, Root, process_started
from ckptd.errors import CkptdError
from ckptd.link import wire
from ckptd.link.connection import Connection, connect
from ckptd.snapshot.descriptor import Descriptor, Sharding, TensorSpec
from ckptd.snapshot.descriptor_codec import encode
from ckptd.snapshot.slots import Slot, needed_bytes
from ckptd.snapshot.values import TensorRef
from paths_below import paths_below
from told_signals import hearing_ctrl_c

R = TypeVar("R", bound=wire.Message)

PATIENCE_S: Final = 60.0  #: bound of each wait for what will come: nothing is said by how long it took


def eventually(what: Callable[[], Any], timeout_s: float = PATIENCE_S) -> Any:
    """What `what` returns, once it is true; AssertionError after the bound."""
    deadline = time.monotonic() + timeout_s
    while True:
        found = what()
        if found:
            return found
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.005)


def new_client_id() -> str:
    return secrets.token_hex(16)


def descriptor_of(
    client_id: str,
    snapshot: int,
    data: bytes,
    *,
    run: str = "default",
    step: int | None = None,
    **fields: Any,
) -> Descriptor:
    """A snapshot of one uint8 tensor, model.w, whose bytes are `data`."""
    spec = TensorSpec(
        path=("model", "w"), dtype="uint8", itemsize=1, shape=(len(data),), stride=None, offset=0,
        nbytes=len(data),
    )  # fmt: skip
    return Descriptor(
        run=run, client_id=client_id, snapshot=snapshot, step=snapshot if step is None else step,
        saved_at=1.0, run_seconds=1.0, base_sequence=fields.pop("base_sequence", None),
        state={"model": {"w": TensorRef(0)}}, tensors=(spec,), data_bytes=len(data), sharding=Sharding(),
        **fields,
    )  # fmt: skip


def fill_slot(slot: Slot, descriptor: Descriptor, data: bytes) -> int:
    """Seal a snapshot into a free slot; returns the generation."""
    slot.begin(descriptor.client_id, descriptor.run, descriptor.snapshot)
    slot.data[: len(data)] = data
    return slot.seal(encode(descriptor), len(data)).generation


def slot_size(data_bytes: int) -> int:
    return needed_bytes(data_bytes, 4096)


class Places:
    """The private folders of one test, and its environment."""

    def __init__(self, base: Path) -> None:
        self.root = base / "root"
        self.runtime = Path(f"/tmp/ckptd-test-{secrets.token_hex(6)}")  # short: a socket's path has 107 bytes
        self.shm = Path(f"/dev/shm/ckptd-test-{secrets.token_hex(6)}")
        for folder in (self.runtime, self.shm):
            folder.mkdir(mode=0o700)
        self.env = {"CKPTD_RUNTIME_DIR": str(self.runtime), "CKPTD_SHM_DIR": str(self.shm)}

    def slots(self) -> list[Path]:
        return [p for p in paths_below(self.shm) if not p.is_dir() and p.name != slot_folder.RECORD]

    def sockets(self) -> list[Path]:
        return sorted(self.runtime.iterdir())

    def leftovers(self) -> list[Path]:
        """Temporary names anywhere below the root."""
        return [p for p in paths_below(self.root) if p.name.startswith((".tmp-", ".trash-"))]

    def checkpoints(self, run: str = "default") -> list[str]:
        return sorted(p.name for p in (self.root / run).glob("step-*"))

    def remove(self) -> None:
        for folder in (self.runtime, self.shm):
            for path in sorted(folder.rglob("*"), reverse=True):
                path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
            folder.rmdir()


class DaemonProcess:
    """A real daemon: `python -m ckptd_daemon`."""

    def __init__(self, places: Places, *args: str, env: dict[str, str] | None = None) -> None:
        self.places = places
        with hearing_ctrl_c():
            self.process = subprocess.Popen(
                [sys.executable, "-m", "ckptd_daemon", "--root", str(places.root), *args],
                env=os.environ | places.env | (env or {}), stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                text=True, start_new_session=True,
            )  # fmt: skip

    @property
    def pid(self) -> int:
        return self.process.pid

    def ready(self) -> DaemonProcess:
        """Return once it takes connections."""

        def answers() -> bool:
            assert self.process.poll() is None, self.output()
            with contextlib.suppress(CkptdError):
                connect(Root.for_reading(self.places.root), timeout_s=5.0).close()
                record = DaemonRecord.read(Root.for_reading(self.places.root))
                return record is not None and record.pid == self.pid
            return False

        eventually(answers)
        return self

    def output(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.read()

    def send_signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def wait(self, timeout_s: float = PATIENCE_S) -> int:
        return self.process.wait(timeout_s)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGCONT)
        self.process.kill()
        self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()


class BareClient:
    """A client that speaks bare messages and fills its slots by hand."""

    def __init__(self, root: Path, run: str = "default", client_id: str | None = None) -> None:
        self.root = Root.for_reading(root)
        self.run, self.client_id = run, client_id or new_client_id()
        self.slots: dict[str, Slot] = {}
        self.notices: list[wire.Notice] = []
        self.connection: Connection = connect(self.root, timeout_s=PATIENCE_S)

    def reconnect(self) -> None:
        self.connection.close()
        self.connection = connect(self.root, timeout_s=PATIENCE_S)

    def attach(self) -> wire.Attached:
        pid = os.getpid()
        hello = wire.Attach(
            id=0, protocol=wire.PROTOCOL, run=self.run, client_id=self.client_id, pid=pid,
            pid_started=process_started(pid) or 0, version="test",
        )  # fmt: skip
        self.attached = self.connection.ask(hello, wire.Attached, PATIENCE_S)
        return self.attached

    def reserve(self, data_bytes: int, slots: int = 2) -> list[Slot]:
        message = wire.Reserve(id=0, client_id=self.client_id, slot_bytes=slot_size(data_bytes), slots=slots)
        reserved = self.connection.ask(message, wire.Reserved, PATIENCE_S)
        names = {info.name for info in reserved.slots}
        for name in self.slots.keys() - names:
            self.slots.pop(name).close()
        for name in names - self.slots.keys():
            self.slots[name] = Slot.open(Path(self.attached.slot_dir) / name)
        return list(self.slots.values())

    def seal(self, slot: Slot, snapshot: int, data: bytes, **fields: Any) -> int:
        descriptor = descriptor_of(self.client_id, snapshot, data, run=self.run, **fields)
        return fill_slot(slot, descriptor, data)

    def push(self, slot: Slot, generation: int, snapshot: int) -> wire.Accepted:
        message = wire.Push(
            id=0, client_id=self.client_id, slot=slot.name, generation=generation, snapshot=snapshot
        )
        return self.connection.ask(message, wire.Accepted, PATIENCE_S)

    def save(self, snapshot: int, data: bytes, slot: Slot | None = None, **fields: Any) -> wire.Accepted:
        slot = slot or next(iter(self.slots.values()))
        return self.push(slot, self.seal(slot, snapshot, data, **fields), snapshot)

    def resolve(self, snapshot: int, client_id: str | None = None) -> wire.Notice:
        message = wire.Resolve(id=0, client_id=client_id or self.client_id, snapshot=snapshot)
        return self.connection.ask(message, wire.Notice, PATIENCE_S)

    def wait_for(self, snapshot: int, *states: str, timeout_s: float = PATIENCE_S) -> wire.Notice:
        """The first notice that says one of these states of the snapshot."""

        def look() -> wire.Notice | None:
            news = self.connection.poll(0.05)
            self.notices += [notice for notice in news if isinstance(notice, wire.Notice)]
            return next((n for n in self.notices if n.snapshot == snapshot and n.state in states), None)

        found: wire.Notice = eventually(look, timeout_s)
        return found

    def drain(self, *, verified: bool = False, run: str | None = None, timeout_s: float = PATIENCE_S) -> int:
        return self.connection.ask(
            wire.Drain(id=0, run=run, verified=verified), wire.Drained, timeout_s
        ).failed

    def status(self) -> dict[str, Any]:
        return self.connection.ask(wire.Status(id=0), wire.StatusReply, PATIENCE_S).data

    def detach(self) -> None:
        self.connection.ask(wire.Detach(id=0, client_id=self.client_id), wire.Done, PATIENCE_S)

    def stop(self, grace_s: float = 0.0) -> None:
        self.connection.ask(wire.Stop(id=0, grace_s=grace_s), wire.Done, PATIENCE_S)

    def close(self) -> None:
        for slot in self.slots.values():
            slot.close()
        self.slots.clear()
        self.connection.close()


@contextlib.contextmanager
def places_in(base: Path) -> Iterator[Places]:
    places = Places(base)
    before = {name: os.environ.get(name) for name in places.env}
    os.environ.update(places.env)
    try:
        yield places
    finally:
        for name, value in before.items():
            os.environ.pop(name, None) if value is None else os.environ.update({name: value})
        places.remove()
