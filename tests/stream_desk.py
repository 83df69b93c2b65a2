"""The daemon's side of streams in this process, with a pipeline that only notes what it is given."""

from __future__ import annotations

import hashlib
import os
import select
from types import SimpleNamespace
from typing import Any

from ckptd.disk.daemon_record import process_started
from ckptd.limits import MAX_FRAME_BYTES
from ckptd.link import wire
from ckptd.snapshot.descriptor_codec import encode
from ckptd.snapshot.room import Room
from ckptd.snapshot.slots import Slot, SlotHeader, streamed_bytes
from ckptd_daemon.core.sessions import Process, Session, Sessions
from ckptd_daemon.core.staged_bytes import StagedBytes
from ckptd_daemon.core.stream_buffers import StreamBuffers
from ckptd_daemon.core.streams import Streams
from ckptd_daemon.core.worker import Worker
from ckptd_daemon.series.budget import Budget
from daemon_parts import descriptor_of, new_client_id


class FakePipeline:
    """Accepts whatever it is given, once."""

    def __init__(self) -> None:
        self.accepted: dict[tuple[str, int], SimpleNamespace] = {}
        self.content: dict[int, bytes] = {}

    def find(self, run: str, client_id: str, number: int) -> Any:
        return self.accepted.get((client_id, number))

    def accept(self, slot: Slot, header: SlotHeader) -> Any:
        sequence = len(self.accepted) + 1
        self.content[header.snapshot] = bytes(slot.data[: header.data_bytes])
        snapshot = SimpleNamespace(number=header.snapshot, sequence=sequence, slot=slot, run=header.run)
        return self.accepted.setdefault((header.client_id, header.snapshot), snapshot)


class Client:
    """One client's stream by hand."""

    def __init__(self, desk: StreamDesk, run: str, identity: bytes) -> None:
        self.desk, self.identity, self.id = desk, identity, new_client_id()
        process = Process.find(os.getpid(), process_started(os.getpid()) or 0)
        assert process is not None
        self.session = Session(self.id, run, process, b"main-" + identity)
        desk.sessions.add(self.session)

    def snapshot(self, number: int, data: bytes) -> tuple[bytes, wire.StreamBegin]:
        """The bytes to stream, and the message that begins them."""
        descriptor = encode(descriptor_of(self.id, number, data, run=self.session.run))
        whole = data + bytes(-len(data) % 4096) + descriptor
        assert len(whole) == streamed_bytes(len(data), len(descriptor))
        begin = wire.StreamBegin(
            id=number * 1000, client_id=self.id, token=self.session.stream_token, snapshot=number,
            generation=number, data_bytes=len(data), descriptor_bytes=len(descriptor), slots=2,
        )  # fmt: skip
        return whole, begin

    def ask(self, message: wire.StreamRequest, piece: bytes | None = None) -> list[wire.Reply]:
        return self.desk.ask(self.identity, wire.encode(message), piece)

    def frame(
        self, begin: wire.StreamBegin, whole: bytes, start: int, end: int, **wrong: Any
    ) -> wire.StreamFrame:
        said = {"offset": start, "sha256": hashlib.sha256(whole[:end]).digest()} | wrong
        fields = {"snapshot": begin.snapshot, "generation": begin.generation} | said
        return wire.StreamFrame(id=begin.id + 1 + start, **fields)

    def send(
        self, begin: wire.StreamBegin, whole: bytes, start: int, end: int, **wrong: Any
    ) -> list[wire.Reply]:
        return self.ask(self.frame(begin, whole, start, end, **wrong), whole[start:end])

    def send_all(
        self, begin: wire.StreamBegin, whole: bytes, size: int = MAX_FRAME_BYTES
    ) -> list[wire.Reply]:
        replies: list[wire.Reply] = []
        for start in range(0, len(whole), size):
            replies += self.send(begin, whole, start, min(start + size, len(whole)))
        return replies


class StreamDesk:
    def __init__(self, *, most_staged: int | None = None) -> None:
        self.now, self.free_bytes = 0.0, 10**9
        self.sessions, self.pipeline = Sessions(), FakePipeline()
        self.hasher, self.maker = Worker("test-hasher"), Worker("test-maker")
        self.sent: list[tuple[bytes, wire.Reply]] = []
        staged = StagedBytes(Budget(max_staged_bytes=most_staged))
        self.streams = Streams(self.sessions, self.hasher, self.maker, self._send, lambda: self.now, staged)
        self.streams.buffers._rooms = lambda: [Room("memory", self.free_bytes, "free some")]
        self.streams.pipeline = self.pipeline  # type: ignore[assignment]
        self.hasher.start()
        self.maker.start()

    @property
    def buffers(self) -> StreamBuffers:
        return self.streams.buffers

    def client(self, run: str = "default") -> Client:
        return Client(self, run, f"stream of {run}".encode())

    def ask(self, identity: bytes, data: bytes, piece: bytes | None = None) -> list[wire.Reply]:
        """What this connection is told until all is quiet."""
        before = len(self.sent)
        view = None if piece is None else memoryview(piece)
        self.streams.handle(identity, data, view, leaving=False)
        self.settle()
        return [reply for to, reply in self.sent[before:] if to == identity]

    def settle(self) -> None:
        for worker in (self.hasher, self.maker, self.hasher):
            idle: list[None] = []
            worker.submit(lambda: None, lambda _, idle=idle: idle.append(None))
            while not idle:
                select.select([worker], [], [], 60)
                worker.deliver()

    def written(self, client: Client, number: int) -> None:
        """The pipeline has made it durable."""
        slot = self.pipeline.accepted[client.id, number].slot
        slot.release()
        self.streams.freed(slot)
        self.settle()

    def close(self) -> None:
        for worker in (self.hasher, self.maker):
            worker.stop()
        for session in self.sessions:
            self.streams.buffers.forget(session.client_id)
            self.sessions.remove(session)

    def _send(self, identity: bytes, message: wire.Reply) -> bool:
        wire.decode_reply(wire.encode(message))
        self.sent.append((identity, message))
        return True
