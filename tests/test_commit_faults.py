from __future__ import annotations

import errno
import mmap
import os
import subprocess
from collections.abc import Generator, Iterable
from pathlib import Path
from typing import Any

import pytest

from ckptd.disk import durable, new_file, own_leftovers
from ckptd.disk.chunks import Chunk
from ckptd.disk.commit import commit_plan
from ckptd.disk.durable import FsyncFailed
from ckptd.disk.new_file import Steps, Written
from ckptd.disk.verification import check
from ckptd.disk.writing import Writing
from ckptd.errors import NoSpace, OutcomeUnknown, SaveFailed
from ckptd.format.plan import plan_checkpoint
from ckptd.names import parse_work_folder, work_folder
from faulty_disk import BROKEN, FULL, QUOTA, WAYS, FaultyDisk, commit_on, in_way, latest, names
from snapshots import Writer, descriptor, sharded


@pytest.fixture
def writer(tmp_path: Path) -> Writer:
    return Writer(tmp_path / "root")


# --- faults handed in ---


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("error", "kind"), [(FULL, NoSpace), (QUOTA, NoSpace), (BROKEN, SaveFailed)])
@pytest.mark.parametrize(
    ("what", "name"),
    [("mkdir", ""), ("write", "meta.pt"), ("write", "shard-001"), ("write", "tensors.json"),
     ("write", "index.json"), ("rename", "")],
)  # fmt: skip
def test_a_write_that_fails_anywhere_leaves_the_previous_latest_and_no_residue(
    writer: Writer, what: str, name: str, error: OSError, kind: type[Exception], way: str
) -> None:
    writer.commit(100)
    before = names(writer.run_dir)
    with pytest.raises(kind, match="step 200"):
        commit_on(writer, FaultyDisk(what, error, name=name), writing=in_way(way))
    assert names(writer.run_dir) == before
    assert latest(writer) == "step-000000100"
    commit_on(writer, FaultyDisk("nothing", error), writing=in_way(way))
    assert latest(writer) == "step-000000200"


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["meta.pt", "shard-000", "tensors.json", "index.json"])
def test_after_one_failed_fsync_the_whole_folder_is_written_again(
    writer: Writer, name: str, way: str
) -> None:
    disk = FaultyDisk("write", FsyncFailed(errno.EIO, "fsync"), times=1, name=name)
    done = commit_on(writer, disk, writing=in_way(way))
    assert check(done.path).ok
    temps = {call for call in disk.calls if call.startswith("mkdir")}
    assert len(temps) == 2  # another folder: a failed fsync is never tried again on the same file
    assert names(writer.run_dir) == ["decisions", "step-000000200"]


@pytest.mark.parametrize(("number", "folders"), [(errno.EIO, 2), (errno.ENOSYS, 1)])
def test_a_file_that_can_not_be_sent_off_is_written_again_unless_there_is_no_such_thing(
    writer: Writer, monkeypatch: pytest.MonkeyPatch, number: int, folders: int
) -> None:
    real, refusals = new_file.start_writing, [OSError(number, os.strerror(number))]

    def start_writing(fd: int, offset: int, nbytes: int) -> None:
        if refusals:
            raise refusals.pop()
        real(fd, offset, nbytes)

    monkeypatch.setattr(new_file, "start_writing", start_writing)
    disk = FaultyDisk("nothing", FULL)
    assert check(commit_on(writer, disk, make=descriptor).path).ok
    assert sum(call.startswith("mkdir") for call in disk.calls) == folders


def test_a_second_failed_fsync_is_an_error(writer: Writer) -> None:
    disk = FaultyDisk("write", FsyncFailed(errno.EIO, "fsync"), times=2, name="index.json")
    with pytest.raises(SaveFailed):
        commit_on(writer, disk)
    assert names(writer.run_dir) == ["decisions"]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("first", ["meta.pt", "shard"])
