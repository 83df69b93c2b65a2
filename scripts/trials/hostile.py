"""Clients that misbehave in every way that their sockets and slots allow, while another one saves beside them.

After each attack the same daemon lives, the other client's saves were committed within a bound, the daemon's own
memory grew by less than a bound, and its descriptors are as many as before.
"""

from __future__ import annotations

import contextlib
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import fuzzing
import raw_peer
import strangers
from part import Deadline, Findings, Part, say

import ckptd
from ckptd.disk.rootdir import DaemonRecord, Root
from ckptd.errors import CkptdError
from ckptd.link import wire
from daemon_parts import BareClient, DaemonProcess, Places, new_client_id, places_in
from test_hostile_slots import push_wildly, scribble

MOST_GROWTH_BYTES: Final = 96 * 2**20
_MOST_ENDLESS_BYTES: Final = 2**30  #: then connections are cut; a second's worth more is looked over
MOST_SAVE_S: Final = 20.0
SETTLE_S: Final = 300.0  #: what the dead have asked is answered first, and a busy machine takes its time
#: Descriptors that stay: one for each client that may come back, while its process lives.
_KEEPS: Final = {"1,000 runs at once": 1000}
DATA: Final = bytes(range(256)) * 1500


class Field:
    """A daemon, a client that behaves, and what an attack needs."""

    def __init__(self, places: Places, chance: random.Random) -> None:
        self.places, self.chance, self.saves, self.slowest_s = places, chance, 0, 0.0
        self.daemon = DaemonProcess(places, "--listen", "tcp://127.0.0.1:0", "--max-client-bytes", str(2**26))
        self.daemon.ready()
        record = DaemonRecord.read(Root.for_reading(places.root))
        if record is None:
            raise OSError("no daemon.json")
        self.modest = BareClient(places.root, "modest")
        self.stream = self.modest.attach().stream
        self.modest.reserve(1000)
        self.endpoints = [record.endpoint, self.stream, record.tcp]

    def save(self) -> None:
        self.saves += 1
        began = time.monotonic()
        self.modest.save(self.saves, self.saves.to_bytes(4, "big") * 250)
        self.modest.wait_for(self.saves, "committed", timeout_s=MOST_SAVE_S)
        self.slowest_s = max(self.slowest_s, time.monotonic() - began)

    def see_saves(self) -> None:
        """From an attack: return once two more were made."""
        wanted, until = self.saves + 2, time.monotonic() + MOST_SAVE_S
        while self.saves < wanted and time.monotonic() < until:
            time.sleep(0.01)

    def client(self, run: str = "") -> BareClient:
        made = BareClient(self.places.root, run or f"wild-{self.chance.randrange(10**9)}")
        made.attach()
        return made

    def memory_bytes(self) -> int:
        lines = Path(f"/proc/{self.daemon.pid}/status").read_text().splitlines()
        return int(next(line for line in lines if line.startswith("RssAnon:")).split()[1]) * 1024

    def descriptors(self) -> int:
        return len(os.listdir(f"/proc/{self.daemon.pid}/fd"))


def idle(field: Field) -> None:
    """300 that connect, some of which begin to shake hands."""
    with contextlib.ExitStack() as peers:
        for number in range(300):
            with contextlib.suppress(OSError):
                peer = peers.enter_context(raw_peer.connected(field.endpoints[number % 3]))
                peer.sendall(raw_peer.GREETING[: field.chance.choice((0, 1, 10, 63, 64))])
        field.see_saves()


def shaken(field: Field) -> None:
    """300 that shake hands, ask two hundred times for the status, and read nothing."""
    status = raw_peer.frame(wire.encode(wire.Status(id=1)))
    with contextlib.ExitStack() as peers:
        for number in range(300):
            with contextlib.suppress(OSError):
                peer = peers.enter_context(raw_peer.shaken(field.endpoints[number % 2]))
                peer.settimeout(0.5)
                peer.sendall(status * 200)
        field.see_saves()


