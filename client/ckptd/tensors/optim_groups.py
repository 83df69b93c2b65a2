# ruff: noqa: TID253
"""Which stored group a live parameter group has its settings from: the one that held its parameters, by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy
import torch

#: What a group has besides its settings.
NOT_SETTINGS: Final = frozenset({"params", "param_names"})
#: How a step is computed and where its counter lives, not what was learned: a live group that has them keeps
#: its own. A run that was captured into a CUDA graph can go on without one, on the CPU, and the other way.
LIVE_DECIDES: Final = frozenset({"capturable", "fused", "foreach", "differentiable"})
_BY_NUMBER: Final = (
    "what else goes by a group's number, as a scheduler's rates do, doesn't follow the parameters"
)


class Match(NamedTuple):
    """One live parameter, the name (or number) its state is stored under, and its group in both."""

    parameter: torch.Tensor
    stored_as: Any
    live_as: str
    group: int
    stored_group: int


class Grouping(NamedTuple):
    """How the groups correspond.

    Attributes:
        sources: For each live group the stored one that its settings come from; None: it keeps its own.
        faults: How the groups differ, each in words; they refuse a strict restore.
        taken: What becomes of the settings of groups that differ, each in words.
    """

    sources: tuple[int | None, ...]
    faults: tuple[str, ...] = ()
    taken: tuple[str, ...] = ()


def count_faults(live: int, stored: int) -> tuple[str, ...]:
    """The fault of another number of groups, if it is one."""
    return () if stored == live else (f"{stored} parameter groups, the live optimizer has {live}",)


def group_by_name(
    live: Sequence[Mapping[str, Any]],
    stored: Sequence[Mapping[str, Any]],
    pairs: Sequence[Match],
    *,
    whole: bool,
) -> Grouping:
    """The grouping of parameters that were found by name.

    A group whose parameters were in several groups of other settings keeps its own: none of those is all its
    parameters'.

    Args:
        live: The live parameter groups.
        stored: The stored ones.
        pairs: The parameters found, of whatever shape.
        whole: Whether every parameter, live and stored, is among them.
    """
    held = _held(live, stored, pairs)
    sources = tuple(_source(numbers, stored) for numbers in held)
    faults = count_faults(len(live), len(stored)) or _moved(held, sources, pairs, whole=whole)
    taken = [said for n, group in enumerate(live) if (said := _taken(n, group, stored, held[n], sources[n]))]
    left = sorted(set(range(len(stored))) - {number for numbers in held for number in numbers})
    taken += [
        f"the settings of the checkpoint's group {n} are not taken: no live group has its parameters"
        for n in left
    ]
    elsewhere = any(source not in (None, number) for number, source in enumerate(sources))
    if elsewhere and not any(_BY_NUMBER in fault for fault in faults):
        taken.append(_BY_NUMBER)
    return Grouping(sources, faults, tuple(taken))


def group_by_position(
    live: Sequence[Mapping[str, Any]], stored: Sequence[Mapping[str, Any]], reshaped: set[int]
) -> Grouping:
    """The grouping of parameters without names: each group is that of its number, unless shapes speak against it.

    Args:
        live: The live parameter groups.
        stored: The stored ones, as many.
        reshaped: Numbers of the groups that have a parameter of another shape.
    """
    sources = tuple(None if number in reshaped else number for number in range(len(live)))
    taken = [
        f"group {n} keeps its own settings{_differences(live[n], stored, [n])}: its parameters have no names, and "
        f"other shapes than those of the checkpoint's group {n}"
        for n in sorted(reshaped)
    ]
    return Grouping(sources, (), tuple(taken))


def _held(
    live: Sequence[Mapping[str, Any]], stored: Sequence[Mapping[str, Any]], pairs: Sequence[Match]
) -> list[list[int]]:
    """For each live group the stored ones that have its parameters."""
    found: list[set[int]] = [set() for _ in live]
    for match in pairs:
        found[match.group].add(match.stored_group)
    if len(live) == len(stored):
        for number, group in enumerate(live):
            if not group["params"] and not stored[number]["params"]:
                found[number].add(number)  # without parameters it has nothing but its place
    return [sorted(numbers) for numbers in found]


def _source(numbers: list[int], stored: Sequence[Mapping[str, Any]]) -> int | None:
    """The group that stands for all of them, whose settings must be the same; None when there is none."""
    same = all(_same(_settings(stored[numbers[0]]), _settings(stored[number])) for number in numbers)
    return numbers[0] if numbers and same else None


def _moved(
    held: list[list[int]], sources: tuple[int | None, ...], pairs: Sequence[Match], *, whole: bool
) -> tuple[str, ...]:
    moved = [match for match in pairs if match.group != match.stored_group]
    if moved and whole and sorted(held) == [[number] for number in range(len(held))]:
        # The optimizer alone could take them exactly. A scheduler has its rates by number, and needn't be in the state.
        order = ", ".join(str(source) for source in sources)
        return (f"the groups are in another order (saved as {order}): {_BY_NUMBER}",)
    return tuple(f"{one.live_as} is in group {one.stored_group}, live in group {one.group}" for one in moved)


def _taken(
    number: int,
    live: Mapping[str, Any],
    stored: Sequence[Mapping[str, Any]],
    held: list[int],
    source: int | None,
) -> str | None:
    if held == [number]:
        return None
    if not held:
        none = "none of its parameters is in the checkpoint" if live["params"] else "it has no parameters"
        return f"group {number} keeps its own settings: {none}"
    numbers = _listed(held)
    if source is not None:
        why = "which has its parameters" if len(held) == 1 else "which have its parameters and are the same"
        return f"group {number} takes the settings of the checkpoint's {numbers}, {why}"
    return (
        f"group {number} keeps its own settings{_differences(live, stored, held)}: its parameters are in the "
        f"checkpoint's {numbers}"
    )


def _listed(numbers: list[int]) -> str:
    if len(numbers) == 1:
        return f"group {numbers[0]}"
    return f"groups {', '.join(map(str, numbers[:-1]))} and {numbers[-1]}"


def _differences(live: Mapping[str, Any], stored: Sequence[Mapping[str, Any]], numbers: list[int]) -> str:
    """ " (lr 0.7, in group 0 0.1, in group 1 0.2)": what isn't the same in the live group and all of those."""
    parts = []
    for key in dict.fromkeys(
        key for group in (live, *(stored[n] for n in numbers)) for key in _settings(group)
    ):
        if any(not _same(stored[n].get(key), live.get(key)) for n in numbers):
            theirs = ", ".join(f"in group {n} {_shown(stored[n].get(key))}" for n in numbers)
            parts.append(f"{key} {_shown(live.get(key))}, {theirs}")
    return f" ({'; '.join(parts)})" if parts else ""


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in NOT_SETTINGS | LIVE_DECIDES}


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one.cpu(), other.cpu())
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(_same, one, other))
    return type(one) is type(other) and bool(numpy.array_equal(one, other))


def _shown(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return repr(value.item()) if value.numel() == 1 else f"a tensor of shape {list(value.shape)}"
    if isinstance(value, (list, tuple)):
        return f"({', '.join(map(_shown, value))})"
    return repr(value)[:40]
