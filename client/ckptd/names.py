"""Names of runs, checkpoints and temporary folders: the one place that spells and parses them.

Order never comes from a name: `sequence` orders checkpoints. A name only says which step it holds.
"""

from __future__ import annotations

import os
import re
from typing import Final

from ckptd.errors import InvalidArgument
from ckptd.limits import MAX_STEP

SERVICE_DIR: Final = ".ckptd"
QUARANTINE_DIR: Final = "quarantine"
DECISIONS_DIR: Final = "decisions"
INDEX_FILE: Final = "index.json"
RECENT_FILE: Final = "recent.json"
NEWEST_FILE: Final = "newest.json"
TABLE_FILE: Final = "tensors.json"
META_FILE: Final = "meta.pt"
SINGLE_FILE: Final = "ckpt.pt"
DEFAULT_RUN: Final = "default"

_RUN: Final = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}", re.ASCII)
_STEP: Final = re.compile(r"step-([0-9]{9,16})(?:\.([1-9][0-9]{0,8}))?", re.ASCII)
_WORK: Final = re.compile(r"\.(tmp|trash)-([0-9]{1,19})-([0-9a-f]{32})", re.ASCII)
_QUARANTINED: Final = re.compile(
    r"(step-[0-9]{9,16}(?:\.[1-9][0-9]{0,8})?)-([0-9]{1,19})-([0-9a-f]{32})", re.ASCII
)
_COMPONENT: Final = re.compile(r"[a-z0-9_]{1,32}", re.ASCII)


def check_run_name(run: str) -> str:
    """Return run unchanged, or raise InvalidArgument."""
    if not isinstance(run, str) or not _RUN.fullmatch(run) or run in (QUARANTINE_DIR, DECISIONS_DIR):
        raise InvalidArgument(
            "not a run name", where="run", seen=repr(run),
            wanted="1 to 64 of a-z 0-9 . _ -, beginning with a letter or digit", todo="pick another name",
        )  # fmt: skip
    return run


def check_step(step: object) -> int:
    """Return step (finished optimizer steps, 0 to 10**15) as an int, or raise InvalidArgument."""
    if isinstance(step, bool) or not hasattr(step, "__index__"):
        raise InvalidArgument("not a step", where="step", seen=repr(step), wanted="an int of 0 or more")
    value = int(step.__index__())
    if not 0 <= value <= MAX_STEP:
        raise InvalidArgument("step out of range", where="step", seen=str(value), wanted=f"0 to {MAX_STEP}")
    return value


def is_component_with_shards(name: object) -> bool:
    """Whether a top-level key of the state may have shard files of its own."""
    return isinstance(name, str) and _COMPONENT.fullmatch(name) is not None


def step_folder(step: int, repeat: int = 1) -> str:
    """`step-000001200`, or `step-000001200.2` when the same step is committed for the second time."""
    return f"step-{step:09d}" + (f".{repeat}" if repeat > 1 else "")


def parse_step_folder(name: str) -> tuple[int, int] | None:
    """(step, repeat) of a checkpoint folder's name; None for every other name, also for other spellings of a step."""
    match = _STEP.fullmatch(name)
    if match is None:
        return None
    step, repeat = int(match[1]), int(match[2] or 1)
    return (step, repeat) if step_folder(step, repeat) == name else None


def work_folder(kind: str, sequence: int) -> str:
    """A fresh `.tmp-<sequence>-<uuid>` or `.trash-<sequence>-<uuid>`; kind is "tmp" or "trash"."""
    return f".{kind}-{sequence}-{os.urandom(16).hex()}"


def parse_work_folder(name: str) -> tuple[str, int] | None:
    """(kind, sequence) of a temp or trash folder's name, or None."""
    match = _WORK.fullmatch(name)
    return (match[1], int(match[2])) if match else None


def quarantine_folder(name: str, sequence: int) -> str:
    """A fresh name inside quarantine/ for checkpoint `name`."""
    return f"{name}-{sequence}-{os.urandom(16).hex()}"


def parse_quarantine_folder(name: str) -> tuple[str, int] | None:
    """(checkpoint name, sequence) of a folder in quarantine/, or None."""
    match = _QUARANTINED.fullmatch(name)
    return (match[1], int(match[2])) if match else None


def shard_file(component: str, shard: int) -> str:
    """`model.shard-000.pt`"""
    return f"{component}.shard-{shard:03d}.pt"
