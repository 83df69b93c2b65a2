"""A root with two runs and a fork, which damage is done to, and what is left whole of it by a plain look at bytes."""

from __future__ import annotations

import os
import re
import shutil
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from ctypes import CDLL, Structure, byref, c_int, c_uint32
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch

import ckptd
from ckptd.disk.run_index import Mark, RunIndex, Summary, write_run_index
from ckptd.disk.series import read_series
from ckptd.disk.verification import check

RUNS: Final = ("sharded", "single")
OTHER: Final = "other"
NEWEST: Final = "step-000000003"
#: From the newest back; step-000000002 was given up for step-000000002.2.
LINE: Final = (NEWEST, "step-000000002.2", "step-000000001")
ABANDONED: Final = "step-000000002"

#: One file of each kind, by what it is called in a report.
FILES: Final = {
    "sharded": {
        "meta.pt": "meta.pt", "model shard": "model.shard-001.pt", "optimizer shard": "optimizer.shard-000.pt",
        "tensors.json": "tensors.json", "index.json": "index.json", "folder": "",
    },
    "single": {"ckpt.pt": "ckpt.pt", "tensors.json": "tensors.json", "index.json": "index.json", "folder": ""},
}  # fmt: skip
RUN_FILES: Final = {
    "run index": "index.json",
    "birth": "*-birth-*.json",
    "fork": "*-fork-*.json",
    "decisions": "decisions",
}
ROOT_FILES: Final = {name: name for name in ("daemon.json", "root.json", "ckptd.toml", "lock", "daemon.log")}


def state_of(step: int, run: str, *, again: bool = False) -> dict[str, Any]:
    """Each tensor as large as the others of its kind, so that their files can be swapped; above 64 KiB, read straight."""
    base = step * 1000 + sum(map(ord, run)) + (500 if again else 0)
    tensor = lambda kind: torch.arange(20000, dtype=torch.float32) + base + kind  # noqa: E731
    return {
        "model": {"w1": tensor(1), "w2": tensor(2)}, "optimizer": {"m1": tensor(3), "m2": tensor(4)},
        "counter": base,
    }  # fmt: skip


def make_root(root: Path) -> dict[str, dict[str, bytes]]:
    """Both runs and the other one; what was committed: name of the run and checkpoint → file → bytes."""
    for run, sharding in (("sharded", 2), (OTHER, 2), ("single", 1)):
        how = ckptd.Sharding(shards=sharding) if sharding > 1 else None
        with ckptd.Client(root, run=run, daemon="off", sharding=how) as client:
            for step in (1, 2):
                client.snapshot(step, state_of(step, run))
            client.restore(state_of(0, run), step=1)
            client.snapshot(2, state_of(2, run, again=True))
            client.snapshot(3, state_of(3, run))
    committed = {}
    for run in (*RUNS, OTHER):
        write_run_index(root / run, _whole_index(root, run))
        for folder in (root / run).glob("step-*"):
            committed[f"{run}/{folder.name}"] = {file.name: file.read_bytes() for file in folder.iterdir()}
    (root / ".ckptd" / "ckptd.toml").write_text("[policy]\nkeep_last = 1\n")
    (root / ".ckptd" / "daemon.json").write_text("{}\n")
    (root / ".ckptd" / "daemon.log").write_text("before\n")
    return committed


def _whole_index(root: Path, run: str) -> RunIndex:
    series = read_series(ckptd.disk.rootdir.Root.for_reading(root), run)  # type: ignore[attr-defined]
    known = [
        Summary(
            name=entry.name, step=entry.step, sequence=entry.index.sequence, saved_at=0.0,
            bytes=entry.index.total_bytes, metrics={}, identity=entry.identity,
        )
        for entry in series.entries if entry.index is not None
    ]  # fmt: skip
    marks = []
    for entry in series.entries:
        report = check(entry.path)
        marks.append(
            Mark(
                name=entry.name, sequence=report.sequence or 0, index_sha256=report.index_sha256,
                stat_signature=report.stat_signature,
            )
        )  # fmt: skip
    return RunIndex(
        run=run, run_id=series.run_id, highest_sequence=series.next_sequence - 1, marks=tuple(marks),
        checkpoints=tuple(known),
    )  # fmt: skip


def mark_again(root: Path, run: str) -> None:
    """After a copy, which has other inodes: everything is verified once more."""
    write_run_index(root / run, _whole_index(root, run))


