"""One snapshot as it goes out over a stream: which piece comes next, how far it may go, from where it goes on.

No socket, no clock and no thread here.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Final

from ckptd.errors import ProtocolError
from ckptd.limits import MAX_FRAME_BYTES
from ckptd.snapshot.slots import Slot, streamed_bytes

if TYPE_CHECKING:
    from hashlib import _Hash

__all__ = ["Outgoing", "Piece"]

Piece = tuple[int, bytes, memoryview]  #: where it begins, SHA-256 of everything up to its end, its bytes


class Outgoing:
    """A sealed slot on its way.

    Args:
        slot: It stays sealed, and nobody changes it, as long as this is used.

    Attributes:
        total: Bytes to send.
        sent: Bytes that were sent to the daemon that gave the credit.
        have: Bytes that it said it has.
    """

    def __init__(self, slot: Slot) -> None:
        header = slot.header()
        self.data_bytes: Final = header.data_bytes
        self.descriptor_bytes: Final = header.descriptor_bytes
        self.total: Final = streamed_bytes(header.data_bytes, header.descriptor_bytes)
        self.sent = self.have = 0
        self._slot, self._upto = slot, 0
        self._hash = hashlib.sha256()
        self._hashes: dict[int, _Hash] = {}  # as it was at each piece that the daemon may still lack

    def go_on(self, have: int, upto: int) -> None:
        """The daemon has said what it has: send what comes behind that, and nothing that it didn't grant.

        Raises:
            ProtocolError: It has more than there is.
        """
        self._check(have)
        known = self._hashes.get(have)
        if have != self.sent:
            self._hash = known.copy() if known is not None else self._hash_of(have)
        self.sent, self.have, self._upto = have, have, upto

    def granted(self, have: int, upto: int) -> None:
        """The daemon has taken in more, or grants more.

        Raises:
            ProtocolError: It has more than was sent.
        """
        self._check(have)
        self.have, self._upto = max(self.have, have), upto
        for start in [start for start in self._hashes if start < self.have]:
            del self._hashes[start]

    def next_piece(self) -> Piece | None:
        """What to send now; None when the daemon must be waited for. Hashing it takes its time."""
        end = min(self.sent + MAX_FRAME_BYTES, self.total)
        if self.sent == self.total or end > self._upto:
            return None
        start, piece = self.sent, self._slot.data[self.sent : end]
        self._hashes[start] = self._hash.copy()
        self._hash.update(piece)
        self.sent = end
        return start, self._hash.digest(), piece

    @property
    def next_is_last(self) -> bool:
        """Whether with the next piece the daemon may have it all."""
        return self.sent + MAX_FRAME_BYTES >= self.total

    def _check(self, have: int) -> None:
        if not 0 <= have <= self.total:
            raise ProtocolError(
                "the daemon has more than there is", seen=f"{have} bytes", wanted=f"at most {self.total}"
            )

    def _hash_of(self, length: int) -> _Hash:
        """Of the first bytes, once more: another connection, or another daemon, goes on from there."""
        running = hashlib.sha256()
        for start in range(0, length, MAX_FRAME_BYTES):
            running.update(self._slot.data[start : min(start + MAX_FRAME_BYTES, length)])
        return running
