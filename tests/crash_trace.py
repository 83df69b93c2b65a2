"""What was done to the files below a folder, in order: what a power cut may then take back."""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, TypeAlias

Tree: TypeAlias = dict[str, bytes | None]  #: path → bytes; None for a folder

ROOT: Final = 0  #: the inode of the folder that is watched


@dataclass(frozen=True)
class Names:
    """One change of the names in a folder, atomic.

    Attributes:
        folder: Its inode.
        changes: Name → inode, None for a name taken away.
        moved: It takes the old name of what the change just before gave a name in another folder.
    """

    folder: int
    changes: tuple[tuple[str, int | None], ...]
    moved: bool = False


@dataclass(frozen=True)
class Write:
    file: int
    offset: int
    data: bytes


@dataclass(frozen=True)
class Truncate:
    file: int
    size: int


@dataclass(frozen=True)
class Sync:
    """A file's bytes or a folder's names are durable.

    Attributes:
        barrier: Who asked for it: the functions of ours that led to it, the innermost last.
    """

    inode: int
    barrier: str


@dataclass(frozen=True)
class Mark:
    """What the outside was told, or is about to see.

    Attributes:
        what: A word of the story's.
        about: What goes with it.
    """

    what: str
    about: Any = None


@dataclass(frozen=True)
class Memory:
    """What lies in shared memory now: a kill leaves it, a power cut doesn't.

    Attributes:
        tree: Path → bytes; None for a folder.
    """

    tree: Tree


Op: TypeAlias = Names | Write | Truncate | Sync | Mark | Memory


@dataclass
class Trace:
    """What was done, in order.

    Attributes:
        ops: Everything.
        folders: The inodes that are folders.
        begins: How many of the operations are marks of what was told before.
        before: What was there, durable, when the recording began.
    """

    ops: list[Op] = field(default_factory=list)
    folders: set[int] = field(default_factory=lambda: {ROOT})
    begins: int = 0
    before: Tree = field(default_factory=dict)

    def syncs(self) -> dict[int, str]:
        """Position → barrier of each sync of ours, not of the story itself."""
        return {at: op.barrier for at, op in enumerate(self.ops) if isinstance(op, Sync) and op.barrier != ""}

    def without(self, positions: Collection[int]) -> Trace:
        """The same, had these operations not been done."""
        return replace(self, ops=[op for at, op in enumerate(self.ops) if at not in positions])

    def delayed(self, position: int) -> Trace | None:
        """The same, had this operation been done only after the next rename; None if no rename follows."""
        for at in range(position + 1, len(self.ops)):
            op = self.ops[at]
            if isinstance(op, Names) and (op.moved or len(op.changes) > 1):
                ops = [*self.ops[:position], *self.ops[position + 1 : at + 1], self.ops[position]]
                return replace(self, ops=[*ops, *self.ops[at + 1 :]])
        return None


def apply(content: bytearray, op: Write | Truncate) -> None:
    """Do it to a file's bytes."""
    if isinstance(op, Truncate):
        del content[op.size :]
        content.extend(bytes(op.size - len(content)))
    else:
        content.extend(bytes(max(0, op.offset - len(content))))
        content[op.offset : op.offset + len(op.data)] = op.data


def tree_of(names: dict[int, dict[str, int]], content: Any) -> Tree:
    """Path → bytes, None for a folder, of what is reached from the top."""
    found: Tree = {}
    todo = [("", ROOT)]
    while todo:
        path, folder = todo.pop()
        for name, inode in names[folder].items():
            whole = f"{path}{name}"
            if inode in names:
                found[whole] = None
                todo.append((f"{whole}/", inode))
            else:
                found[whole] = bytes(content[inode])
    return found


def tree_on_disk(folder: Path) -> Tree:
    """The same of a real folder."""
    found: Tree = {}
    todo = [("", str(folder))]
    while todo:
        below, above = todo.pop()
        for entry in os.scandir(above):
            whole = f"{below}{entry.name}"
            if entry.is_dir(follow_symlinks=False):
                found[whole] = None
                todo.append((f"{whole}/", entry.path))
            else:
                with open(entry.path, "rb", buffering=0) as file:
                    found[whole] = file.read()
    return found