@dataclass
class Scene:
    """A copy of the root, one thing in it damaged.

    Attributes:
        root: The copy.
        run: The run that was damaged.
        place: What was damaged, relative to the root.
        committed: As make_root returned it.
        origin: The run it is a copy of, if it has another name.
    """

    root: Path
    run: str
    place: str
    committed: dict[str, dict[str, bytes]] = field(repr=False)
    origin: str = ""
    _seen: dict[str, list[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.origin = self.origin or self.run

    def look(self) -> None:
        """Compare all bytes now, for readers that may not."""
        self._seen = {name: self.damaged(name) for name in LINE}
        self.is_other_runs = self._is_other_runs()
        index = self.newest / "index.json"
        before = self.committed[f"{self.run}/{NEWEST}"]["index.json"]
        regular = stat.S_ISREG(_mode(index))
        self.only_hashes_changed = regular and _without_hashes(index.read_bytes()) == _without_hashes(before)

    @property
    def newest(self) -> Path:
        return self.root / self.run / NEWEST

    def before(self, path: Path) -> Path:
        """The same file of the checkpoint before; of other files an older or empty self."""
        return self._moved(path, self.run, self.run, LINE[1])

    def of_other_run(self, path: Path) -> Path:
        return self._moved(path, self.run, OTHER, NEWEST)

    def _moved(self, path: Path, run: str, to_run: str, name: str) -> Path:
        parts = list(path.relative_to(self.root).parts)
        if to_run == run and NEWEST not in parts:
            return path.with_name("absent")
        moved = [to_run if part == run else name if part == NEWEST else part for part in parts]
        found = self.root.joinpath(*moved)
        if found.exists() or len(moved) < 2:
            return found
        twins = sorted(found.parent.glob(f"*-{found.name.split('-')[1]}-*")) if "-" in found.name else []
        return twins[0] if twins else found

    def damaged(self, name: str, files: Iterable[str] | None = None) -> list[str]:
        """Which files of a checkpoint aren't what was committed; "" for the folder itself."""
        if name in self._seen:
            return [file for file in self._seen[name] if files is None or not file or file in files]
        folder = self.root / self.run / name
        if not stat.S_ISDIR(_mode(folder)):
            return [""]
        wanted = self.committed[f"{self.run}/{name}"]
        return [file for file in (wanted if files is None else files) if not _is(folder / file, wanted[file])]

    def _is_other_runs(self) -> bool:
        """Whether the newest's index now is that of another run, which this one only lists."""
        if not (self.newest / "index.json").is_file():
            return False
        mine = _run_id(self.root / self.run / LINE[2] / "index.json")
        theirs = _run_id(self.newest / "index.json")
        return theirs != b"" and mine != theirs

    def state(self, name: str) -> dict[str, Any]:
        step = int(name.partition(".")[0][5:])
        return state_of(step, self.origin, again=name == LINE[1])


def _run_id(index: Path) -> bytes:
    lines = [line for line in index.read_bytes().splitlines() if line.startswith(b'  "run_id": "')]
    return lines[0] if len(lines) == 1 else b""


def _without_hashes(index: bytes) -> bytes:
    return re.sub(rb'sha256": "[0-9a-f]{64}"', b"", index)


def _mode(path: Path) -> int:
    try:
        return path.lstat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return 0


def _is(path: Path, content: bytes) -> bool:
    return stat.S_ISREG(_mode(path)) and path.read_bytes() == content


def copied(master: Path, to: Path, run: str) -> Path:
    """A private copy of the root, with this run and the other one, whose files nothing changes."""
    if to.exists():
        shutil.rmtree(to)
    shutil.copytree(master / ".ckptd", to / ".ckptd")
    shutil.copytree(master / run, to / run)
    shutil.copytree(master / OTHER, to / OTHER, copy_function=os.link)
    return to


class _Caps(Structure):
    _fields_ = (("effective", c_uint32), ("permitted", c_uint32), ("inheritable", c_uint32))


class _Header(Structure):
    _fields_ = (("version", c_uint32), ("pid", c_int))


_VERSION_3: Final = 0x20080522
_READS_ALL: Final = (1 << 1) | (1 << 2)  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH


@contextmanager
def bound_by_rights() -> Iterator[None]:
    """This thread, and those it starts, heed permissions even as root."""
    libc, header, held = CDLL(None, use_errno=True), _Header(_VERSION_3, 0), (_Caps * 2)()
    if libc.capget(byref(header), byref(held)) != 0:
        raise OSError("capget")
    before = held[0].effective
    held[0].effective &= ~_READS_ALL
    if libc.capset(byref(header), byref(held)) != 0:
        raise OSError("capset")
    try:
        yield
    finally:
        held[0].effective = before
        libc.capset(byref(header), byref(held))


def give_rights_back(root: Path) -> None:
    """So that the copy can be removed by anybody."""
    for folder, _, files in os.walk(root):
        for path in (Path(folder), *(Path(folder, file) for file in files)):
            if not path.is_symlink() and not path.stat().st_mode & 0o200:
                path.chmod(0o700)