def test_a_full_disk_counts_more_than_a_failed_fsync_of_another_file(
    writer: Writer, way: str, first: str
) -> None:
    class Both(FaultyDisk):
        def _do(self, what: str, path: Path, action: Any) -> Any:
            if what == "write" and first not in path.name:
                raise FULL
            return super()._do(what, path, action)

    disk = Both("write", FsyncFailed(errno.EIO, "fsync"), name=first)
    with pytest.raises(NoSpace):
        commit_on(writer, disk, writing=in_way(way))
    assert len([call for call in disk.calls if call.startswith("mkdir")]) == 1


def test_a_plain_write_error_is_not_tried_again(writer: Writer) -> None:
    disk = FaultyDisk("write", BROKEN, name="meta.pt")
    with pytest.raises(SaveFailed):
        commit_on(writer, disk)
    assert len([call for call in disk.calls if call.startswith("mkdir")]) == 1


def test_a_failed_sync_of_the_temporary_folder_is_written_again(writer: Writer) -> None:
    done = commit_on(writer, FaultyDisk("sync", FsyncFailed(errno.EIO, "fsync"), times=1, name=".tmp-"))
    assert check(done.path).ok


def test_when_the_name_can_not_be_made_durable_it_is_written_again(writer: Writer) -> None:
    disk = FaultyDisk("sync", FsyncFailed(errno.EIO, "fsync"), times=1, name="default")
    done = commit_on(writer, disk)
    assert done.name == "step-000000200"
    assert check(done.path).ok
    assert any(call.startswith("rename .trash-") for call in disk.calls)
    assert names(writer.run_dir) == ["decisions", "step-000000200"]


def test_when_that_fails_twice_the_answer_is_unknown_and_nothing_is_there(writer: Writer) -> None:
    writer.commit(100)
    with pytest.raises(OutcomeUnknown):
        commit_on(writer, FaultyDisk("sync", FsyncFailed(errno.EIO, "fsync"), name="default"))
    assert names(writer.run_dir) == ["decisions", "step-000000100"]
    assert latest(writer) == "step-000000100"


def test_any_failure_after_a_name_that_was_not_durable_is_unknown(writer: Writer) -> None:
    class Both(FaultyDisk):
        def write_new(self, path: Path, segments: Iterable[Chunk]) -> Written:
            if "sync default" in self.calls:
                raise FULL
            return super().write_new(path, segments)

    with pytest.raises(OutcomeUnknown):
        commit_on(writer, Both("sync", FsyncFailed(errno.EIO, "fsync"), name="default"))


class Stuck(FaultyDisk):
    def remove_tree(self, path: Path) -> None:
        raise OSError(errno.EBUSY, "busy")


def test_what_can_not_be_removed_is_removed_by_the_next_commit(writer: Writer) -> None:
    foreign = writer.run_dir / work_folder("tmp", 7)
    foreign.mkdir(parents=True)
    with pytest.raises(NoSpace):
        commit_on(writer, Stuck("write", FULL, name="index.json"))
    left = {name for name in names(writer.run_dir) if name != "decisions"} - {foreign.name}
    assert [parse_work_folder(name) for name in left] == [("tmp", 8)]
    assert latest(writer) is None
    with pytest.raises(NoSpace):
        commit_on(writer, FaultyDisk("mkdir", FULL))
    assert left.isdisjoint(names(writer.run_dir)) and foreign.exists()


