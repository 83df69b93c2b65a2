"""A slot that another process has sealed, opened to be read only.

Nothing is mapped: the file's bytes are copied by the kernel, so a file that is cut short is an error and no SIGBUS.
The daemon may free and unlink the slot meanwhile; what was open stays readable. It may also be filled again, which
`holds` finds out.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

from ckptd.errors import CkptdError, ProtocolError
from ckptd.snapshot import slot_header, slot_proof
from ckptd.snapshot.slot_file import open_slot_file
from ckptd.snapshot.slot_header import SlotHeader, SlotState
from ckptd.snapshot.slot_layout import HEADER_BYTES, needed_bytes

__all__ = ["SealedSlot", "sealed_slots"]


class SealedSlot:
    """One slot with a snapshot in it. A context manager.

    Attributes:
        path: The slot's file.
        header: Its header when it was opened: sealed or being written.
    """

    def __init__(self, path: Path) -> None:
        """Open it.

        Raises:
            ProtocolError: It isn't a private regular file of ours, its header isn't whole, or no snapshot is in it.
            OSError: It can't be opened (FileNotFoundError when it is gone).
        """
        self.path = path
        self._fd, self._capacity = open_slot_file(path, os.O_RDONLY)
        try:
            self.header = self._header(self._page())
            if self.header.state not in (SlotState.SEALED, SlotState.WRITING):
                raise ProtocolError(
                    "no snapshot in the slot", where=path.name, seen=self.header.state.name.lower()
                )
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> SealedSlot:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"SealedSlot({self.path.name}, snapshot {self.header.snapshot})"

    def close(self) -> None:
        """Let go of it. May be called twice."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def holds(self) -> bool:
        """Whether the same snapshot is still in it, or nothing since: freed is as good, for nothing is overwritten."""
        try:
            now = self._header(self._page())
        except (ProtocolError, OSError):
            return False
        told = self.header
        return (now.generation, now.client_id, now.snapshot, now.data_bytes, now.descriptor_sha256) == (
            told.generation, told.client_id, told.snapshot, told.data_bytes, told.descriptor_sha256
        )  # fmt: skip

    def is_proven(self) -> bool:
        """Whether somebody has recorded what the data hash to."""
        return slot_proof.of(self._page(), self.header) is not None

    def check(self, *, threads: int) -> None:
        """Hash all data and compare.

        Raises:
            ProtocolError: They aren't what was recorded, or nothing was.
            OSError: They can't be read.
        """
        proof = slot_proof.of(self._page(), self.header)
        slot_proof.check(proof, self.read, self.header.data_bytes, threads=threads, where=self.path.name)

    def descriptor(self) -> bytes:
        """The encoded descriptor. Raises ProtocolError unless it is what was sealed, and OSError."""
        header = self.header
        start = needed_bytes(header.data_bytes, 0) - HEADER_BYTES
        data = self.read(start, header.descriptor_bytes)
        seen = hashlib.sha256(data).hexdigest()
        if seen != header.descriptor_sha256:
            raise ProtocolError(
                "the descriptor isn't what was sealed", where=self.path.name, seen=seen,
                wanted=header.descriptor_sha256,
            )  # fmt: skip
        return bytes(data)

    def read(self, offset: int, nbytes: int) -> bytearray:
        """So many bytes behind the header, from this offset on. Raises ProtocolError when they aren't there."""
        data = bytearray(nbytes)
        self.read_into(offset, memoryview(data))
        return data

    def read_into(self, offset: int, into: memoryview) -> None:
        """The same, into memory."""
        done = 0
        while done < into.nbytes:
            count = os.preadv(self._fd, [into[done:]], HEADER_BYTES + offset + done)
            if count == 0:
                raise ProtocolError("the slot was cut short", where=self.path.name)
            done += count

    def _page(self) -> bytes:
        return os.pread(self._fd, HEADER_BYTES, 0).ljust(HEADER_BYTES, b"\0")

    def _header(self, page: bytes) -> SlotHeader:
        found = slot_header.newest(
            page, lambda header: needed_bytes(header.data_bytes, header.descriptor_bytes) <= self._capacity
        )
        if found is None:
            raise ProtocolError("no whole header", where=self.path.name)
        return found[2]


def sealed_slots(folder: Path, run: str | None = None) -> Iterator[SealedSlot]:
    """The slots in a folder that hold a snapshot (of a run), open: whoever takes one closes it.

    What can't be opened is left out. No folder holds none.
    """
    try:
        paths = sorted(folder.iterdir())
    except OSError:
        return
    for path in paths:
        try:
            slot = SealedSlot(path)
        except (OSError, CkptdError):
            continue
        if run is None or slot.header.run == run:
            yield slot
        else:
            slot.close()
