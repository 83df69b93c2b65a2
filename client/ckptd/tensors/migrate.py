# ruff: noqa: TID253
"""From format v1 to v2: a new checkpoint beside the old one, which stays as it is."""

from __future__ import annotations

import mmap
import os
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ckptd.disk.commit import write_checkpoint_folder
from ckptd.names import DEFAULT_RUN, check_step, step_folder
from ckptd.snapshot.descriptor import Descriptor, Sharding
from ckptd.snapshot.descriptor_codec import encode
from ckptd.tensors.capture import capture, copy_into
from ckptd.tensors.number_lists import pack_numbers
from ckptd.tensors.v1 import V1Checkpoint, read_v1
from ckptd.versions import versions


def migrate_v1_to_v2(path: str | os.PathLike[str], out: str | os.PathLike[str] | None = None) -> Path:
    """Write a checkpoint of format v1 as a new one of format v2: the same tensors, all the new fields.

    A sharded one keeps its number of shards. Parameters of the optimizer keep their numbers, which restoring
    matches by position. What v1 had no hash for is taken as it is: the hashes of the new checkpoint prove
    what was read now, not what was saved then.

    Args:
        path: As for ckptd.load: a v1 ckpt.pt, or the folder of one.
        out: Folder to make; it must not exist. None: `step-<step>` beside the old one (`step-<step>.2`
            when that name is taken, and so on).

    Returns:
        The new folder, absolute.

    Raises:
        NothingThere, UnknownSchema, CorruptCheckpoint: As for ckptd.tensors.v1.load_v1.
        InvalidArgument: out exists.
        UnstorableState: A component holds what v2 can't store exactly.
        NoSpace, SaveFailed, OutcomeUnknown: It could not be written. The old one is untouched in every case.
    """
    found = read_v1(path)
    target = Path(out).absolute() if out is not None else _free_name(Path(path).absolute().parent, found.step)
    descriptor, data = _as_snapshot(found)
    write_checkpoint_folder(target, descriptor, data)
    return target


def _free_name(folder: Path, step: int) -> Path:
    repeat = 1
    while os.path.lexists(folder / step_folder(step, repeat)):
        repeat += 1
    return folder / step_folder(step, repeat)


def _as_snapshot(found: V1Checkpoint) -> tuple[Descriptor, memoryview]:
    components = dict(found.components)
    rng = _plain(components.pop("rng"))
    captured = capture(components, rng=False)
    data = memoryview(mmap.mmap(-1, max(1, captured.data_bytes)))
    copy_into(captured, data)
    descriptor = Descriptor(
        run=DEFAULT_RUN,
        client_id=uuid.uuid4().hex,
        snapshot=1,
        step=check_step(found.step),
        saved_at=found.saved_at,
        run_seconds=0.0,
        base_sequence=None,
        versions=versions(),
        state={**captured.state, "rng": rng},
        tensors=captured.tensors,
        data_bytes=captured.data_bytes,
        sharding=Sharding() if found.shards is None else Sharding(shards=min(found.shards, 1000)),
    )
    encode(descriptor)  # refuses, by key path, what no file could hold
    return descriptor, data


def _plain(value: Any) -> Any:
    """RNG states as numbers in lists and dicts; v1 has them so but for a tensor here and there."""
    if isinstance(value, torch.Tensor):
        return _plain(value.tolist())
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return (pack_numbers(value) if len(value) >= 64 else None) or [_plain(item) for item in value]
    return tuple(_plain(item) for item in value) if isinstance(value, tuple) else value
