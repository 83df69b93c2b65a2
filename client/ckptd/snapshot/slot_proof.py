"""The proof of a sealed slot: a hash of the tensors' bytes, so that whoever reads them later knows that they are whole.

It isn't made by the trainer, whom it would hold up by the time a whole save takes, but by the daemon soon after it has
accepted the snapshot, if that isn't written by then. It lies between the two copies of the header, for one
generation: a slot that is filled again has none.

The hash is SHA-256 over the SHA-256 of each piece in order, so that several threads can make it.
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from ckptd.errors import ProtocolError
from ckptd.limits import MIB
from ckptd.snapshot.slot_header import SlotHeader

__all__ = ["PROOF_AT", "PROOF_BYTES", "Proof", "check", "hash_of", "of", "pack", "unpack"]

_PIECE_BYTES: Final = 4 * MIB
_FIELDS: Final = struct.Struct("<8sQQ32s")  # magic, generation, data bytes, hash
_CRC: Final = struct.Struct("<I")
_MAGIC: Final = b"ckptprof"

PROOF_AT: Final = 1024  #: in page 0, behind the first copy of the header and before the second
PROOF_BYTES: Final = _FIELDS.size + _CRC.size


@dataclass(frozen=True, slots=True)
class Proof:
    """What the bytes of one generation hashed to, 64 hex digits, and how many they were."""

    generation: int
    data_bytes: int
    sha256: str


def pack(proof: Proof) -> bytes:
    raw = _FIELDS.pack(_MAGIC, proof.generation, proof.data_bytes, bytes.fromhex(proof.sha256))
    return raw + _CRC.pack(zlib.crc32(raw))


def unpack(raw: bytes) -> Proof | None:
    """None when there is none, or it isn't whole."""
    if _CRC.unpack_from(raw, _FIELDS.size)[0] != zlib.crc32(raw[: _FIELDS.size]):
        return None
    magic, generation, data_bytes, digest = _FIELDS.unpack_from(raw)
    return Proof(generation, data_bytes, digest.hex()) if magic == _MAGIC else None


def of(page: bytes | memoryview, header: SlotHeader) -> Proof | None:
    """The proof in page 0 of what `header` describes."""
    proof = unpack(bytes(page[PROOF_AT : PROOF_AT + PROOF_BYTES]))
    told = (header.generation, header.data_bytes)
    return proof if proof is not None and (proof.generation, proof.data_bytes) == told else None


def check(
    proof: Proof | None, read: Callable[[int, int], bytearray | memoryview], data_bytes: int, *,
    threads: int, where: str,
) -> None:  # fmt: skip
    """Hash all data and compare.

    Raises:
        ProtocolError: They aren't what was recorded, or nothing was.
    """
    seen = hash_of(read, data_bytes, threads=threads)
    if proof is None or seen != proof.sha256:
        raise ProtocolError(
            "the tensors' bytes in the slot aren't what was sealed", where=where, seen=seen,
            wanted="none recorded" if proof is None else proof.sha256,
        )  # fmt: skip


def hash_of(read: Callable[[int, int], bytearray | memoryview], data_bytes: int, *, threads: int = 1) -> str:
    """The hash of a slot's data, 64 hex digits.

    Args:
        read: Gives that many bytes from that offset of the data on; called by several threads at once.
        data_bytes: How many there are.
        threads: Pieces hashed at once; each takes up to 4 MiB where `read` copies.
    """

    def digest(start: int) -> bytes:
        return hashlib.sha256(read(start, min(_PIECE_BYTES, data_bytes - start))).digest()

    starts = range(0, data_bytes, _PIECE_BYTES)
    if threads == 1:
        return hashlib.sha256(b"".join(map(digest, starts))).hexdigest()
    from concurrent.futures import ThreadPoolExecutor  # a daemon, which proves with one thread, does without

    with ThreadPoolExecutor(threads, thread_name_prefix="ckptd-proof") as pool:
        return hashlib.sha256(b"".join(pool.map(digest, starts))).hexdigest()
