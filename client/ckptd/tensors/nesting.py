# ruff: noqa: TID253
"""How deep a state may be nested: what one value's form takes of the levels that a file may have."""

from __future__ import annotations

import random
from collections import OrderedDict, deque
from typing import Any, Final

import numpy

from ckptd.errors import UnstorableState
from ckptd.limits import MAX_TREE_DEPTH
from ckptd.registered import name_of
from ckptd.snapshot import keypath
from ckptd.tensors.tags import MARKER

#: Of types whose tag has containers of its own.
_LEVELS: Final = {
    deque: 2, frozenset: 2, numpy.ndarray: 2, random.Random: 3, numpy.random.Generator: 4, numpy.random.RandomState: 4,
}  # fmt: skip


def check_depth(value: Any, depth: int, path: keypath.Path) -> int:
    """The levels that value takes, of plain containers, down to what lies in it.

    Args:
        value: What is to be stored.
        depth: The levels above it.
        path: Its key path.

    Raises:
        UnstorableState: They would be more than MAX_TREE_DEPTH.
    """
    levels = _levels_of(value)
    if depth + levels <= MAX_TREE_DEPTH:
        return levels
    raise UnstorableState(
        f"nested deeper than {MAX_TREE_DEPTH} levels", where=keypath.show_ends(path),
        todo="store it flat: a list of rows, or a dict by path",
    )  # fmt: skip


def _levels_of(value: Any) -> int:
    kind = type(value)
    if isinstance(value, dict):
        plain = (kind is dict or kind is OrderedDict) and MARKER not in value
        return 1 if plain else 3  # the tag, its list of items, and each item
    if kind in _LEVELS:
        return _LEVELS[kind]
    return 2 if hasattr(kind, "_fields") or name_of(kind) is not None else 1
