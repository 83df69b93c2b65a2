"""A slot: the shared-memory file that holds one snapshot between the trainer's copy and the daemon's write.

Layout: page 0 holds two copies of the header; the data region begins at byte 4096; the descriptor
lies behind the data at the next multiple of 4096. A header is never changed in place: the older
copy is overwritten with the next counter and a CRC, so a process killed in the middle of that
leaves the other copy, and the slot in its previous state.

A slot has one writer at a time, by its state: FREE and FILLING belong to the client it was made
for, SEALED and WRITING to the daemon. No torch here: the trainer goes from `.data` through NumPy.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Final

from ckptd.errors import ProtocolError, SharedMemoryTooSmall
from ckptd.limits import PAGE_ALIGNMENT
from ckptd.snapshot import slot_header, slot_proof
from ckptd.snapshot.huge_pages import collapse
from ckptd.snapshot.mapped_memory import MappedMemory
from ckptd.snapshot.prefault import prefault
from ckptd.snapshot.slot_file import open_slot_file
from ckptd.snapshot.slot_header import COPIES, SlotHeader, SlotState
from ckptd.snapshot.slot_layout import HEADER_BYTES, needed_bytes, page_up, streamed_bytes
from ckptd.snapshot.slot_proof import PROOF_AT, PROOF_BYTES, Proof

__all__ = ["HEADER_BYTES", "Slot", "SlotHeader", "SlotState", "needed_bytes", "streamed_bytes"]

_NO_ROOM: Final = (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM, errno.EFBIG)
_HOLDING: Final = (SlotState.SEALED, SlotState.WRITING)


class Slot:
    """One open, mapped slot. Header changes are safe from several threads of one process.

    Attributes:
        path: The slot's file.
        name: Its file name, as messages carry it.
        capacity: Size of the file in bytes: header, data and descriptor together.
        data: The mapped region behind the header. Views of it keep the memory alive after close().
    """

    def __init__(self, path: Path, mapping: MappedMemory) -> None:
        self.path, self.name, self.capacity = path, path.name, len(mapping)
        self._mapping = mapping
        mapping.watch()
        self._changing = threading.Lock()
        self._read: tuple[bytes, tuple[int, int, SlotHeader]] | None = None  # see _newest
        self._all = memoryview(mapping)
        self.data = self._all[HEADER_BYTES:]

    def __repr__(self) -> str:
        return f"Slot({self.name}, {self.capacity} bytes)"

    @classmethod
    def create(
        cls, path: Path, size: int, *, owner: tuple[int, int] = (0, 0), client_id: str = "", run: str = ""
    ) -> Slot:
        """Make a new slot file of at least `size` bytes (rounded up to whole pages), its memory allocated.

        Args:
            path: Its name; nothing may have it.
            size: See needed_bytes.
            owner: Pid and start time of the process that will fill it.
            client_id: The client it is made for, so that a restarted daemon knows before it was ever filled.
            run: That client's run.

        Raises:
            SharedMemoryTooSmall: There isn't that much; nothing is left behind.
            FileExistsError: The name is taken.
            OSError: Another failure; nothing is left behind.
        """
        size = max(page_up(size), 2 * PAGE_ALIGNMENT)
        fresh = SlotHeader(
            state=SlotState.FREE, client_id=client_id, run=run, owner_pid=owner[0], owner_started=owner[1]
        )
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            os.fchmod(fd, 0o600)
            os.ftruncate(fd, size)
            collapse(fd, size)
            # A merely truncated file on tmpfs is a promise: writing to it may end in SIGBUS.
            os.posix_fallocate(fd, 0, size)
            slot = cls(path, MappedMemory.of(fd, size))
            for counter, start in enumerate(COPIES):
                slot._write(start, counter + 1, fresh)
            return slot
        except BaseException as error:
            path.unlink(missing_ok=True)
            if isinstance(error, OSError) and error.errno in _NO_ROOM:
                raise SharedMemoryTooSmall(
                    "no room for a slot", where=str(path.parent), wanted=f"{size} bytes",
                    todo="enlarge it (docker: --shm-size; mount -o remount,size=…) or use fewer slots",
                ) from error  # fmt: skip
            raise
        finally:
            os.close(fd)

    @classmethod
    def anonymous(cls, name: str, size: int, *, client_id: str = "", run: str = "") -> Slot:
        """A slot that is no file: memory of this process alone, for a snapshot that is streamed.

        Args:
            name: What it is called in messages and logs.
            size: See needed_bytes; rounded up to whole pages.
            client_id: The client it is for.
            run: That client's run.

        Raises:
            SharedMemoryTooSmall: The system has no such memory.
        """
        size = max(page_up(size), 2 * PAGE_ALIGNMENT)
        try:
            # Shared: after a fork the next copy must not pay for a page of its own at each page it touches.
            mapping = MappedMemory(-1, size)
        except (OSError, ValueError, OverflowError) as error:
            raise SharedMemoryTooSmall(
                "no memory for a snapshot", wanted=f"{size} bytes", todo="free memory, or use fewer slots"
            ) from error
        slot = cls(Path(name), mapping)
        fresh = SlotHeader(state=SlotState.FREE, client_id=client_id, run=run)
        for counter, start in enumerate(COPIES):
            slot._write(start, counter + 1, fresh)
        return slot

    @classmethod
    def open(cls, path: Path) -> Slot:
        """Map an existing slot.

        Raises:
            ProtocolError: It isn't a private regular file of ours of a possible size.
            OSError: It can't be opened (FileNotFoundError when it is gone).
        """
        fd, size = open_slot_file(path, os.O_RDWR)
        try:
            return cls(path, MappedMemory.of(fd, size))
        finally:
            os.close(fd)

    # --- the header ------------------------------------------------------------------------------

    def header(self) -> SlotHeader:
        """The newest whole header. Raises ProtocolError when neither copy is one."""
        return self._newest()[1][2]

    def begin(self, client_id: str, run: str, snapshot: int) -> SlotHeader:
        """FREE → FILLING. The header returned has the generation a push names. ProtocolError if not FREE."""

        def filling(old: SlotHeader) -> SlotHeader:
            return SlotHeader(
                state=SlotState.FILLING, generation=old.generation + 1, client_id=client_id, run=run,
                snapshot=snapshot, owner_pid=old.owner_pid, owner_started=old.owner_started,
            )  # fmt: skip

        return self._change(filling, SlotState.FREE)

    def seal(self, descriptor: bytes, data_bytes: int) -> SlotHeader:
        """FILLING → SEALED: the descriptor goes behind the data; now the snapshot survives its trainer.

        Raises:
            SharedMemoryTooSmall: The two don't fit; the slot is still FILLING.
            ProtocolError: The slot isn't FILLING.
        """
        if needed_bytes(data_bytes, len(descriptor)) > self.capacity:
            raise SharedMemoryTooSmall(
                "the snapshot doesn't fit into its slot", where=self.name, seen=f"{self.capacity} bytes",
                wanted=f"{needed_bytes(data_bytes, len(descriptor))}", todo="reserve again",
            )  # fmt: skip
        self._check(self.header(), SlotState.FILLING)
        start = HEADER_BYTES + page_up(data_bytes)
        self._all[start : start + len(descriptor)] = descriptor
        sha256 = hashlib.sha256(descriptor).hexdigest()

        def sealed(old: SlotHeader) -> SlotHeader:
            return replace(
                old, state=SlotState.SEALED, data_bytes=data_bytes, descriptor_bytes=len(descriptor),
                descriptor_sha256=sha256,
            )  # fmt: skip

        return self._change(sealed, SlotState.FILLING)

    def descriptor(self) -> bytes:
        """A private copy of the encoded descriptor. Raises ProtocolError unless it is what was sealed."""
        header = self.header()
        start = HEADER_BYTES + page_up(header.data_bytes)
        copy = bytes(self._all[start : start + header.descriptor_bytes])
        seen = hashlib.sha256(copy).hexdigest()
        if seen != header.descriptor_sha256:
            raise ProtocolError(
                "the descriptor isn't what was sealed",
                where=self.name,
                seen=seen,
                wanted=header.descriptor_sha256,
            )
        return copy

    def accept(self, sequence: int) -> SlotHeader:
        """SEALED or WRITING stays so, with the sequence its snapshot was given. Of the daemon only."""
        return self._change(lambda old: replace(old, sequence=sequence), *_HOLDING)

    def mark_writing(self, sequence: int) -> SlotHeader:
        """SEALED or WRITING → WRITING under this sequence; after a crash it is written under the same one."""
        return self._change(lambda old: replace(old, state=SlotState.WRITING, sequence=sequence), *_HOLDING)

    def release(self) -> SlotHeader:
        """Any state → FREE. What it held is given up."""
        return self._change(lambda old: replace(old, state=SlotState.FREE))

    def disown(self) -> SlotHeader:
        """Forget the owner: it has left, so no later daemon waits for it. Of the daemon only."""
        return self._change(lambda old: replace(old, owner_pid=0, owner_started=0))

    # --- the proof -------------------------------------------------------------------------------

    def prove(self, proof: Proof) -> None:
        """Record what the data hashed to. Of the daemon only; nothing happens if the slot was filled again."""
        with self._changing:
            if self.header().generation == proof.generation:
                self._all[PROOF_AT : PROOF_AT + PROOF_BYTES] = slot_proof.pack(proof)

    def proof(self) -> Proof | None:
        """What the data hashed to; None when nobody has hashed them yet."""
        return slot_proof.of(self._all, self.header())

    def check(self, data: memoryview, *, threads: int) -> None:
        """Nothing, if `data` is what was proven, or nothing was. Raises ProtocolError, also if it was cut short."""
        proof = self.proof()
        if proof is not None:
            slot_proof.check(
                proof, lambda at, count: data[at : at + count], len(data), threads=threads, where=self.name
            )
        self.refuse_cut()

    def in_place(self) -> bool:
        """Whether its file has its name still: else no later daemon finds what is in it."""
        return self._mapping.in_place(self.path)

    def refuse_cut(self) -> None:
        """Raise ProtocolError if somebody made its file shorter."""
        self._mapping.refuse_cut(self.path)

    # --- the memory ------------------------------------------------------------------------------

    def prefault(self, *, write: bool = True) -> None:
        """Touch every page, so that the first copy runs at full speed; for reading only with `write=False`.

        Changes no byte. With `write` nobody else may be writing to the data.
        """
        prefault(self._mapping, self._all, write=write, header_bytes=HEADER_BYTES)

    def close(self) -> None:
        """Unmap; memory that an array still views, with its last view. May be called twice."""
        with contextlib.suppress(BufferError):
            self.data.release()
            self._all.release()
            self._mapping.close()

    @property
    def closed(self) -> bool:
        return self._mapping.closed

    # --- inside ----------------------------------------------------------------------------------

    def _change(self, change: Callable[[SlotHeader], SlotHeader], *states: SlotState) -> SlotHeader:
        """Write the header that `change` makes of the newest one, whose state must be one of `states`."""
        with self._changing:  # the daemon's loop and its disk thread may both have something to say
            page, (counter, start, old) = self._newest()
            self._check(old, *states)
            new = change(old)
            if counter >= slot_header.MAX_NUMBER or new.generation > slot_header.MAX_NUMBER:
                raise ProtocolError(
                    "the header's counters are used up", where=self.name, todo="remove the slot"
                )
            start = COPIES[1] if start == COPIES[0] else COPIES[0]
            copy = self._write(start, counter + 1, new)
            self._read = page[:start] + copy + page[start + len(copy) :], (counter + 1, start, new)
        return new

    def _check(self, header: SlotHeader, *states: SlotState) -> None:
        if states and header.state not in states:
            seen, wanted = header.state.name.lower(), " or ".join(state.name.lower() for state in states)
            raise ProtocolError("slot in the wrong state", where=self.name, seen=seen, wanted=wanted)

    def _newest(self) -> tuple[bytes, tuple[int, int, SlotHeader]]:
        """Page 0 and what it says: counter, start and header of its newest copy."""
        # The same bytes say the same: they are read each time, and taken apart once.
        page, read = bytes(self._all[: slot_header.COPIES_END]), self._read
        if read is not None and read[0] == page:
            return read
        found = slot_header.newest(page, self._fits)
        if found is None:
            raise ProtocolError("no whole header", where=self.name, todo="the slot can't be used any more")
        self._read = read = page, found
        return read

    def _fits(self, header: SlotHeader) -> bool:
        return needed_bytes(header.data_bytes, header.descriptor_bytes) <= self.capacity

    def _write(self, start: int, counter: int, header: SlotHeader) -> bytes:
        copy = slot_header.pack(counter, header)
        self._all[start : start + len(copy)] = copy
        return copy
