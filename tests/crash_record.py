"""What a story does to the disk, as a trace."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias

import pytest

from crash_place import steady, unbound, unbound_bytes
from crash_recorder import Recorder
from crash_trace import Mark, Op, Trace, Write, tree_on_disk

Story: TypeAlias = Callable[[Recorder, Path], None]


def record(story: Story, folder: Path, told: Sequence[Mark] = (), ids_from: int = 0) -> Trace:
    """The trace of a story told in a folder.

    Args:
        story: It.
        folder: What is there already counts as durable. Shared memory lies in a folder beside it, FOLDER.memory.
        told: What was told before.
        ids_from: What is drawn at random is drawn from here on; never twice in one folder.
    """
    memory = folder.with_name(f"{folder.name}.memory")
    recorder = Recorder(folder, memory)
    recorder.trace.ops += told
    recorder.trace.begins = len(told)
    recorder.trace.before = unbound(recorder.trace.before)
    with pytest.MonkeyPatch.context() as patch, steady(ids_from), recorder.recording():
        patch.setenv("CKPTD_SHM_DIR", str(memory))
        story(recorder, folder)
    assert recorder.tree() == tree_on_disk(folder), "something went past the recorder"
    recorder.trace.ops = [_unbound_write(op) for op in recorder.trace.ops]
    return recorder.trace


def _unbound_write(op: Op) -> Op:
    return Write(op.file, op.offset, unbound_bytes(op.data)) if isinstance(op, Write) else op