def noise(field: Field) -> None:
    """Bytes that are no ZMTP, or stop being any."""
    for _ in range(200):
        with contextlib.suppress(OSError):
            endpoint, shake = field.chance.choice(field.endpoints), field.chance.random() < 0.5
            tcp = endpoint.startswith("tcp")
            with raw_peer.connected(endpoint) if tcp or not shake else raw_peer.shaken(endpoint) as peer:
                peer.sendall(field.chance.randbytes(field.chance.randrange(1, 3000)))


def many_frames(field: Field) -> None:
    """Messages of thousands of frames, whole and not."""
    for last in (False, True):
        with (
            raw_peer.shaken(field.endpoints[field.chance.randrange(2)]) as peer,
            contextlib.suppress(OSError),
        ):
            for _ in range(5000):
                peer.sendall(raw_peer.frame(bytes(1000), more=True))
            peer.sendall(raw_peer.frame(b"", more=not last))


def flood(field: Field) -> None:
    """A hundred thousand small messages, none of whose answers is read."""
    client = field.client()
    mine, number = client.client_id, 0
    for number in range(100_000):
        kind = field.chance.randrange(7)
        message: wire.Request = wire.Status(id=0)
        if kind < 2:
            message = wire.Resolve(id=0, client_id=mine, snapshot=number)
        elif kind == 2:
            message = wire.Push(id=0, client_id=mine, slot="x", generation=number, snapshot=number)
        elif kind == 3:
            message = wire.Reserve(id=0, client_id=mine, slot_bytes=1 << number % 40, slots=number % 3)
        elif kind == 4:
            message = wire.Drain(id=0, run=None, verified=bool(number % 2))
        elif kind == 5:
            message = wire.Supersede(id=0, client_id=mine, snapshot=number, step=1, until=1e12)
        with contextlib.suppress(CkptdError):
            client.connection.send(message)
    client.close()


def attach_much(field: Field) -> None:
    """One connection that attaches to a thousand runs."""
    client = BareClient(field.places.root)
    pid, started = os.getpid(), Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]
    for number in range(1000):
        message = wire.Attach(
            id=number + 1, protocol=wire.PROTOCOL, run=f"r{number}", client_id=new_client_id(), pid=pid,
            pid_started=int(started), version="x",
        )  # fmt: skip
        with contextlib.suppress(CkptdError):
            client.connection.send(message)
    client.close()


def streams(field: Field) -> None:
    """Streams that are begun and left, with pieces that don't fit."""
    client = field.client()
    begin = wire.StreamBegin(
        id=1, client_id=client.client_id, token=client.attached.stream_token, snapshot=1, generation=1,
        data_bytes=2**22, descriptor_bytes=100, slots=1,
    )  # fmt: skip
    for _ in range(50):
        with raw_peer.shaken(field.stream) as peer, contextlib.suppress(OSError):
            peer.sendall(raw_peer.frame(wire.encode(begin)))
            piece = wire.StreamFrame(
                id=2, snapshot=1, generation=1, offset=field.chance.choice((0, 1, 2**22)), sha256=bytes(32)
            )
            peer.sendall(raw_peer.frame(wire.encode(piece), more=True) + raw_peer.frame(bytes(2**20)))
    client.detach()
    client.close()


