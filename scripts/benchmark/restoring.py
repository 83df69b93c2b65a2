"""Sections of restores: the same state, from the medium (cold) and from the page cache (warm), into live tensors."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ours
import page_cache
import torch
from rounds import Course
from settings import Settings
from state import Saved, flat, trained
from torch.distributed import checkpoint as dcp

import ckptd


class Restore:
    """One way to bring the values back, checked every time.

    Args:
        path: The file or folder that is read.
        restore: Brings the values back into the live tensors.
        cold: Drop the path's pages before, else have all of them in memory.
    """

    def __init__(
        self, name: str, about: str, saved: Saved, expected: dict[str, torch.Tensor], path: Path,
        restore: Callable[[], object], *, cold: bool, ours: bool = False,
    ) -> None:  # fmt: skip
        self.name, self.about, self.ours = name, about, ours
        self._saved, self._expected, self._restore, self._cold = saved, expected, restore, cold
        self._files = page_cache.files_of(path)

    def measure(self) -> dict[str, float]:
        """Seconds until every live tensor has its value, as "done"."""
        self._saved.wipe()
        (page_cache.drop if self._cold else page_cache.warm)(self._files)
        began = time.perf_counter()
        self._restore()
        return {"done": time.perf_counter() - began}

    def settle(self) -> None:
        """A restore that is wrong has no speed."""
        self._saved.require(self._expected, self.name)

    def close(self) -> None:
        """Nothing is held."""


def measure(course: Course, settings: Settings, work: Path, root: Path) -> None:
    """Cold, then warm."""
    saved = trained(settings.mib)
    expected = saved.copy()
    folder = work / "restore"
    folder.mkdir()
    with ckptd.Client(root=root, run="restore", daemon="attach") as client:
        ticket = client.snapshot(1, saved.live).wait("verified", timeout_s=ours.PATIENCE_S)
        ways = [
            ("ckptd", "every hash checked; as many threads as it takes", ticket.path, lambda: client.restore(saved.live)),
            *_others(folder, saved),
        ]  # fmt: skip
        for cold in (True, False):
            contestants = [
                Restore(*way[:2], saved, expected, *way[2:], cold=cold, ours=way[0] == "ckptd")
                for way in ways
            ]
            course.run(
                "restore, cold" if cold else "restore, warm", contestants, settings.rounds, settings.warmups
            )


def _others(folder: Path, saved: Saved) -> list[tuple[str, str, Path, Callable[[], object]]]:
    """(name, about, path, restore) of each; what they read is written here."""
    file = folder / "torch.pt"
    torch.save(saved.state_dict(), file)

    def load(**how: Any) -> None:
        _copy(saved, flat(torch.load(file, weights_only=True, **how)))

    unchecked = "no hash is checked"
    found = [
        ("torch.load + copy", f"{unchecked}; 1 thread reads", file, load),
        ("control: torch.load + copy, again", "the same", file, load),
        ("torch.load(mmap=True) + copy", f"{unchecked}; 1 thread", file, lambda: load(mmap=True)),
        _dcp(folder / "dcp", saved),
    ]
    if importlib.util.find_spec("safetensors") is not None:
        found.append(_safetensors(folder / "model.safetensors", saved))
    return found


def _dcp(path: Path, saved: Saved) -> tuple[str, str, Path, Callable[[], object]]:
    dcp.save(saved.state_dict(), checkpoint_id=path, no_dist=True)
    load = lambda: dcp.load(saved.state_dict(), checkpoint_id=path, no_dist=True)  # noqa: E731
    return "DCP load, in place", "no hash is checked; 1 thread", path, load


def _safetensors(path: Path, saved: Saved) -> tuple[str, str, Path, Callable[[], object]]:
    from safetensors.torch import load_file, save_file

    save_file(saved.tensors(), path)
    return (
        "safetensors load_file + copy",
        "no hash is checked; mapped",
        path,
        lambda: _copy(saved, load_file(path)),
    )


def _copy(saved: Saved, values: dict[str, torch.Tensor]) -> None:
    """What a hand-written loop does: one copy_ per tensor, by name."""
    with torch.no_grad():
        for path, tensor in saved.tensors().items():
            tensor.copy_(values[path])
