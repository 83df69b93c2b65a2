"""`save`: one checkpoint folder, written by this process, outside of any run."""

from __future__ import annotations

import mmap
import os
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ckptd.disk.commit import write_checkpoint_folder
from ckptd.errors import SaveFailed
from ckptd.link.metrics import plain_metrics
from ckptd.names import DEFAULT_RUN, check_step
from ckptd.snapshot.descriptor import Descriptor, Sharding
from ckptd.snapshot.descriptor_codec import encode
from ckptd.tensors.accumulation import accumulated_in, left_out
from ckptd.tensors.capture import Captured, capture, copy_into
from ckptd.versions import versions
from ckptd.warning import warn


def save(
    path: str | os.PathLike[str],
    state: Mapping[Any, Any],
    *,
    step: int,
    metrics: Mapping[str, Any] | None = None,
    sharding: Sharding | None = None,
    rng: bool = True,
) -> Path:
    """Write state as a checkpoint folder at path, durably, and return its absolute path.

    It is a checkpoint like those of a run, for `ckptd.load` and `ckptd.verify`, but belongs to none: no
    daemon, no retention. After a crash at any point path is absent or complete.

    Args:
        path: The folder to make. Must not exist; parents are made.
        state: Component name → module, optimizer, object with state_dict, or plain data.
        step: Finished optimizer steps.
        metrics: Name → number (also 0-dim tensors and NumPy scalars).
        sharding: How tensors are divided into files; None is `Sharding()`.
        rng: Whether to store the global random generators too.

    Warns:
        CheckpointWarning: Gradients accumulated since the last optimizer step aren't in the state. Those that were
            there before this process first used `save` or `Client` aren't seen: a step may have used them.

    Raises:
        UnstorableState: Something in the state can't be stored exactly. Nothing was written.
        InvalidArgument: A bad step, metric or state, or path exists. Nothing was written.
        NoSpace, SaveFailed, OutcomeUnknown: The disk, or no memory; path is absent, except perhaps for OutcomeUnknown.
    """
    target = Path(path).absolute()
    step, numbers = check_step(step), plain_metrics(metrics)
    captured = capture(state, rng=rng)
    descriptor = _descriptor(captured, step, numbers, sharding or Sharding())
    encode(descriptor)  # refuses, by key path, what no file could hold
    data = memoryview(_memory(captured.data_bytes, target))
    copy_into(captured, data)
    write_checkpoint_folder(target, descriptor, data)
    if (where := accumulated_in(state)) is not None:
        warn(left_out(where, "checkpoint"))
    return target


def _memory(size: int, target: Path) -> mmap.mmap:
    try:
        return mmap.mmap(-1, max(1, size))
    except OSError as error:
        raise SaveFailed(
            "no memory for the copy of the state", where=str(target), seen=f"{size} bytes: {error.strerror}",
            todo="free some memory, or save a smaller state",
        ) from error  # fmt: skip


def _descriptor(captured: Captured, step: int, metrics: dict[str, float], sharding: Sharding) -> Descriptor:
    return Descriptor(
        run=DEFAULT_RUN,
        client_id=uuid.uuid4().hex,
        snapshot=1,
        step=step,
        saved_at=time.time(),
        run_seconds=0.0,
        base_sequence=None,
        metrics=metrics,
        versions=versions(),
        state=captured.state,
        tensors=captured.tensors,
        data_bytes=captured.data_bytes,
        sharding=sharding,
    )
