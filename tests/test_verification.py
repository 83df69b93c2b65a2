from __future__ import annotations

import hashlib
import json
import os
import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from ckptd.disk.verification import check, stat_signature, verify
from ckptd.errors import CheckpointGone, CorruptCheckpoint, UnknownSchema
from snapshots import Writer, descriptor, sharded


@pytest.fixture(params=[descriptor, sharded], ids=["single", "sharded"])
def checkpoint(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    return Writer(tmp_path / "root").commit(1200, make=request.param).path


def flip_last(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def faults(path: Path) -> tuple[str, ...]:
    report = check(path)
    assert not report.ok
    assert not report.gone
    assert report.faults
    with pytest.raises(CorruptCheckpoint):
        verify(path)
    return report.faults


@pytest.mark.parametrize("uncached", [True, False])
def test_a_checkpoint_as_it_was_committed_is_valid(checkpoint: Path, uncached: bool) -> None:
    told: list[int] = []
    report = check(checkpoint, uncached=uncached, progress=told.append)
    assert (report.ok, report.faults, report.gone, report.sequence) == (True, (), False, 1)
    files = sum(file.stat().st_size for file in checkpoint.iterdir() if file.name != "index.json")
    assert report.bytes == files == sum(told)
    assert verify(checkpoint).ok


@pytest.mark.slow
def test_every_flipped_byte_of_every_file_is_found(checkpoint: Path) -> None:
    flipped = 0
    for file in sorted(checkpoint.iterdir()):
        good = file.read_bytes()
        fd = os.open(file, os.O_WRONLY)
        for at in range(len(good)):
            os.pwrite(fd, bytes([good[at] ^ (1 << at % 8)]), at)
            assert not check(checkpoint).ok, f"byte {at} of {file.name}"
            os.pwrite(fd, good[at : at + 1], at)
            flipped += 1
        os.close(fd)
    assert flipped > 2000
    assert check(checkpoint).ok


@pytest.mark.parametrize("damage", ["empty", "short", "long", "missing", "zeroed", "link", "folder"])
def test_every_damage_to_every_file_is_found_by_name(checkpoint: Path, damage: str) -> None:
    for file in sorted(checkpoint.iterdir()):
        good = file.read_bytes()
        file.unlink()
        if damage == "link":
            (checkpoint.parent / "elsewhere").write_bytes(good)
            file.symlink_to(checkpoint.parent / "elsewhere")
        elif damage == "folder":
            file.mkdir()
        elif damage != "missing":
            wrong = {"empty": b"", "short": good[:-1], "long": good + b"\0", "zeroed": b"\0" * len(good)}[
                damage
            ]
            file.write_bytes(wrong)
        assert any(fault.startswith(file.name) for fault in faults(checkpoint)), file.name
        shutil.rmtree(file) if file.is_dir() and not file.is_symlink() else file.unlink(missing_ok=True)
        file.write_bytes(good)
    assert check(checkpoint).ok


def test_every_fault_is_said_not_only_the_first(tmp_path: Path) -> None:
    path = Writer(tmp_path / "root").commit(1, make=sharded).path
    (path / "meta.pt").unlink()
    (path / "model.shard-000.pt").write_bytes(b"short")
    flip_last(path / "model.shard-001.pt")
    found = faults(path)
    assert [fault.split(":")[0] for fault in sorted(found)] == [
        "meta.pt",
        "model.shard-000.pt",
        "model.shard-001.pt",
    ]


def test_a_wrong_hash_is_told_with_both_hashes(checkpoint: Path) -> None:
    file = next(file for file in checkpoint.iterdir() if file.suffix == ".pt")
    data = bytearray(file.read_bytes())
    data[100] ^= 1
    file.write_bytes(data)
    with pytest.raises(CorruptCheckpoint) as caught:
        verify(checkpoint)
    assert caught.value.where == str(file)
    assert len(caught.value.seen) == len(caught.value.wanted) == 64
    assert caught.value.seen != caught.value.wanted


def test_files_of_two_checkpoints_swapped_are_found(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "root")
    one, two = writer.commit(1).path, writer.commit(2).path
    (one / "ckpt.pt").rename(tmp_path / "x")
    (two / "ckpt.pt").rename(one / "ckpt.pt")
    (tmp_path / "x").rename(two / "ckpt.pt")
    for path in (one, two):
        assert "ckpt.pt" in faults(path)[0]


def test_a_checkpoint_under_another_steps_name_is_not_valid(checkpoint: Path) -> None:
    other = checkpoint.rename(checkpoint.with_name("step-000001201"))
    assert "another step" in faults(other)[0]
    assert check(other.rename(other.with_name("step-000001200.7"))).ok


def test_a_folder_that_is_not_there_is_gone_not_corrupt(tmp_path: Path) -> None:
    report = check(tmp_path / "step-000000001")
    assert (report.gone, report.ok, report.faults) == (True, False, ())
    with pytest.raises(CheckpointGone):
        verify(tmp_path / "step-000000001")


@pytest.mark.parametrize("moment", ["index", "hash"])
def test_a_folder_that_vanishes_while_it_is_read_is_gone_not_corrupt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    path = Writer(tmp_path / "root").commit(1, make=sharded).path
    from ckptd.disk import verification

    def vanish() -> None:
        if path.exists():
            trash = path.rename(path.with_name(".trash-1-" + "0" * 32))
            shutil.rmtree(trash)

    if moment == "index":
        real: Any = verification.read_index

        def after_index(*args: Any, **more: Any) -> Any:
            index = real(*args, **more)
            vanish()
            return index

        monkeypatch.setattr(verification, "read_index", after_index)
        assert check(path).gone
    else:  # all files are open by then: the bytes are still there, and are right
        report = check(path, progress=lambda _count: vanish())
        assert report.ok or report.gone
        assert report.faults == ()


def test_a_rename_in_mid_hash_is_no_fault(checkpoint: Path) -> None:
    moved = checkpoint.with_name(".trash-1-" + "0" * 32)
    report = check(checkpoint, progress=lambda _count: checkpoint.exists() and checkpoint.rename(moved))  # type: ignore[arg-type,func-returns-value]
    assert report.faults == ()


@pytest.mark.parametrize("kind", ["file", "link"])
def test_what_is_no_folder_is_said(checkpoint: Path, kind: str) -> None:
    path = checkpoint.with_name("step-000000007")
    path.write_text("") if kind == "file" else path.symlink_to(checkpoint)
    assert "not a folder" in faults(path)[0]


def test_format_v1_is_unhashed_and_never_valid(tmp_path: Path) -> None:
    path = tmp_path / "step-000000001"
    path.mkdir()
    files = {"meta.pt": b"meta", "model.shard-000.pt": b"zero", "model.shard-001.pt": b"one"}
    for name, data in files.items():
        (path / name).write_bytes(data)
    shards = [
        {
            "shard": 0,
            "path": "model.shard-000.pt",
            "num_params": 1,
            "sha256": hashlib.sha256(b"zero").hexdigest(),
        },
        {"shard": 1, "path": "model.shard-001.pt", "num_params": 1},
    ]
    index = {"schema": "ckpt.v1-index", "num_shards": 2, "shards": shards, "saved_at": 1.5, "step": 1}
    (path / "index.json").write_text(json.dumps(index))
    assert [fault.split(";")[0] for fault in faults(path)] == [
        "index.json: unhashed: format v1 has no hash of its index",
        "meta.pt: unhashed", "model.shard-001.pt: unhashed",
    ]  # fmt: skip
    flip_last(path / "model.shard-000.pt")
    assert any(fault.startswith("model.shard-000.pt: wrong sha256") for fault in faults(path))
    for outside in ("../secret.pt", "/etc/passwd", None):
        shards[0]["path"] = outside
        (path / "index.json").write_text(json.dumps(index))
        assert any("not a shard's file name" in fault for fault in faults(path))


def test_an_unknown_schema_is_named(tmp_path: Path) -> None:
    path = tmp_path / "step-000000001"
    path.mkdir()
    (path / "index.json").write_text('{"schema": "ckpt.v7-index"}')
    with pytest.raises(UnknownSchema, match=r"ckpt\.v7-index"):
        verify(path)


@contextmanager
def only_so_many_descriptors(count: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(name) for name in os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 10, before[1]))
    held = [os.open("/dev/null", os.O_RDONLY)]
    try:
        with suppress(OSError):
            while True:
                held.append(os.dup(held[0]))
        for fd in [held.pop() for _ in range(count)]:
            os.close(fd)
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        for fd in held:
            os.close(fd)


def test_more_files_than_descriptors_are_checked_all_the_same(tmp_path: Path) -> None:
    path = Writer(tmp_path / "root").commit(1, make=sharded).path
    with only_so_many_descriptors(3):  # one for the folder, two for its four files
        report = check(path)
    assert report.ok
    flip_last(path / "tensors.json")
    with only_so_many_descriptors(3):
        assert not check(path).ok


def test_no_descriptors_at_all_is_an_error_not_a_verdict(tmp_path: Path) -> None:
    path = Writer(tmp_path / "root").commit(1).path
    for count in (0, 1):
        with only_so_many_descriptors(count), pytest.raises(OSError):
            check(path)


def test_the_fingerprint_changes_when_a_file_does(checkpoint: Path) -> None:
    first = stat_signature(checkpoint)
    assert first == stat_signature(checkpoint) == check(checkpoint).stat_signature
    file = checkpoint / "tensors.json"
    data = file.read_bytes()
    file.write_bytes(data)
    os.utime(file, ns=(0, 0))  # the change time can't be set back
    assert stat_signature(checkpoint) != first
    assert stat_signature(checkpoint.with_name("none")) == ""


def test_a_check_of_the_medium_reads_the_index_from_there_too(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dropped: list[str] = []
    monkeypatch.setattr(
        os, "posix_fadvise", lambda fd, *_more: dropped.append(Path(os.readlink(f"/proc/self/fd/{fd}")).name)
    )
    assert check(checkpoint).ok and dropped == []
    assert check(checkpoint, uncached=True).ok and dropped[0] == "index.json"
