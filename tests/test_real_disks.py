"""Real file systems that are full, read-only or cut off in the middle of a save; scripts/torture cuts at every call."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from ckptd_places import places
from real_disk_stories import cut_at_each_change, while_short
from real_disks import ERROR, FLUSHES, disk

__all__ = ["places"]

pytestmark = [pytest.mark.slow, pytest.mark.privileged, pytest.mark.usefixtures("places")]


@pytest.mark.parametrize(("kind", "step"), [("tmpfs", 8192), ("ext4", 4096)])
def test_however_little_room_is_left_nothing_is_lost_and_the_next_save_works(
    kind: str, step: int, tmp_path: Path
) -> None:
    with disk(tmp_path / "disk", kind, "size=512k" if kind == "tmpfs" else "") as small:
        told = list(while_short(small, small.fill, step, 256 * 1024, small.empty))
    assert [(one.number, one.wrong) for one in told if one.wrong] == []
    assert any(one.met for one in told) and told[-1].met == 0


def test_however_few_names_are_left_it_is_the_same(tmp_path: Path) -> None:
    with disk(tmp_path / "disk", "tmpfs", "size=4m,nr_inodes=120") as small:
        told = list(while_short(small, small.use_up_names, 1, 100, small.empty))
    assert [(one.number, one.wrong) for one in told if one.wrong] == []
    assert sum(one.met for one in told) >= 3 and told[-1].met == 0


def test_a_quota_is_the_same(tmp_path: Path) -> None:
    with disk(tmp_path / "disk", "xfs", "prjquota") as small:
        if shutil.which("xfs_quota") is None:
            pytest.skip("there is no xfs_quota here")
        small.limit(None)
        told = list(while_short(small, small.limit, 4096, 256 * 1024, lambda: small.limit(None)))
    assert [(one.number, one.wrong) for one in told if one.wrong] == []
    assert any(one.met for one in told) and told[-1].met == 0


def test_a_disk_that_goes_read_only_by_itself_has_all_that_was_acknowledged(tmp_path: Path) -> None:
    with disk(tmp_path / "disk", "ext4", "errors=remount-ro") as small:
        told = list(cut_at_each_change(small, ERROR, first=4, every=12))
    assert [(one.number, one.wrong) for one in told if one.wrong] == []
    assert len(told) > 1 and [one.met for one in told] == [1] * (len(told) - 1) + [0]


@pytest.mark.parametrize("kind", ["ext4", "xfs"])
@pytest.mark.parametrize("flush", FLUSHES)
def test_a_real_cut_in_the_middle_of_a_save_loses_nothing_that_was_acknowledged(
    kind: str, flush: str, tmp_path: Path
) -> None:
    first = 2 + 3 * list(FLUSHES).index(flush)
    with disk(tmp_path / "disk", kind) as small:
        told = list(cut_at_each_change(small, FLUSHES[flush], first=first, every=14))
    assert [(one.number, one.wrong) for one in told if one.wrong] == []
    assert len(told) > 1 and [one.met for one in told] == [1] * (len(told) - 1) + [0]
