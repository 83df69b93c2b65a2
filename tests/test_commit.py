from __future__ import annotations

import errno
import os
import stat
from collections.abc import Generator, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ckptd.disk.chunks import Chunk
from ckptd.disk.commit import commit_plan, commit_snapshot, write_checkpoint_folder
from ckptd.disk.lineage import Position
from ckptd.disk.new_file import Written
from ckptd.disk.series import read_series
from ckptd.disk.verification import check
from ckptd.errors import InvalidArgument, ProtocolError, SaveFailed
from ckptd.format.plan import plan_checkpoint
from ckptd.format.records import read_index
from ckptd.names import parse_work_folder
from faulty_disk import FULL, FaultyDisk, commit_on, latest, names
from snapshots import RUN_ID, Writer, data_for, descriptor, sharded


@pytest.fixture
def writer(tmp_path: Path) -> Writer:
    return Writer(tmp_path / "root")


# --- the normal way -------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [descriptor, sharded])
def test_a_committed_snapshot_is_complete_and_valid(writer: Writer, make: Any) -> None:
    done = writer.commit(1200, make=make, metrics={"loss": float("nan")})
    assert done.path == writer.run_dir / "step-000001200"
    assert check(done.path).ok
    assert read_index(done.path).step == 1200
    assert done.bytes == sum(file.stat().st_size for file in done.path.iterdir() if file.name != "index.json")
    assert (done.index.sequence, done.index.parent, done.index.run_id) == (1, None, RUN_ID)
    assert names(writer.run_dir) == ["decisions", "step-000001200"]


def test_the_files_hold_the_planned_bytes(writer: Writer) -> None:
    d = sharded(7)
    done = commit_snapshot(writer.run_dir, d, data_for(7), writer.position(d), threads=2)
    for file in plan_checkpoint(d).files:
        wanted = b"".join(
            bytes(s) if isinstance(s, bytes) else bytes(data_for(7)[s.offset : s.offset + s.nbytes])
            for s in file.segments
        )
        assert (done.path / file.path).read_bytes() == wanted


def test_what_the_last_look_at_the_bytes_refuses_leaves_nothing_and_comes_after_all_of_them(
    writer: Writer,
) -> None:
    d, seen = sharded(7), list[str]()

    def refuses() -> None:
        (temp,) = [path for path in writer.run_dir.iterdir() if parse_work_folder(path.name)]
        seen.extend(sorted(path.name for path in temp.iterdir()))
        raise ProtocolError("damaged")

    before = names(writer.run_dir)
    with pytest.raises(ProtocolError, match="damaged"):
        commit_snapshot(writer.run_dir, d, data_for(7), writer.position(d), check=refuses)
    assert seen == sorted([*(file.path for file in plan_checkpoint(d).files), "tensors.json"])
    assert names(writer.run_dir) == before


def test_an_index_that_no_reader_would_take_is_not_committed_and_leaves_nothing(writer: Writer) -> None:
    d, before = descriptor(7), names(writer.run_dir)
    ends_elsewhere = replace(writer.position(d), lineage=((5, 9),))
    with pytest.raises(SaveFailed, match="its index would be refused"):
        commit_snapshot(writer.run_dir, d, data_for(7), ends_elsewhere)
    assert names(writer.run_dir) == before


def test_the_same_step_again_is_a_new_folder_and_the_newer_one_wins(writer: Writer) -> None:
    first = writer.commit(5)
    before = {file.name: file.read_bytes() for file in first.path.iterdir()}
    second = writer.commit(5, metrics={"loss": 9.0})
    third = writer.commit(5)
    assert [done.name for done in (first, second, third)] == [
        "step-000000005",
        "step-000000005.2",
        "step-000000005.3",
    ]
    assert {file.name: file.read_bytes() for file in first.path.iterdir()} == before
    assert all(check(done.path).ok for done in (first, second, third))
    assert latest(writer) == "step-000000005.3"


@pytest.mark.parametrize("kind", ["file", "folder", "full folder", "link"])
def test_whatever_holds_the_name_is_left_alone(writer: Writer, kind: str) -> None:
    taken = writer.run_dir / "step-000000005"
    if kind == "file":
        taken.write_text("mine")
    elif kind == "link":
        taken.symlink_to("/nowhere")
    else:
        taken.mkdir()
        if kind == "full folder":
            (taken / "mine").write_text("x")
    before = taken.lstat().st_ino
    assert writer.commit(5).name == "step-000000005.2"
    assert taken.lstat().st_ino == before


@pytest.mark.parametrize("kind", ["file", "folder", "link"])
def test_leftovers_of_every_temporary_name_do_not_disturb(writer: Writer, kind: str) -> None:
    for folder in (writer.run_dir, writer.run_dir / "decisions"):
        for name in (".tmp-1-" + "0" * 32, ".trash-1-" + "0" * 32, ".tmp-x", ".tmp"):
            path = folder / name
            if kind == "file":
                path.write_text("x")
            elif kind == "folder":
                path.mkdir()
            else:
                path.symlink_to("/nowhere")
    done = writer.commit(5)
    assert done.index.sequence == 2  # more than the leftovers claim
    assert latest(writer) == done.name