def slots(field: Field) -> None:
    """Slots scribbled over and cut short while the daemon reads them."""
    client, over = field.client(), threading.Event()
    client.reserve(len(DATA))
    threads = []
    for number, slot in enumerate(client.slots.values(), 1):
        push_wildly(client, slot, number)
        if field.chance.random() < 0.5:
            os.truncate(slot.path, field.chance.choice((0, 4096, 8192, slot.capacity // 2 // 4096 * 4096)))
        else:
            threads.append(threading.Thread(target=scribble, args=(slot.path, over, field.chance)))
            threads[-1].start()
    field.see_saves()
    over.set()
    for thread in threads:
        thread.join()
    client.close()


ATTACKS: Final[dict[str, Callable[[Field], None]]] = {
    "300 idle connections": idle, "300 that read nothing": shaken, "noise on the sockets": noise,
    "messages of many frames": many_frames, "100,000 small messages": flood, "1,000 runs at once": attach_much,
    "streams begun and left": streams, "slots scribbled over and cut": slots,
}  # fmt: skip


def settle(field: Field) -> None:
    """Return once the last attack has had its effect: runs are opened one at a time, long after they were asked for."""
    before, until = -1, time.monotonic() + SETTLE_S
    while (now := field.descriptors()) != before and time.monotonic() < until:
        before = now
        time.sleep(1.0)


def attack(field: Field, name: str, findings: Findings) -> None:
    """One attack, with saves beside it and one after it."""
    settle(field)
    most = 8 + _KEEPS.get(name, 0)  # each new run keeps a few
    memory, before, began = field.memory_bytes(), field.descriptors(), time.monotonic()
    grown = 0
    attacking = threading.Thread(target=ATTACKS[name], args=(field,))
    attacking.start()
    try:
        while attacking.is_alive():
            field.save()
            grown = max(grown, field.memory_bytes() - memory)
        field.save()
    except (AssertionError, CkptdError, OSError) as error:
        findings.fault(f"{name}: the other client's save: {error!r}")
    attacking.join()
    if field.daemon.process.poll() is not None:
        findings.fault(f"{name}: the daemon has ended: {field.daemon.process.returncode}")
        return
    if grown > MOST_GROWTH_BYTES:
        findings.fault(f"{name}: the daemon grew by {grown} bytes")
    until = time.monotonic() + SETTLE_S
    while field.descriptors() > before + most and time.monotonic() < until:
        time.sleep(0.1)
    if field.descriptors() > before + most:
        findings.fault(f"{name}: {field.descriptors()} descriptors, {before} before")
    findings.tried[name] += 1
    worst = findings.numbers.setdefault(name, {"grown_bytes": 0, "seconds": 0.0})
    worst["grown_bytes"] = max(worst["grown_bytes"], grown)
    worst["seconds"] = max(worst["seconds"], round(time.monotonic() - began, 2))


def endless(field: Field, findings: Findings) -> None:
    """One message that never ends. Everybody is cut off in the end, and honest clients go on by themselves."""
    before, sent, cut, grown = field.memory_bytes(), 0, False, 0
    parts = raw_peer.frame(bytes(60_000), more=True) * 10
    with ckptd.Client(field.places.root, run="steady") as steady, raw_peer.shaken(field.endpoints[0]) as peer:
        steady.snapshot(1, {"number": 1}).wait(timeout_s=MOST_SAVE_S)
        try:
            while sent < 4 * _MOST_ENDLESS_BYTES:
                peer.sendall(parts)
                sent += len(parts)
                grown = max(grown, field.memory_bytes() - before) if sent % (100 * len(parts)) == 0 else grown
        except OSError:
            cut = True
        for step in (2, 3):
            steady.snapshot(step, {"number": step}).wait(timeout_s=MOST_SAVE_S)
    findings.tried["an endless message"] += 1
    findings.numbers["an endless message"] = {"sent_bytes": sent, "grown_bytes": grown}
    if not cut or grown > 2 * _MOST_ENDLESS_BYTES:
        findings.fault(f"an endless message: cut off: {cut}; the daemon grew by {grown} bytes")


@contextlib.contextmanager
def a_field(folder: Path, chance: random.Random) -> Iterator[Field]:
    with places_in(folder) as places:
        field = Field(places, chance)
        try:
            yield field
            field.modest.close()
        finally:
            field.daemon.kill()


def run(minutes: float, seed: int, folder: Path, findings: Findings) -> None:
    deadline, chance = Deadline(minutes), random.Random(seed)
    (folder / "fuzzing").mkdir()
    fuzzing.fuzz(findings, folder / "fuzzing", 60.0 * minutes / 3)
    with a_field(folder, chance) as field:
        strangers.another_user(field.endpoints[:2], findings)
        strangers.another_namespace(field.places.root, findings)
        names = list(ATTACKS)
        while not deadline.over() or not all(findings.tried[name] for name in ATTACKS):
            chance.shuffle(names)
            for name in names:
                say(name)
                attack(field, name, findings)
                if findings.faults:
                    return
        endless(field, findings)
        findings.numbers |= {"saves": field.saves, "slowest save, s": round(field.slowest_s, 3)}
        log = (field.places.root / ".ckptd" / "daemon.log").read_text()
        if "daemon.fault" in log:
            findings.fault("the daemon's log has a fault of its own")


PART = Part(name="hostile", about="clients that misbehave while another one saves", run=run)
