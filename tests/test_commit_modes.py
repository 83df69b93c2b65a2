"""Whole checkpoints in every mode of writing, on the file systems there are: the files are always the planned ones."""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import os
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ckptd.disk.commit import commit_snapshot
from ckptd.disk.verification import check
from ckptd.disk.write_mode import WriteMode
from ckptd.disk.writing import Writing
from ckptd.errors import NoSpace
from ckptd.format.plan import plan_checkpoint
from ckptd.limits import KIB, MIB, PAGE_ALIGNED_FROM_BYTES, PAGE_ALIGNMENT, SMALL_ALIGNMENT
from ckptd.snapshot.descriptor import Descriptor, Sharding, TensorSpec
from ckptd.snapshot.values import TensorRef
from faulty_disk import WAYS, in_way, latest, names
from snapshots import Writer, descriptor, spec

#: Bytes of each tensor, and how they are sharded.
LAYOUTS: dict[str, tuple[list[int], Sharding]] = {
    "no tensor": ([], Sharding()),
    "empty tensors only": ([0, 0], Sharding()),
    "tiny": ([1, 3, 64, 0, 65], Sharding()),
    "one large": ([300 * KIB], Sharding()),
    "odd sizes": ([70_001, 4097, 65_535, 65_536, 65_537, 0, 1], Sharding()),
    "two shards": ([200 * KIB, 7, 0, 100_003, 150 * KIB], Sharding(shards=2)),
    "round robin": ([200 * KIB, 7, 0, 100_003, 150 * KIB], Sharding(by="round-robin", shards=3)),
    "more shards than bytes": ([1, 0, 1], Sharding(shards=3)),
    "many small": ([1000 + n % 7 for n in range(400)], Sharding()),
}  # fmt: skip


def laid_out(layout: str, step: int = 200) -> tuple[Descriptor, memoryview]:
    """A descriptor and its data, placed as a slot holds them."""
    sizes, sharding = LAYOUTS[layout]
    rows: list[TensorSpec] = []
    at = 0
    for number, nbytes in enumerate(sizes):
        at += -at % (PAGE_ALIGNMENT if nbytes >= PAGE_ALIGNED_FROM_BYTES else SMALL_ALIGNMENT)
        rows.append(spec(("model", f"p{number}"), "uint8", 1, (nbytes,), at))
        at += nbytes
    tensors = {f"p{number}": TensorRef(number) for number in range(len(rows))}
    data = memoryview(mmap.mmap(-1, max(1, at)))
    data[:at] = hashlib.shake_128(layout.encode()).digest(at)
    state = {"model": tensors, "train": {"step": step}}
    d = descriptor(step, state=state, tensors=tuple(rows), sharding=sharding, data_bytes=at)
    return d, data


def planned(d: Descriptor, data: memoryview) -> dict[str, bytes]:
    plan = plan_checkpoint(d)
    files = {
        file.path: b"".join(
            s if isinstance(s, bytes) else bytes(data[s.offset : s.offset + s.nbytes]) for s in file.segments
        )
        for file in plan.files
    }
    return files | {"tensors.json": plan.table}


def save(writer: Writer, layout: str, writing: Writing, threads: int | None = None) -> None:
    """Commit it, and see that every file is what was planned."""
    d, data = laid_out(layout)
    done = commit_snapshot(writer.run_dir, d, data, writer.position(d), threads=threads, writing=writing)
    on_disk = {path.name: path.read_bytes() for path in done.path.iterdir()}
    assert on_disk.pop("index.json")
    assert on_disk == planned(d, data), layout
    assert check(done.path).ok


@pytest.mark.parametrize("threads", [None, 1])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_mode_writes_the_planned_files(tmp_path: Path, layout: str, threads: int | None) -> None:
    writer = Writer(tmp_path / "root")
    for way in WAYS:
        save(writer, layout, in_way(way), threads)
    assert len([name for name in names(writer.run_dir) if name.startswith("step-")]) == len(WAYS)


def test_large_files_and_small_ones_together_are_written_as_planned(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "root")
    for rate in (None, 2_000_000):
        writing = Writing(mode=WriteMode("direct"), large_from_bytes=100 * KIB)
        writing.rate.bytes_per_s = rate
        save(writer, "two shards", writing)


def test_the_mode_is_found_out_at_the_first_large_file_and_not_for_small_ones(tmp_path: Path) -> None:
    writer, writing = Writer(tmp_path / "root"), Writing(large_from_bytes=100 * KIB)
    save(writer, "tiny", writing)
    assert writing.mode.reason == "not found out yet"
    save(writer, "one large", writing)
    assert writing.mode.reason != "not found out yet"


