"""How large and deep a loaded payload may be, before anything walks it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection
from typing import Any

from ckptd.errors import CorruptCheckpoint
from ckptd.limits import MAX_TREE_DEPTH, MAX_TREE_NODES


def _items(container: Any) -> Collection[Any]:
    if isinstance(container, OrderedDict) and "_metadata" in vars(container):
        return [*container.values(), vars(container)["_metadata"]]
    return container.values() if isinstance(container, dict) else container


def check_tree(payload: Any, where: str) -> None:
    """Refuse what a walk would never end in: containers that hold themselves, or each other many times over.

    A file of a few hundred bytes can hold either, as long as its containers are shared.

    Raises:
        CorruptCheckpoint: More than MAX_TREE_NODES values, each counted as often as it is met, or more than
            MAX_TREE_DEPTH levels.
    """
    # By identity: the container, and how often a walk would meet it at this depth. Each is opened once a level.
    level, count = {id(payload): (payload, 1)}, 1
    for _ in range(MAX_TREE_DEPTH + 2):  # its own dict, and the leaves
        below: dict[int, tuple[Any, int]] = {}
        for container, times in level.values():
            items = _items(container)
            count += times * len(items)
            if count > MAX_TREE_NODES:
                raise CorruptCheckpoint(
                    "unfolds to too many values", where=where, wanted=f"at most {MAX_TREE_NODES}"
                )
            for item in items:
                if isinstance(item, (dict, list, tuple)):
                    met = below.get(id(item))
                    below[id(item)] = (item, times if met is None else met[1] + times)
        if not below:
            return
        level = below
    raise CorruptCheckpoint("nested too deep", where=where, wanted=f"at most {MAX_TREE_DEPTH} levels")
