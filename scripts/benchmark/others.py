"""The other ways to save the same state: torch.save, safetensors, Lightning."""

from __future__ import annotations

import importlib.util
import os
import shutil
import time
from pathlib import Path
from typing import Any, Final

import page_cache
import torch
from floors import sync_folder
from state import Saved

#: contestant → what `pip install` would bring it
INSTALL: Final = {"safetensors, save_file": "safetensors", "Lightning, AsyncCheckpointIO": "lightning"}


class Other:
    """A way to save that isn't ours.

    Attributes:
        target: The file or folder it writes; gone after settle().
    """

    ours = False
    name = about = ""

    def __init__(self, folder: Path, saved: Saved) -> None:
        self.saved = saved
        self.target = folder / type(self).__name__
        self.folder = folder

    def measure(self) -> dict[str, float]:
        """stall: until training could go on. done: until the library says it is finished."""
        began = time.perf_counter()
        wait = self.save(self.saved.state_dict())
        stalled = time.perf_counter()
        wait()
        return {"stall": stalled - began, "done": time.perf_counter() - began}

    def save(self, state_dict: dict[str, Any]) -> Any:
        """Begin, and return what waits for the end."""
        raise NotImplementedError

    def settle(self) -> None:
        """Nothing of it is left, neither on disk nor on its way there."""
        if self.target.is_dir():
            shutil.rmtree(self.target)
        else:
            self.target.unlink(missing_ok=True)
        page_cache.sync_file_system(self.folder)

    def close(self) -> None:
        """Nothing is held."""


class TorchSave(Other):
    """torch.save under a temporary name, and a rename."""

    name = "torch.save"
    about = "1 thread; CRC-32, no hash; no fsync: a power cut may lose it or leave half of it"

    def save(self, state_dict: dict[str, Any]) -> Any:
        """Blocks."""
        temp = self.target.with_suffix(".tmp")
        torch.save(state_dict, temp)
        self.sync(temp)
        temp.rename(self.target)
        self.sync(self.folder)
        return _nothing

    def sync(self, path: Path) -> None:
        """Not here."""


class TorchSaveSynced(TorchSave):
    """The same, durable."""

    name = "torch.save + fsync"
    about = "1 thread; CRC-32, no hash; fsync of file and folder"

    def sync(self, path: Path) -> None:
        """File and folder alike."""
        sync_folder(path)


class Safetensors(Other):
    """safetensors.torch.save_file; it takes tensors by name only."""

    name = "safetensors, save_file"
    about = "1 thread; no hash, no structure, only tensors by name; no fsync"

    def save(self, state_dict: dict[str, Any]) -> Any:
        """Blocks."""
        from safetensors.torch import save_file

        save_file(self.saved.tensors(), self.target)
        return _nothing


class Lightning(Other):
    """Lightning's AsyncCheckpointIO over its TorchCheckpointIO."""

    name = "Lightning, AsyncCheckpointIO"
    about = "clones every tensor, then 1 thread; CRC-32, no hash; no fsync"

    def save(self, state_dict: dict[str, Any]) -> Any:
        """Returns once everything is cloned; teardown() waits."""
        from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO

        writer = AsyncCheckpointIO(TorchCheckpointIO())
        writer.save_checkpoint(state_dict, os.fspath(self.target))
        return writer.teardown


def _nothing() -> None:
    pass


def others(folder: Path, saved: Saved) -> tuple[list[Other], dict[str, str]]:
    """Those that are installed; and what to install for the rest, by name."""
    found: list[Other] = [TorchSave(folder, saved), TorchSaveSynced(folder, saved)]
    missing: dict[str, str] = {}
    for kind in (Safetensors, Lightning):
        package = INSTALL[kind.name]
        if importlib.util.find_spec(package) is None:
            missing[kind.name] = f"not installed: .venv/bin/pip install {package}"
        else:
            found.append(kind(folder, saved))
    return found, missing
