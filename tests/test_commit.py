from __future__ import annotations

import errno
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from ckptd import durable
from ckptd.chunks import Chunk
from ckptd.commit import commit_plan, commit_snapshot, write_checkpoint_folder
from ckptd.durable import FsyncFailed, Written
from ckptd.errors import InvalidArgument, NoSpace, OutcomeUnknown, SaveFailed
from ckptd.lineage import Position
from ckptd.names import parse_work_folder
from ckptd.plan import plan_checkpoint
from ckptd.records import read_index
from ckptd.series import latest_valid, read_series
from ckptd.verification import check
from snapshots import RUN_ID, Writer, data_for, descriptor, sharded

CRASH_POINTS = (
    "before-temp", "after-temp", "after-file", "before-index", "after-index", "after-folder-sync",
    "after-rename", "after-run-sync",
)  # fmt: skip
VISIBLE_AFTER = ("after-rename", "after-run-sync")


@pytest.fixture
def writer(tmp_path: Path) -> Writer:
    return Writer(tmp_path / "root")


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def latest(writer: Writer) -> str | None:
    found = latest_valid(writer.root, writer.run)
    return found.name if found else None


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
    assert [f"sync {tmp_path.name}", "sync deep"] == [
        line for line in order if line in (f"sync {tmp_path.name}", "sync deep")
    ]
    assert "sync root" in order  # RUN in it
    assert "sync default" in order  # decisions in it


# --- killed at every point ------------------------------------------------------------------------

