"""A folder in memory for what is killed a thousand times: a SIGKILL takes back nothing that was written, synced or not."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def private_shm() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="ckptd-test-", dir="/dev/shm"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
