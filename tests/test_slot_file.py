from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from ckptd.errors import ProtocolError
from ckptd.snapshot import slot_file


def told(mode: int = stat.S_IFREG | 0o600, uid: int | None = None, size: int = 8192) -> os.stat_result:
    owner = os.geteuid() if uid is None else uid
    return os.stat_result((mode, 1, 1, 1, owner, 0, size, 0, 0, 0))


def test_a_private_regular_file_of_ours_can_be_a_slot() -> None:
    slot_file._check_file(Path("slot"), told())


@pytest.mark.parametrize(
    ("found", "seen"),
    [
        (told(stat.S_IFBLK | 0o600), "not a regular file"),
        (told(stat.S_IFDIR | 0o700), "not a regular file"),  # of many names: as large as a slot
        (told(uid=os.geteuid() + 1), "owner"),
        (told(stat.S_IFREG | 0o640), "mode 0640"),
        (told(stat.S_IFREG | 0o602), "mode 0602"),
        (told(size=4096), "4096 bytes"),
        (told(size=8193), "8193 bytes"),
    ],
)
def test_anything_else_can_not(found: os.stat_result, seen: str) -> None:
    with pytest.raises(ProtocolError, match=seen):
        slot_file._check_file(Path("slot"), found)
