"""torch.distributed.checkpoint's async_save: as it comes, with a stager that is reused, and with a process."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
from floors import CORES
from others import Other
from state import Saved
from torch.distributed import checkpoint as dcp

# One process needs no group, and says so at every call, from its threads too.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")


class DcpThread(Other):
    """All defaults: a new stager for each save, one writing thread."""

    name = "DCP async_save, thread"
    about = "a new stager each time, then 1 writing thread; no hash; fsync of each file, not of the folder"
    process = False

    def stager(self) -> Any:
        """None: async_save makes one."""
        return None

    def threads(self) -> int:
        """Writing threads."""
        return 1

    def save(self, state_dict: dict[str, Any]) -> Any:
        """Returns once it is staged."""
        kind = dcp.state_dict_saver.AsyncCheckpointerType
        return dcp.async_save(
            state_dict,
            storage_writer=dcp.FileSystemWriter(self.target, thread_count=self.threads()),
            async_checkpointer_type=kind.PROCESS if self.process else kind.THREAD,
            async_stager=self.stager(),
            no_dist=True,
        ).result


class DcpCached(DcpThread):
    """A stager kept for life, so that its memory is touched already, and a thread a core."""

    name = "DCP async_save, thread, reused stager"
    about = (
        f"one stager for all, then {CORES} writing threads; no hash; fsync of each file, not of the folder"
    )
    shared = False

    def __init__(self, folder: Path, saved: Saved) -> None:
        super().__init__(folder, saved)
        self._stager: Any = None

    def stager(self) -> Any:
        """Always the same."""
        if self._stager is None:  # not before: an older torch has none, and this contestant is left out
            options = dcp.staging.StagingOptions(
                use_pinned_memory=False, use_shared_memory=self.shared, use_async_staging=False,
                use_non_blocking_copy=False,
            )  # fmt: skip
            self._stager = dcp.staging.DefaultStager(options)
        return self._stager

    def threads(self) -> int:
        """One a core."""
        return CORES

    def close(self) -> None:
        """Its memory is freed."""
        if self._stager is not None:
            self._stager.close()


class DcpProcess(DcpCached):
    """The same with shared memory and a process that writes, which torch keeps until this one ends."""

    name = "DCP async_save, process, reused stager"
    about = f"shared memory, 1 process with {CORES} threads; no hash; fsync of each file, not of the folder"
    shared = process = True

    def save(self, state_dict: dict[str, Any]) -> Any:
        """It needs a process group, if only of one; the process that it starts at the first save logs each request."""
        if dist.is_initialized():
            return super().save(state_dict)
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")  # where its process is met
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        with _silent():
            super().save(state_dict)()
        return lambda: None

    def close(self) -> None:
        """The group ends; the process with its parent."""
        super().close()
        if dist.is_initialized():
            dist.destroy_process_group()


@contextmanager
def _silent() -> Iterator[None]:
    """What is started now says nothing on stderr, then and later."""
    kept, nothing = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nothing)


def dcp_contestants(folder: Path, saved: Saved, *, process: bool) -> list[Other]:
    """All of them; the one with a process takes seconds to start, in its first save, which must be a warm-up."""
    kinds = [DcpThread, DcpCached, *([DcpProcess] if process else [])]
    return [kind(folder, saved) for kind in kinds]
