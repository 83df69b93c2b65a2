"""Which tensors of a component go into which of its files. Pure."""

from __future__ import annotations

import heapq
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

from ckptd.limits import MIB
from ckptd.snapshot import keypath
from ckptd.snapshot.descriptor import Sharding

#: One tensor: its number, its path below the component, its bytes, and a number that all tied to it share.
Row: TypeAlias = tuple[int, keypath.Path, int, int]

_AUTO_SHARD_BYTES: Final = 256 * MIB
_AUTO_SMALLEST_BYTES: Final = 4 * MIB
_AUTO_MOST_SHARDS: Final = 64


_to_text = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False).encode


@dataclass(slots=True)
class _Group:
    """Tensors tied to each other: one copy of the bytes, never in two files."""

    path: keypath.Path
    nbytes: int
    members: list[int] = field(default_factory=list)


def shard_key(path: keypath.Path) -> str:
    """The key of a tensor in its shard's dict, from its path below the component.

    A single string is itself, so that merged shards are a state_dict; every other path (and a string that
    looks like one) is its JSON text, which begins with "[". So keys never collide.
    """
    if len(path) == 1 and type(path[0]) is str and not path[0].startswith("["):
        return path[0]
    return _to_text(keypath.to_json(path))


def assign(rows: Sequence[Row], sharding: Sharding, *, cores: int) -> list[list[int]]:
    """The tensors of each file, as their numbers in the order of `rows`; no file is empty.

    Tensors that are tied go into one file together. "size" gives each group, largest first, to the file that
    has the fewest bytes; "round-robin" deals the groups in the order of their keys; "param-group" makes up to
    three files: names ending in .weight, in .bias, and the rest.

    Args:
        rows: The component's tensors.
        sharding: As the caller asked.
        cores: With shards="auto", the least number of files, unless they would be smaller than 4 MiB.
    """
    groups = _group(rows)
    if sharding.by == "param-group":
        files = _by_param_group(groups)
    else:
        count = _count(groups, sharding, cores)
        files = _by_size(groups, count) if sharding.by == "size" else _by_turns(groups, count)
    order = {index: at for at, (index, *_) in enumerate(rows)}
    return [
        sorted((m for group in file for m in group.members), key=order.__getitem__) for file in files if file
    ]


def _group(rows: Sequence[Row]) -> list[_Group]:
    groups: dict[int, _Group] = {}
    for index, path, nbytes, tie_group in rows:
        group = groups.get(tie_group)
        if group is None:
            group = groups[tie_group] = _Group(path, nbytes)
        group.members.append(index)
    return list(groups.values())


def _count(groups: Sequence[_Group], sharding: Sharding, cores: int) -> int:
    if sharding.shards != "auto":
        return sharding.shards
    nbytes = sum(group.nbytes for group in groups)
    by_cores = min(cores, nbytes // _AUTO_SMALLEST_BYTES)
    return max(1, min(_AUTO_MOST_SHARDS, max(-(-nbytes // _AUTO_SHARD_BYTES), by_cores)))


def _by_size(groups: Sequence[_Group], count: int) -> list[list[_Group]]:
    files: list[list[_Group]] = [[] for _ in range(count)]
    loads = [(0, number) for number in range(count)]  # a heap: the file with the fewest bytes first
    for group in sorted(groups, key=lambda group: -group.nbytes):
        nbytes, number = loads[0]
        files[number].append(group)
        heapq.heapreplace(loads, (nbytes + max(group.nbytes, 1), number))
    return files


def _by_turns(groups: Sequence[_Group], count: int) -> list[list[_Group]]:
    files: list[list[_Group]] = [[] for _ in range(count)]
    for turn, group in enumerate(sorted(groups, key=lambda group: shard_key(group.path))):
        files[turn % count].append(group)
    return files


def _by_param_group(groups: Sequence[_Group]) -> list[list[_Group]]:
    files: list[list[_Group]] = [[], [], []]
    for group in groups:
        files[_param_group(group.path)].append(group)
    return files


def _param_group(path: keypath.Path) -> int:
    # An optimizer's tensors have their parameter's name inside the path: state['h.0.weight']['exp_avg'].
    for key in reversed(path):
        last: Any = key.rpartition(".")[2] if type(key) is str else None
        if last in ("weight", "bias"):
            return 0 if last == "weight" else 1
    return 2