def test_what_can_not_be_removed_twice_is_tried_again(
    writer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(NoSpace):
        commit_on(writer, Stuck("write", FULL, name="index.json"))
    with monkeypatch.context() as stuck:
        stuck.setattr(durable, "remove_tree", Stuck("", FULL).remove_tree)
        own_leftovers.remove(writer.run_dir)
    assert own_leftovers.any_left(writer.run_dir)
    assert not own_leftovers.any_left(writer.run_dir / "elsewhere")
    own_leftovers.remove(writer.run_dir)
    assert not own_leftovers.any_left(writer.run_dir)
    assert [name for name in names(writer.run_dir) if name != "decisions"] == []


def _half(segments: Iterable[Chunk]) -> Iterable[Chunk]:
    for piece in segments:
        yield piece
        if isinstance(piece, memoryview):
            raise FULL


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("make", [descriptor, sharded])
def test_an_error_that_is_kept_does_not_keep_the_snapshots_memory(
    writer: Writer, make: Any, way: str
) -> None:
    class HalfWay(FaultyDisk):
        def write_new(self, path: Path, segments: Iterable[Chunk]) -> Written:
            return super().write_new(path, _half(segments))

        def write_begun(self, path: Path, segments: Iterable[Chunk]) -> Generator[Written, None, None]:
            return super().write_begun(path, _half(segments))

        def write_large(self, path: Path, segments: Iterable[Chunk], writing: Writing) -> Steps:
            return super().write_large(path, _half(segments), writing)

    buffer = mmap.mmap(-1, 512)
    d = make(1)
    data = memoryview(buffer)
    kept = None
    try:
        commit_plan(
            writer.run_dir, d, data, writer.position(d), plan_checkpoint(d), writing=in_way(way),
            disk=HalfWay("nothing", FULL),
        )  # fmt: skip
    except NoSpace as error:
        kept = error
    assert kept is not None
    data.release()
    buffer.close()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["meta.pt", "index.json"])
def test_an_interrupt_leaves_no_residue(writer: Writer, name: str, way: str) -> None:
    class Interrupted(FaultyDisk):
        def _do(self, what: str, path: Path, action: Any) -> Any:
            if path.name == name:
                raise KeyboardInterrupt
            return super()._do(what, path, action)

    with pytest.raises(KeyboardInterrupt):
        commit_on(writer, Interrupted("nothing", FULL), writing=in_way(way))
    assert names(writer.run_dir) == ["decisions"]


def test_no_threads_left_is_a_typed_error(writer: Writer) -> None:
    class NoThreads(FaultyDisk):
        def write_new(self, path: Path, segments: Iterable[Chunk]) -> Written:
            raise RuntimeError("can't start new thread")

    with pytest.raises(SaveFailed, match="can't start new thread"):
        commit_on(writer, NoThreads("nothing", FULL))
    assert names(writer.run_dir) == ["decisions"]


def test_an_index_that_a_reader_would_refuse_is_never_committed(writer: Writer) -> None:
    for wrong in (
        {"saved_at": float("nan")},
        {"client_id": "short"},
        {"metrics": {f"m{n}": 0.0 for n in range(1001)}},
    ):
        with pytest.raises(SaveFailed):
            writer.commit(1, **wrong)
    assert names(writer.run_dir) == ["decisions"]


# --- real full and read-only disks ----------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    mount = tmp_path / "small"
    mount.mkdir()
    if os.geteuid() != 0:
        pytest.skip("mounting a small tmpfs needs root")
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(mount)], capture_output=True
    )
    if done.returncode != 0:
        pytest.skip(f"no mounting here: {done.stderr.decode().strip()}")
    request.addfinalizer(lambda: subprocess.run(["umount", str(mount)], check=True))
    return mount


@pytest.mark.privileged
def test_a_full_disk_is_said_and_saving_works_again_once_there_is_space(small_disk: Path) -> None:
    writer = Writer(small_disk / "root")
    writer.commit(1)
    ballast = os.open(small_disk / "ballast", os.O_WRONLY | os.O_CREAT)
    with pytest.raises(OSError):
        while True:
            os.write(ballast, b"x" * 1024)
    os.close(ballast)
    with pytest.raises(NoSpace):
        writer.commit(2)
    assert names(writer.run_dir) == ["decisions", "step-000000001"]
    assert latest(writer) == "step-000000001"
    (small_disk / "ballast").unlink()
    writer.commit(2)
    assert latest(writer) == "step-000000002"


@pytest.mark.privileged
def test_a_read_only_disk_is_said_and_saving_works_again_once_it_is_not(small_disk: Path) -> None:
    writer = Writer(small_disk / "root")
    writer.commit(1)
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(SaveFailed, match=r"[Rr]ead-only"):
        writer.commit(2)
    assert latest(writer) == "step-000000001"
    subprocess.run(["mount", "-o", "remount,rw", str(small_disk)], check=True)
    assert names(writer.run_dir) == ["decisions", "step-000000001"]
    writer.commit(2)
    assert latest(writer) == "step-000000002"