def test_small_files_take_no_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = Writer(tmp_path / "root")
    d, data = laid_out("tiny")
    monkeypatch.setattr("threading.Thread.start", lambda _thread: pytest.fail("a thread was started"))
    assert commit_snapshot(writer.run_dir, d, data, writer.position(d)).index.step == 200


@pytest.mark.parametrize("way", WAYS)
def test_threads_descriptors_and_maps_are_flat_over_many_saves(tmp_path: Path, way: str) -> None:
    def held() -> tuple[int, int, int]:
        maps = Path("/proc/self/maps").read_text().count("\n")
        return threading.active_count(), len(os.listdir("/proc/self/fd")), maps

    writer = Writer(tmp_path / "root")
    writing = in_way(way)
    d, data = laid_out("two shards")
    position = writer.position(d)
    seen = []
    for _ in range(30):
        shutil.rmtree(commit_snapshot(writer.run_dir, d, data, position, writing=writing).path)
        seen.append(held())
    assert max(threads for threads, _, _ in seen) == seen[0][0]
    assert max(fds for _, fds, _ in seen) == seen[0][1]
    assert max(maps for *_, maps in seen[15:]) <= max(maps for *_, maps in seen[:15]) + 2


# --- other file systems ---------------------------------------------------------------------------


def run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip(f"{command[0]} doesn't work here: {done.stderr.strip()[:200]}")


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Callable[[str, int], Path]]:
    """Mounts a file system of a kind and size for the time of the test."""
    mounts: list[Path] = []

    def mount(kind: str, nbytes: int) -> Path:
        if os.geteuid() != 0:
            pytest.skip("mounting needs root")
        where = tmp_path / f"mount-{kind}"
        where.mkdir()
        if kind == "tmpfs":
            run("mount", "-t", "tmpfs", "-o", f"size={nbytes}", "tmpfs", str(where))
        else:
            if shutil.which(f"mkfs.{kind}") is None:
                pytest.skip(f"there is no mkfs.{kind} here")
            image = tmp_path / f"{kind}.img"
            with image.open("wb") as file:
                file.truncate(nbytes)
            run(f"mkfs.{kind}", "-q", str(image))
            run("mount", "-o", "loop", str(image), str(where))
        mounts.append(where)
        return where

    yield mount
    for where in mounts:
        subprocess.run(["umount", str(where)], check=True)


SIZES = {"ext4": 32 * MIB, "xfs": 400 * MIB, "btrfs": 200 * MIB, "tmpfs": 32 * MIB}


@pytest.mark.privileged
@pytest.mark.slow
@pytest.mark.parametrize("kind", SIZES)
def test_every_mode_works_or_falls_back_on_every_file_system(
    mounted: Callable[[str, int], Path], kind: str
) -> None:
    writer = Writer(mounted(kind, SIZES[kind]) / "root")
    found = WriteMode()
    found.find_out(writer.root.service_dir)
    for mode in ("direct", "early", "plain", found.now):
        writing = Writing(mode=WriteMode(mode), large_from_bytes=0)
        for layout in ("odd sizes", "two shards"):
            save(writer, layout, writing)
    assert writing.mode.now == found.now  # what was found out by a small file holds for real ones


def leave_free(disk: Path, nbytes: int) -> None:
    with (disk / "ballast").open("wb", buffering=0) as ballast:
        with contextlib.suppress(OSError):
            while ballast.write(b"x" * 16 * KIB):
                pass
        os.fsync(ballast.fileno())
        ballast.truncate(ballast.tell() - nbytes)


@pytest.mark.privileged
@pytest.mark.parametrize("kind", ["ext4", "tmpfs"])
@pytest.mark.parametrize("way", WAYS[1:])
def test_a_disk_that_fills_up_in_the_middle_of_a_file_is_said_in_every_mode(
    mounted: Callable[[str, int], Path], kind: str, way: str
) -> None:
    disk = mounted(kind, 8 * MIB)
    writer = Writer(disk / "root")
    save(writer, "tiny", in_way(way))
    leave_free(disk, 200 * KIB)
    d, data = laid_out("two shards")
    with pytest.raises(NoSpace):
        commit_snapshot(writer.run_dir, d, data, writer.position(d), writing=in_way(way))
    assert names(writer.run_dir) == ["decisions", "step-000000200"]
    assert latest(writer) == "step-000000200"
    (disk / "ballast").unlink()
    save(writer, "two shards", in_way(way))
