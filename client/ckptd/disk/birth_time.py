"""When a folder was made. Its inode's number is given to another one once it is deleted; both together are not."""

from __future__ import annotations

import ctypes
import os
import struct
from pathlib import Path
from typing import Final

__all__ = ["born_ns", "place_of"]

_FROM_WORKING_FOLDER: Final = -100  # AT_FDCWD
_BIRTH: Final = 0x800  # STATX_BTIME
_STATX_BYTES: Final = 256
_BIRTH_AT: Final = 80  # of stx_btime in struct statx, the same on every machine


def place_of(folder: Path) -> dict[str, int | None]:
    """What a record says to tell this folder from any other: from a copy of it, and from one that was deleted.

    Raises:
        OSError: It isn't there.
    """
    found = folder.stat()
    return {"dev": found.st_dev, "ino": found.st_ino, "born": born_ns(folder)}


def born_ns(path: Path) -> int | None:
    """Nanoseconds since 1970 by the clock of then, to compare with nothing but itself; None where it isn't kept.

    Raises:
        OSError: It isn't there.
    """
    os.stat(path)
    call = getattr(ctypes.CDLL(None), "statx", None)
    answer = ctypes.create_string_buffer(_STATX_BYTES)
    if call is None or call(_FROM_WORKING_FOLDER, os.fsencode(path), 0, _BIRTH, answer) != 0:
        return None
    if not struct.unpack_from("=I", answer)[0] & _BIRTH:
        return None
    seconds, nanoseconds = struct.unpack_from("=qI", answer, _BIRTH_AT)
    return int(seconds) * 1_000_000_000 + int(nanoseconds)
