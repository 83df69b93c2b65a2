"""Generators that an object makes at their first use: where one will be, and how it is made undone."""

from __future__ import annotations

from collections.abc import Iterable, Set

from ckptd.loop.loader_attributes import Holder


def place_of(holders: Iterable[Holder], path: str) -> tuple[Holder | None, str]:
    """Where it will be: an attribute that is missing or None; no holder if there is none."""
    parent, _, name = path.rpartition(".")
    for holder in holders:
        if holder.path == parent and parent and holder.makes(name):
            return (holder, name) if holder.get(name) is None else (None, name)
    return None, name


def has_place(holder: Holder, name: object) -> bool:
    """Whether a new loader has a place for what is there now and wasn't at first."""
    return holder.makes(str(name)) and holder.baseline.get(name) is None


def undo(holders: Iterable[Holder], paths: Set[str]) -> None:
    """Make the attributes at these paths what they were when the walk found their holders."""
    for holder in holders if paths else ():
        for name, _ in holder.items():
            if holder.at(name) in paths and name in holder.baseline:
                holder.set(name, holder.baseline[name])
            elif holder.at(name) in paths and isinstance(holder.of, type):
                holder.set(name, None)
            elif holder.at(name) in paths:
                holder.drop(name)
