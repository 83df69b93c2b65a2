# ruff: noqa: TID253
"""`torch.save` that is all or nothing, for files outside a run."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import torch

from ckptd.disk import durable, own_leftovers


def atomic_save(obj: Any, path: str | os.PathLike[str]) -> None:
    """`torch.save(obj, path)`, all or nothing and durable.

    A reader sees the old file or the new one, never a part. The temporary file lies in the same folder, under
    a name nobody else uses. A failure leaves none behind; one that can't be removed then goes with this process's
    next call for that folder. The whole archive is made in memory first, so that an object which can't be saved
    touches nothing on disk.

    Args:
        obj: What torch.save can write. Only what weights_only accepts can be read back with
            `torch.load(path, weights_only=True)`.
        path: Replaced when it exists. Its folder must exist.

    Raises:
        OSError: Disk full, I/O error, no permission. path is untouched, unless only the sync of its folder
            failed: then it is new, but may not survive a power cut.
    """
    archive = io.BytesIO()
    torch.save(obj, archive)  # noqa: TID251 - the caller asked for torch's own archive
    own_leftovers.remove(Path(path).parent)
    durable.replace_file(Path(path), [archive.getbuffer()])
