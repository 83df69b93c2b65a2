"""How much one benchmark measures, and where."""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

_MEMORY: Final = ("tmpfs", "ramfs", "zram")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What is measured how often. Every round measures every contestant once, so that a ratio has a pair.

    Attributes:
        mib: Size of the state that is saved and restored.
        rounds: Of saves, and of restores.
        warmups: Rounds before them whose numbers are thrown away, for everybody.
        tail_mib, tail_count: State and number of snapshots taken while the daemon writes.
        trainers, slots: Fresh trainer processes for each number of slots, for the first snapshot and the memory.
        training_rounds: Blocks of steps beside a save.
        tiny_rounds: Saves of a state of a few KiB.
        tensors: Numbers of tensors.
        tensor_rounds: Rounds of them.
        checkpoints: Numbers of checkpoints in a root.
        checkpoint_rounds: Rounds of them.
    """

    mib: int
    rounds: int
    warmups: int
    tail_mib: int
    tail_count: int
    trainers: int
    slots: tuple[int, ...]
    training_rounds: int
    tiny_rounds: int
    tensors: tuple[int, ...]
    tensor_rounds: int
    checkpoints: tuple[int, ...]
    checkpoint_rounds: int

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


FULL: Final = Settings(
    mib=300, rounds=15, warmups=2, tail_mib=64, tail_count=200, trainers=5, slots=(2, 1), training_rounds=12,
    tiny_rounds=100, tensors=(1, 10, 100, 1_000, 10_000, 100_000), tensor_rounds=5,
    checkpoints=(1, 10, 100, 1_000, 10_000), checkpoint_rounds=7,
)  # fmt: skip
QUICK: Final = Settings(
    mib=100, rounds=5, warmups=1, tail_mib=24, tail_count=40, trainers=2, slots=(2, 1), training_rounds=3, tiny_rounds=20,
    tensors=(1, 100, 10_000), tensor_rounds=3, checkpoints=(1, 1_000), checkpoint_rounds=3,
)  # fmt: skip
#: One round of everything: shows that it runs. No figure of it means anything.
SMOKE: Final = Settings(
    mib=2, rounds=1, warmups=0, tail_mib=2, tail_count=1, trainers=1, slots=(2,), training_rounds=1, tiny_rounds=1,
    tensors=(1, 50), tensor_rounds=1, checkpoints=(1, 3), checkpoint_rounds=1,
)  # fmt: skip


def parse(argv: list[str]) -> tuple[Settings, argparse.Namespace]:
    """The settings that a command line asks for, and the rest of it."""
    parser = argparse.ArgumentParser(
        prog="scripts/bench", allow_abbrev=False,
        description="Measures saving, restoring and what grows, against torch, safetensors, Lightning and the "
        "bare disk, all in turn in one run; says met or short for every line of the table.",
    )  # fmt: skip
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_true", help="under two minutes on two cores; fewer rounds")
    size.add_argument("--smoke", action="store_true", help="seconds: that it runs, and no more")
    parser.add_argument("--mib", type=_positive, metavar="N", help="size of the state (300; quick: 100)")
    parser.add_argument("--rounds", type=_positive, metavar="N", help="of saves and restores (15; quick: 5)")
    parser.add_argument(
        "--root", type=Path, metavar="DIR", help="where to write (a new folder in the current one)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="all raw numbers and every line")
    parser.add_argument("--plot", type=Path, metavar="FILE.svg", help="the same as bars")
    parser.add_argument(
        "--markdown", type=Path, metavar="FILE", help="put the result between the markers of this page"
    )
    args = parser.parse_args(argv)
    settings = QUICK if args.quick else SMOKE if args.smoke else FULL
    given = {name: value for name in ("mib", "rounds") if (value := getattr(args, name)) is not None}
    return replace(settings, **given), args


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("1 or more")
    return value


@contextmanager
def work_folder(root: Path | None) -> Iterator[Path]:
    """A new folder for everything that is written, removed at the end.

    Raises:
        SystemExit: It would lie in memory: nothing there says how fast a disk is.
    """
    above = root or Path.cwd()
    above.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=".bench-", dir=above))
    try:
        if (kind := mount_of(work)[1]) in _MEMORY:
            raise SystemExit(f"scripts/bench: {above} lies in memory ({kind}); give a disk with --root DIR")
        yield work
    finally:
        shutil.rmtree(work, ignore_errors=True)


def mount_of(path: Path) -> tuple[str, str, str]:
    """(device "major:minor", file system, mount options) of a path, from mountinfo."""
    device = os.stat(path).st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    found = (wanted, "unknown", "")
    for line in Path("/proc/self/mountinfo").read_text("utf-8").splitlines():
        before, _, after = line.partition(" - ")
        if before.split()[2] == wanted:
            found = (wanted, after.split()[0], before.split()[5])
    return found