@pytest.mark.parametrize(("mask", "file_mode", "dir_mode"), [(0o022, 0o644, 0o755), (0o027, 0o640, 0o750)])
def test_modes_come_from_the_umask(writer: Writer, mask: int, file_mode: int, dir_mode: int) -> None:
    before = os.umask(mask)
    try:
        done = writer.commit(1, make=sharded)
    finally:
        os.umask(before)
    assert stat.S_IMODE(done.path.stat().st_mode) == dir_mode
    assert {stat.S_IMODE(file.stat().st_mode) for file in done.path.iterdir()} == {file_mode}


def test_tmpdir_on_another_file_system_plays_no_part(writer: Writer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", "/dev/shm")
    assert check(writer.commit(1).path).ok


def test_a_fork_is_on_disk_before_its_checkpoint(writer: Writer) -> None:
    for step in (1, 2, 3):
        writer.commit(step)
    d = descriptor(4, client_id="ef" * 16, base_sequence=1)
    disk = FaultyDisk("rename", OSError(errno.EIO, "Input/output error"), times=1)
    with pytest.raises(SaveFailed):
        commit_plan(writer.run_dir, d, data_for(4), writer.position(d), plan_checkpoint(d), disk=disk)
    assert [(fork.sequence, fork.parent) for fork in read_series(writer.root, "default").decisions.forks] == [
        (4, 1)
    ]
    assert latest(writer) == "step-000000003"  # recorded only: it changes nothing


@pytest.fixture
def order(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every sync and rename as it happens: "sync NAME" and "rename OLD NEW", temporary names as TMP."""
    seen: list[str] = []
    real_fsync, real_rename = os.fsync, os.rename

    def short(path: str | os.PathLike[str]) -> str:
        return "TMP" if parse_work_folder(Path(path).name) else Path(path).name

    def fsync(fd: int) -> None:
        seen.append(f"sync {short(os.readlink(f'/proc/self/fd/{fd}'))}")
        real_fsync(fd)

    def rename(old: Path, new: Path) -> None:
        seen.append(f"rename {short(old)} {short(new)}")
        real_rename(old, new)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "rename", rename)
    return seen


def test_everything_is_synced_in_the_order_of_the_design(writer: Writer, order: list[str]) -> None:
    del order[:]
    done = commit_on(writer, FaultyDisk("nothing", FULL))
    files = {file.name for file in done.path.iterdir()}
    assert {line.removeprefix("sync ") for line in order[: len(files) - 2]} == files - {
        "tensors.json",
        "index.json",
    }
    assert order[len(files) - 2 :] == [
        "sync tensors.json", "sync index.json", "sync TMP", "rename TMP step-000000200", "sync default",
    ]  # fmt: skip


def test_a_small_checkpoint_is_written_whole_and_then_synced_in_that_order(
    writer: Writer, order: list[str]
) -> None:
    class Noting(FaultyDisk):
        def write_begun(self, path: Path, segments: Iterable[Chunk]) -> Generator[Written, None, None]:
            order.append(f"write {path.name}")
            return super().write_begun(path, segments)

    del order[:]
    commit_on(writer, Noting("nothing", FULL), make=descriptor)
    files = ("ckpt.pt", "tensors.json", "index.json")
    assert order == [
        *(f"write {name}" for name in files), *(f"sync {name}" for name in files),
        "sync TMP", "rename TMP step-000000200", "sync default",
    ]  # fmt: skip


def test_a_fork_is_durable_before_anything_of_its_checkpoint_is_written(
    writer: Writer, order: list[str]
) -> None:
    for step in (1, 2):
        writer.commit(step)
    del order[:]
    writer.commit(3, client_id="ef" * 16, base_sequence=1)
    fork = next(line for line in order if "-fork-" in line)
    at = order.index(fork)
    assert order[at - 1 : at + 2] == ["sync TMP", fork, "sync decisions"]
    assert order[at + 2] == "sync ckpt.pt"


def test_on_a_fresh_root_every_new_folder_is_made_durable_in_its_parent(
    tmp_path: Path, order: list[str]
) -> None:
    Writer(tmp_path / "deep" / "root")
    wanted = {
        f"sync {tmp_path.name}": "deep in it", "sync deep": "root in it", "sync root": "RUN in it",
        "sync default": "decisions in it",
    }  # fmt: skip
    assert wanted.keys() <= set(order)


# --- a folder of its own --------------------------------------------------------------------------


def test_a_checkpoint_can_stand_alone(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "er" / "mine"
    index = write_checkpoint_folder(path, descriptor(3), data_for(3))
    assert check(path).ok
    assert index.lineage == ((1, 1),)
    assert names(path.parent) == ["mine"]


def test_a_stand_alone_folder_that_exists_is_refused_untouched(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    with pytest.raises(InvalidArgument):
        write_checkpoint_folder(tmp_path / "mine", descriptor(3), data_for(3), Position.alone(RUN_ID))
    assert names(tmp_path) == ["mine"]