KILLED = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from snapshots import Writer, descriptor, sharded
writer = Writer(Path(sys.argv[2]))
make = {"single": descriptor, "sharded": sharded}[sys.argv[3]]
changes = {"client_id": "ef" * 16, "base_sequence": int(sys.argv[4])} if len(sys.argv) > 4 else {}
writer.commit(200, make=make, **changes)
"""


def killed_at(writer: Writer, point: str, *args: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(Path(__file__).parent), str(writer.root.path), *args],
        env=os.environ | {"CKPTD_CRASH_AT": point}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == -signal.SIGKILL, f"{point} was not reached: {done.stderr}"


@pytest.mark.parametrize("layout", ["single", "sharded"])
@pytest.mark.parametrize("point", CRASH_POINTS)
def test_killed_at_any_point_the_previous_is_intact_and_this_one_absent_or_whole(
    writer: Writer, point: str, layout: str
) -> None:
    first = writer.commit(100)
    before = {file.name: file.read_bytes() for file in first.path.iterdir()}
    killed_at(writer, point, layout)
    assert {file.name: file.read_bytes() for file in first.path.iterdir()} == before
    found = [name for name in names(writer.run_dir) if name.startswith("step-")]
    assert found == (["step-000000100", "step-000000200"] if point in VISIBLE_AFTER else ["step-000000100"])
    assert all(check(writer.run_dir / name).ok for name in found)
    assert latest(writer) == found[-1]
    others = set(names(writer.run_dir)) - set(found) - {"decisions"}
    assert all(parse_work_folder(name) for name in others)  # the next start removes these
    again = writer.commit(200)
    assert check(again.path).ok
    assert latest(writer) == again.name


@pytest.mark.parametrize("point", CRASH_POINTS)
def test_killed_while_it_forks_the_line_is_the_old_one_or_the_new_one(writer: Writer, point: str) -> None:
    for step in (100, 300, 400):
        writer.commit(step)
    killed_at(writer, point, "single", "1")
    if point not in VISIBLE_AFTER:
        assert latest(writer) == "step-000000400"
        return
    assert latest(writer) == "step-000000200"
    (writer.run_dir / "step-000000200" / "index.json").write_bytes(b"damaged")
    assert latest(writer) == "step-000000100"  # along its own line, not to an abandoned one


# --- faults ---------------------------------------------------------------------------------------


class FaultyDisk:
    """durable, with one operation that fails for its first `times` calls, or those on files named `name`."""

    def __init__(self, what: str, error: OSError, *, times: int = 10**9, name: str = "") -> None:
        self._what, self._error, self._times, self._name = what, error, times, name
        self.calls: list[str] = []

    def _do(self, what: str, path: Path, action: Callable[[], Any]) -> Any:
        self.calls.append(f"{what} {path.name}")
        if what == self._what and self._name in path.name and self._times > 0:
            self._times -= 1
            raise self._error
        return action()

    def make_dir_new(self, path: Path) -> None:
        self._do("mkdir", path, lambda: durable.make_dir_new(path))

    def write_new(self, path: Path, segments: Iterable[Chunk]) -> Written:
        written: Written = self._do("write", path, lambda: durable.write_new(path, segments))
        return written

    def fsync_dir(self, path: Path) -> None:
        self._do("sync", path, lambda: durable.fsync_dir(path))

    def rename_new(self, src: Path, dst: Path, *, sync: bool = True) -> None:
        self._do("rename", dst, lambda: durable.rename_new(src, dst, sync=sync))

    def remove_tree(self, path: Path) -> None:
        self._do("remove", path, lambda: durable.remove_tree(path))


def commit_on(writer: Writer, disk: FaultyDisk, step: int = 200, make: Any = sharded) -> Any:
    d = make(step)
    plan = plan_checkpoint(d)
    return commit_plan(writer.run_dir, d, data_for(step), writer.position(d), plan, threads=2, disk=disk)


FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
QUOTA = OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
BROKEN = OSError(errno.EIO, os.strerror(errno.EIO))


@pytest.mark.parametrize(("error", "kind"), [(FULL, NoSpace), (QUOTA, NoSpace), (BROKEN, SaveFailed)])
@pytest.mark.parametrize(
    ("what", "name"),
    [("mkdir", ""), ("write", "meta.pt"), ("write", "shard-001"), ("write", "tensors.json"),
     ("write", "index.json"), ("rename", "")],
)  # fmt: skip
def test_a_write_that_fails_anywhere_leaves_the_previous_latest_and_no_residue(
    writer: Writer, what: str, name: str, error: OSError, kind: type[Exception]
) -> None:
    writer.commit(100)
    before = names(writer.run_dir)
    with pytest.raises(kind, match="step 200"):
        commit_on(writer, FaultyDisk(what, error, name=name))
    assert names(writer.run_dir) == before
    assert latest(writer) == "step-000000100"
    commit_on(writer, FaultyDisk("nothing", error))
    assert latest(writer) == "step-000000200"


@pytest.mark.parametrize("name", ["meta.pt", "shard-000", "tensors.json", "index.json"])
def test_after_one_failed_fsync_the_whole_folder_is_written_again(writer: Writer, name: str) -> None:
    disk = FaultyDisk("write", FsyncFailed(errno.EIO, "fsync"), times=1, name=name)
    done = commit_on(writer, disk)
    assert check(done.path).ok
    temps = {call for call in disk.calls if call.startswith("mkdir")}
    assert len(temps) == 2  # another folder: a failed fsync is never tried again on the same file
    assert names(writer.run_dir) == ["decisions", "step-000000200"]


def test_a_second_failed_fsync_is_an_error(writer: Writer) -> None:
    disk = FaultyDisk("write", FsyncFailed(errno.EIO, "fsync"), times=2, name="index.json")
    with pytest.raises(SaveFailed):
        commit_on(writer, disk)
    assert names(writer.run_dir) == ["decisions"]


def test_a_full_disk_counts_more_than_a_failed_fsync_of_another_file(writer: Writer) -> None:
    class Both(FaultyDisk):
        def write_new(self, path: Path, segments: Iterable[Chunk]) -> Written:
            if "shard" in path.name:
                raise FULL
            return super().write_new(path, segments)

    disk = Both("write", FsyncFailed(errno.EIO, "fsync"), name="meta.pt")
    with pytest.raises(NoSpace):
        commit_on(writer, disk)
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


def test_what_can_not_be_removed_is_left_for_the_next_start(writer: Writer) -> None:
    class Stuck(FaultyDisk):
        def remove_tree(self, path: Path) -> None:
            raise OSError(errno.EBUSY, "busy")

    with pytest.raises(NoSpace):
        commit_on(writer, Stuck("write", FULL, name="index.json"))
    left = [name for name in names(writer.run_dir) if name != "decisions"]
    assert [parse_work_folder(name) for name in left] == [("tmp", 1)]
    assert latest(writer) is None


def test_an_interrupt_leaves_no_residue(writer: Writer) -> None:
    class Interrupted(FaultyDisk):
        def write_new(self, path: Path, segments: Iterable[Chunk]) -> Written:
            if path.name == "index.json":
                raise KeyboardInterrupt
            return super().write_new(path, segments)

    with pytest.raises(KeyboardInterrupt):
        commit_on(writer, Interrupted("nothing", FULL))
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
