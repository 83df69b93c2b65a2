"""One snapshot as it comes in over a stream: each piece is copied to its place, hashed there, and counted only then."""

from __future__ import annotations

import hashlib
from typing import Final

from ckptd.errors import ProtocolError
from ckptd.snapshot.slots import Slot, SlotHeader, streamed_bytes

__all__ = ["Incoming"]


class Incoming:
    """Of one thread at a time. A piece that is refused changes nothing: what came before it stays.

    Args:
        slot: Memory to receive in, FILLING; nobody else writes to it.
        data_bytes: Length of the tensors' bytes.
        descriptor_bytes: Length of the descriptor behind them.

    Attributes:
        total: Bytes to come in.
        have: Bytes that came in, and are what their sender has hashed.
    """

    def __init__(self, slot: Slot, data_bytes: int, descriptor_bytes: int) -> None:
        self.slot: Final = slot
        self.total: Final = streamed_bytes(data_bytes, descriptor_bytes)
        self.have = 0
        self._data_bytes, self._descriptor_bytes = data_bytes, descriptor_bytes
        self._hash = hashlib.sha256()

    def take(self, offset: int, sha256: bytes, piece: memoryview) -> SlotHeader | None:
        """Take in one piece.

        Args:
            offset: Where it begins.
            sha256: Of everything up to its end.
            piece: Its bytes.

        Returns:
            The header of the sealed slot once all is here, else None.

        Raises:
            ProtocolError: It isn't the piece that comes next, or its bytes aren't what was hashed.
        """
        if offset != self.have or not 0 < piece.nbytes <= self.total - self.have:
            raise ProtocolError(
                "not the piece that comes next", where=self.slot.name,
                seen=f"{piece.nbytes} bytes at {offset}", wanted=f"at {self.have} of {self.total}",
            )  # fmt: skip
        place = self.slot.data[offset : offset + piece.nbytes]
        place[:] = piece
        running = self._hash.copy()
        running.update(place)
        if running.digest() != sha256:
            raise ProtocolError(
                "not the bytes that were sent", where=self.slot.name, seen=running.hexdigest(),
                wanted=sha256.hex(),
            )  # fmt: skip
        self._hash = running
        self.have += piece.nbytes
        return self._seal() if self.have == self.total else None

    def _seal(self) -> SlotHeader:
        start = self.total - self._descriptor_bytes
        descriptor = bytes(self.slot.data[start : self.total])
        return self.slot.seal(descriptor, self._data_bytes)
