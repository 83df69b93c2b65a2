"""Every kind of damage at rest, as done to one file of a checkpoint, to its folder, or to a file of its run.

Each takes the path, a `Scene` that has sound bytes to borrow, and a random generator for the place in the file.
It returns False where it can't be done there: nothing was changed then.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

PAGE = 4096


class Borrowed(Protocol):
    """Where other bytes of the same kind are found."""

    def before(self, path: Path) -> Path:
        """The same file of the checkpoint before it, or of the run's younger self."""
        ...

    def of_other_run(self, path: Path) -> Path:
        """The same file of another run."""
        ...


Kind = Callable[[Path, Borrowed, random.Random], "bool | None"]


def _bit(path: Path, _scene: Borrowed, chance: random.Random) -> None:
    with path.open("r+b") as file:
        at = chance.randrange(os.fstat(file.fileno()).st_size)
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ (1 << chance.randrange(8))]))


def _zero_page(path: Path, _scene: Borrowed, chance: random.Random) -> bool:
    data = bytearray(path.read_bytes())
    pages = [at for at in range(0, len(data), PAGE) if any(data[at : at + PAGE])]
    at = chance.choice(pages)
    data[at : at + PAGE] = bytes(len(data[at : at + PAGE]))
    path.write_bytes(data)
    return True


def _cut(to: Callable[[int], int]) -> Kind:
    return lambda path, _scene, _chance: os.truncate(path, to(path.stat().st_size))


def _append(path: Path, _scene: Borrowed, chance: random.Random) -> None:
    with path.open("ab") as file:
        file.write(bytes([chance.randrange(256)]))


def _swap(path: Path, scene: Borrowed, _chance: random.Random) -> bool:
    """With another file of the same size, best one of its own folder."""
    sizes = {
        each: each.stat().st_size
        for each in (*sorted(path.parent.iterdir()), scene.before(path))
        if each.is_file()
    }
    twin = next((each for each in sizes if each != path and sizes[each] == sizes[path]), None)
    if twin is None:
        return False
    mine = path.read_bytes()
    path.write_bytes(twin.read_bytes())
    twin.write_bytes(mine)
    return True


def _stale(path: Path, scene: Borrowed, _chance: random.Random) -> bool:
    return _become(path, scene.before(path))


def _foreign(path: Path, scene: Borrowed, _chance: random.Random) -> bool:
    return _become(path, scene.of_other_run(path))


def _become(path: Path, source: Path) -> bool:
    if not source.exists():
        return False
    if source.is_dir():
        shutil.rmtree(path)
        shutil.copytree(source, path)
    else:
        path.write_bytes(source.read_bytes())
    return True


def _hash(change: Callable[[dict[str, Any]], object]) -> Kind:
    """The hash of a file in an index that is sealed anew: as if whoever changed it knew how."""

    def changed(path: Path, _scene: Borrowed, _chance: random.Random) -> bool:
        index = json.loads(path.read_bytes()) if path.name == "index.json" else {}
        if "index_sha256" not in index:
            return False
        change(index)
        del index["index_sha256"]
        sealed = hashlib.sha256(_canonical(index)).hexdigest()
        path.write_bytes(_canonical({**index, "index_sha256": sealed}))
        return True

    return changed


def _canonical(obj: Any) -> bytes:
    return (json.dumps(obj, sort_keys=True, indent=2) + "\n").encode()


def _gone(path: Path, _scene: Borrowed, _chance: random.Random) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink()


def _folder(path: Path, scene: Borrowed, chance: random.Random) -> bool:
    if path.is_dir():
        return False
    _gone(path, scene, chance)
    path.mkdir()
    return True


def _file(path: Path, scene: Borrowed, chance: random.Random) -> bool:
    if not path.is_dir():
        return False
    _gone(path, scene, chance)
    path.write_bytes(b"in its place")
    return True


def _emptied(path: Path, scene: Borrowed, chance: random.Random) -> bool:
    if not path.is_dir():
        return False
    _gone(path, scene, chance)
    path.mkdir()
    return True


def _link(path: Path, _scene: Borrowed, _chance: random.Random) -> None:
    """A link to the right bytes: what it leads to may be changed by anybody at any time."""
    aside = path.with_name(f"aside-{path.name}")
    path.rename(aside)
    path.symlink_to(aside)


def _fifo(path: Path, scene: Borrowed, chance: random.Random) -> None:
    _gone(path, scene, chance)
    os.mkfifo(path)


def _hard_link(path: Path, scene: Borrowed, chance: random.Random) -> bool:
    if path.is_dir() or not scene.before(path).is_file():
        return False
    path.unlink()
    os.link(scene.before(path), path)
    return True


def _extra(path: Path, _scene: Borrowed, _chance: random.Random) -> None:
    """A file nobody asked for beside it, or in it."""
    (path / "notes.txt" if path.is_dir() else path.with_name("model.shard-007.pt")).write_bytes(b"somebody's")


def _no_rights(path: Path, _scene: Borrowed, _chance: random.Random) -> None:
    path.chmod(0)


def _shard(index: dict[str, Any]) -> dict[str, Any]:
    first: dict[str, Any] = index["shards"][0]
    return first


#: Files alone.
FILE_KINDS: dict[str, Kind] = {
    "a bit": _bit,
    "a zeroed page": _zero_page,
    "one byte short": _cut(lambda size: size - 1),
    "half": _cut(lambda size: size // 2),
    "empty": _cut(lambda size: 0),
    "one byte more": _append,
    "swapped": _swap,
    "a hash missing": _hash(lambda index: _shard(index).pop("sha256")),
    "a hash of none": _hash(lambda index: _shard(index).update(sha256=None)),
    "the table's hash missing": _hash(lambda index: index.pop("tensors_sha256")),
    "a hash changed": _hash(lambda index: _shard(index).update(sha256="ab" * 32)),
    "a size changed": _hash(lambda index: _shard(index).update(bytes=_shard(index)["bytes"] + 1)),
    "a shard forgotten": _hash(lambda index: index.update(shards=index["shards"][1:], num_shards=index["num_shards"] - 1)),
    "a hard link to another": _hard_link,
    "a folder in its place": _folder,
}  # fmt: skip

#: Folders alone.
FOLDER_KINDS: dict[str, Kind] = {"a file in its place": _file, "emptied": _emptied}

#: Of both.
ANY_KINDS: dict[str, Kind] = {
    "that of the step before": _stale,
    "that of another run": _foreign,
    "gone": _gone,
    "a link": _link,
    "a fifo": _fifo,
    "something beside it": _extra,
    "no rights": _no_rights,
}

KINDS: dict[str, Kind] = FILE_KINDS | FOLDER_KINDS | ANY_KINDS
