"""Where crash states are laid out, and a world in which the same story always leaves the same bytes.

Two stories that begin alike then leave the same states, and each is judged once. What may differ is what the code
draws at random, the clock, and the root's inode, which the root and its slots record.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import os
import re
import secrets
import shutil
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Final

import pytest

from ckptd.disk import verification
from ckptd.disk.birth_time import born_ns
from ckptd_daemon.series import run_view
from crash_trace import Tree, tree_on_disk

_BOUND: Final = re.compile(rb'"schema": "ckptd\.(root|slots)-v1"')
_PLACE: Final = re.compile(rb'"(dev|ino|born)": (?:[0-9]+|null)|"(path)": "[^"]*"')


def unbound_bytes(data: bytes) -> bytes:
    """A file's content, without what binds it to one root's inode and path."""
    if not _BOUND.search(data):
        return data
    return _PLACE.sub(lambda found: b'"%s": ' % (found[1] or found[2]) + (b'""' if found[2] else b"0"), data)


def unbound(tree: Tree) -> Tree:
    return {path: content and unbound_bytes(content) for path, content in tree.items()}


def _bound(data: bytes, root: Path) -> bytes:
    if not _BOUND.search(data) or not root.exists():
        return data
    seen = root.stat()
    said = {b"dev": seen.st_dev, b"ino": seen.st_ino, b"born": born_ns(root), b"path": str(root)}
    return _PLACE.sub(
        lambda found: (
            b'"%s": %s' % ((key := found[1] or found[2]), json.dumps(said[key], ensure_ascii=False).encode())
        ),
        data,
    )


@contextmanager
def steady(ids_from: int) -> Iterator[None]:
    """The same ids from here on each time; marks of what was verified count wherever a checkpoint is laid out."""
    number = itertools.count(ids_from)

    def token(nbytes: int = 32) -> str:
        return hashlib.sha512(str(next(number)).encode()).hexdigest()[: 2 * nbytes]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(secrets, "token_hex", token)
        patch.setattr(uuid, "uuid4", lambda: uuid.UUID(token(16)))
        patch.setattr(run_view, "time", SimpleNamespace(time=lambda: 0.0))
        for module in _that_sign():
            patch.setattr(module, "stat_signature", _signature)
        yield


@functools.cache
def _that_sign() -> list[ModuleType]:
    modules = [module for name, module in sys.modules.items() if name.startswith("ckptd")]
    return [m for m in modules if getattr(m, "stat_signature", None) is verification.stat_signature]


def _signature(path: str | os.PathLike[str]) -> str:
    """As if a crash, and laying out what it left, changed no inode and no time: only names and sizes tell."""
    try:
        with os.scandir(path) as found:
            rows = sorted((entry.name, entry.stat(follow_symlinks=False).st_size) for entry in found)
    except OSError:
        return ""
    return hashlib.sha256(repr(rows).encode()).hexdigest()[:32]


class Ground:
    """A folder that is made to hold one tree after the other.

    Args:
        folder: It.
        root: What its files are bound to.
    """

    def __init__(self, folder: Path, root: Path) -> None:
        self.folder, self._root = folder, root
        self._tree: Tree | None = None  # what it holds, if that is known

    def lay_out(self, tree: Tree) -> None:
        """Hold this tree, and nothing else."""
        old = self._tree
        if old is None:
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder.mkdir()
            old = {}
        for path in sorted(old.keys() - tree.keys(), reverse=True):
            (self.folder / path).rmdir() if old[path] is None else (self.folder / path).unlink()
        for path in sorted(tree):
            if path not in old or old[path] != tree[path]:
                self._put(self.folder / path, tree[path])
        self._tree = dict(tree)

    def _put(self, path: Path, content: bytes | None) -> None:
        if content is None:
            path.mkdir(mode=0o700)
        else:
            path.write_bytes(_bound(content, self._root))
            path.chmod(0o600)

    def touched(self) -> None:
        """Somebody may have changed what it holds."""
        self._tree = None

    def read(self) -> Tree:
        """What it holds now."""
        self._tree = unbound(tree_on_disk(self.folder)) if self.folder.exists() else None
        return dict(self._tree or {})
