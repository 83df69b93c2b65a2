"""What a crash state turns out to be: asked of the disk alone, then of a real recovery, a second one, and a next save.

Each tree is looked at once, however many stories leave it, and what comes after a recovery once for each tree that
recoveries leave.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest

from ckptd.disk.series import latest_valid, read_series
from ckptd.errors import CkptdError, NoValidCheckpoint
from ckptd.names import DECISIONS_DIR, INDEX_FILE
from crash_daemon import RUN, Daemon, Deaf, root_in
from crash_place import Ground, steady
from crash_states import State, digest_of
from crash_trace import Tree

RUN_PATH: Final = f"fresh/root/{RUN}"
_DECISIONS: Final = f"{RUN_PATH}/{DECISIONS_DIR}"
NEXT_CLIENT: Final = "e" * 32
_IDS_OF_RECOVERY: Final = 1_000_000


@dataclass(frozen=True)
class After:
    """A tree that a recovery has left.

    Attributes:
        tree: It.
        latest: The sequence of `latest_valid`.
        next: The sequence of the next save, which then was the latest valid one.
        wrong: What was wrong whatever had been promised.
    """

    tree: Tree
    latest: int | None
    next: int
    wrong: tuple[str, ...]


@dataclass(frozen=True)
class Seen:
    """A state.

    Attributes:
        latest: The sequence of `latest_valid`, from disk alone.
        fall_back: The same, were the index of the latest damaged, 0 for none; only where the latest has forked the line.
        run_id: The run's, were the index of each checkpoint damaged.
        after: After a recovery.
    """

    latest: int | None
    fall_back: int | None
    run_id: str
    after: After


class Eye:
    """Looks at states.

    Args:
        folder: Used as it likes.
        memory: Used for shared memory.
    """

    def __init__(self, folder: Path, memory: Path) -> None:
        root = root_in(folder)
        self._ground, self._memory, self._root = Ground(folder, root), Ground(memory, root), root
        self._seen: dict[str, Seen | str] = {}
        self._after: dict[str, After] = {}
        self._run_ids: dict[str, str] = {}
        self.looked = 0

    def look(self, state: State) -> Seen | str:
        """What it is; in words, if recovery fails."""
        if state.on_disk not in self._seen:
            self.looked += 1
            try:
                with steady(_IDS_OF_RECOVERY), self._place():
                    self._seen[state.on_disk] = self._look(state)
            except (CkptdError, OSError, AssertionError) as error:
                self._seen[state.on_disk] = f"{type(error).__name__}: {error}"
                self._ground.touched()
        return self._seen[state.on_disk]

    @contextmanager
    def _place(self) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("CKPTD_SHM_DIR", str(self._memory.folder))
            patch.setattr(os, "fsync", lambda _fd: None)  # what is looked at is there already
            yield

    def _look(self, state: State) -> Seen:
        self._memory.lay_out({})
        run_id = self._run_id(state.tree)
        self._ground.lay_out(state.tree)
        self._memory.lay_out(state.memory)
        latest = self._latest()
        fall_back = self._fall_back(state.tree, latest)
        self._ground.touched()
        self._recover()
        tree = self._ground.read()
        if self._memory.read():
            raise AssertionError("shared memory was left behind")
        digest = digest_of(tree)
        if digest not in self._after:
            self._after[digest] = self._look_after(tree)
            self._ground.touched()
        return Seen(latest, fall_back, run_id, self._after[digest])

    def _latest(self) -> int | None:
        found = latest_valid(self._root, RUN) if self._root.exists() else None
        return None if found is None else found.sequence

    def _fall_back(self, tree: Tree, latest: int | None) -> int | None:
        heads = {
            name: index["parent"] for name, index in indexes(tree).items() if index.get("sequence") == latest
        }
        if latest is None or not heads or (latest - 1) in (*heads.values(), 0):
            return None
        with damaged(self._root / RUN / next(iter(heads)) / INDEX_FILE):
            try:
                return self._latest() or 0
            except NoValidCheckpoint:
                return 0

    def _recover(self) -> str:
        with Daemon(Deaf(), self._ground.folder) as daemon:
            return daemon.catalogue.run_id

    def _look_after(self, tree: Tree) -> After:
        latest = self._latest()
        wrong = [f"left after recovery: {path}" for path in tree if "/.tmp-" in path or "/.trash-" in path]
        if sum("-birth-" in path for path in tree) != 1:
            wrong.append("not one birth")
        self._recover()
        if self._ground.read() != tree:
            wrong.append("a second recovery changes something more")
        self._ground.touched()
        saved = self._save(wrong)
        now = self._ground.read()
        if changed := [path for path in checkpoint_files(tree) if now.get(path) != tree[path]]:
            wrong.append(f"the next save changes {changed}")
        return After(tree, latest, saved, tuple(wrong))

    def _save(self, wrong: list[str]) -> int:
        with Daemon(Deaf(), self._ground.folder) as daemon:
            saved = daemon.save(777, verify=True, client=NEXT_CLIENT).index.sequence
            entries = read_series(daemon.root, RUN).entries
        if (latest := self._latest()) != saved:
            wrong.append(f"the next save is {saved}, and latest is {latest}")
        if len(ids := {entry.index.run_id for entry in entries if entry.index is not None}) != 1:
            wrong.append(f"checkpoints of {len(ids)} runs in one")
        return saved

    def _run_id(self, tree: Tree) -> str:
        """Nothing but decisions tells then; "" where there are none, nor checkpoints."""
        kept = {
            path: content
            for path, content in tree.items()
            if "/.ckptd" in path or not path.startswith(f"{RUN_PATH}/") or path.startswith(_DECISIONS)
        }
        if RUN_PATH not in kept:
            return ""
        digest = digest_of(kept)
        if digest not in self._run_ids:
            name = f"{RUN_PATH}/step-000000001"
            self._ground.lay_out(kept | {name: None, f"{name}/{INDEX_FILE}": b""})
            self._ground.touched()
            self._run_ids[digest] = self._recover()
        return self._run_ids[digest]


@contextmanager
def damaged(file: Path) -> Iterator[None]:
    content = file.read_bytes()
    file.write_bytes(b"")
    yield
    file.write_bytes(content)


def checkpoint_files(tree: Tree) -> list[str]:
    """The paths of all files of checkpoints in the run."""
    return [
        path for path, content in tree.items() if path.startswith(f"{RUN_PATH}/step-") and content is not None
    ]


def folders(tree: Tree) -> dict[str, dict[str, bytes]]:
    """Name → the files of each checkpoint in the run."""
    found: dict[str, dict[str, bytes]] = {
        path.rpartition("/")[2]: {}
        for path in tree
        if path.startswith(f"{RUN_PATH}/step-") and path.count("/") == RUN_PATH.count("/") + 1
    }
    for path in checkpoint_files(tree):
        folder, _, name = path.rpartition("/")
        found[folder.rpartition("/")[2]][name] = tree[path] or b""
    return found


def indexes(tree: Tree) -> dict[str, dict[str, object]]:
    """Name → what the index says, of each checkpoint whose index is JSON."""
    found = {}
    for name, files in folders(tree).items():
        try:
            found[name] = dict(json.loads(files.get(INDEX_FILE, b"")))
        except ValueError:
            continue
    return found
