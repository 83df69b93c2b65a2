# ruff: noqa: TID253
"""Which stored parameter each live one is: by name, else by position; and everything that doesn't fit."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeAlias

import torch

from ckptd.tensors.optim import SHAPES, is_position, live_names

#: State that has the shape of its parameter, in torch's optimizers: checked where no shapes were stored.
_LIKE_PARAMETER: Final = frozenset(
    {
        "exp_avg",
        "exp_avg_sq",
        "max_exp_avg_sq",
        "exp_inf",
        "momentum_buffer",
        "sum",
        "square_avg",
        "acc_delta",
        "prev",
        "ax",
    }
)
#: What schedulers and names put into a group.
_OF_SCHEDULERS: Final = frozenset(
    {"params", "param_names", "initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr"}
)
#: A name, or ("#", group, which of the unnamed in it) for a parameter that has none.
_Key: TypeAlias = Any


class Match(NamedTuple):
    """One live parameter, the name (or number) its state is stored under, and its group in both."""

    parameter: torch.Tensor
    stored_as: Any
    live_as: str
    group: int
    stored_group: int


@dataclass(frozen=True, slots=True)
class Matching:
    """What fits, and what doesn't.

    Attributes:
        matches: Every live parameter that has a stored counterpart of its shape, in the live order.
        groups: For each live group the stored one that its settings come from; None: none.
        missing: Live parameters that the checkpoint doesn't have.
        unused: Stored parameters that the live optimizer doesn't have.
        reshaped: Live parameters whose stored counterpart has another shape.
        faults: What refuses a strict restore, each in words; empty when everything fits.
        fatal: What refuses any restore.
    """

    matches: tuple[Match, ...]
    groups: tuple[int | None, ...]
    missing: tuple[str, ...]
    unused: tuple[str, ...]
    reshaped: tuple[str, ...]
    faults: tuple[str, ...]
    fatal: tuple[str, ...] = ()


def match_parameters(optimizer: Any, names: Mapping[int, str], stored: Mapping[str, Any]) -> Matching:
    """Find the stored counterpart of every parameter of the optimizer. Nothing is changed.

    Args:
        optimizer: The live one, or what shows its `param_groups`.
        names: `ckptd.tensors.optim.name_parameters(state)`.
        stored: In torch's form, with names or numbers for parameters.
    """
    live = live_names(optimizer, names)
    saved = [list(group["params"]) for group in stored["param_groups"]]
    faults = (
        [f"{len(saved)} parameter groups, the live optimizer has {len(live)}"]
        if len(saved) != len(live)
        else []
    )
    if _unnamed(live) or _unnamed(saved):
        return _by_position(optimizer, live, saved, stored, faults)
    return _by_name(optimizer, names, live, stored, faults)


def _unnamed(rows: Sequence[Sequence[Any]]) -> bool:
    return all(type(name) is int or is_position(name) for row in rows for name in row)


def _by_position(
    optimizer: Any,
    live: list[list[str]],
    saved: list[list[Any]],
    stored: Mapping[str, Any],
    faults: list[str],
) -> Matching:
    faults = faults or [
        f"group {number} has {len(theirs)} parameters, the live one {len(ours)}"
        for number, (ours, theirs) in enumerate(zip(live, saved, strict=True))
        if len(ours) != len(theirs)
    ]
    if faults:
        # Without names only equal counts say that the same parameter stands at the same place.
        return Matching((), (), (), (), (), tuple(faults), tuple(faults))
    pairs = [
        Match(
            optimizer.param_groups[number]["params"][position], name, live[number][position], number, number
        )
        for number, row in enumerate(saved)
        for position, name in enumerate(row)
    ]
    return _checked(optimizer, pairs, [], [], stored, faults)


def _by_name(
    optimizer: Any,
    names: Mapping[int, str],
    live: list[list[str]],
    stored: Mapping[str, Any],
    faults: list[str],
) -> Matching:
    rows, keys = _common_names(optimizer, live, stored)
    where = {
        key: (number, name)
        for number, (group, row) in enumerate(zip(stored["param_groups"], rows, strict=True))
        for key, name in zip(row, group["params"], strict=True)
    }
    others = getattr(names, "others", {})
    pairs, missing = [], []
    for number, (group, ours, shown) in enumerate(zip(optimizer.param_groups, keys, live, strict=True)):
        for parameter, key, name in zip(group["params"], ours, shown, strict=True):
            found = next((k for k in (key, *others.get(id(parameter), ())) if k in where), None)
            if found is None:
                missing.append(name)
            else:
                pairs.append(Match(parameter, where[found][1], name, number, where[found][0]))
    matched = {match.stored_as for match in pairs}
    unused = [str(name) for _, name in where.values() if name not in matched]
    faults += [f"{name} is not in the checkpoint" for name in missing]
    if len(rows) == len(live):
        faults += [
            f"{match.live_as} is in group {match.stored_group}, live in group {match.group}"
            for match in pairs
            if match.group != match.stored_group
        ]
    faults += [f"{name} is in the checkpoint, not in the live optimizer" for name in unused]
    return _checked(optimizer, pairs, missing, unused, stored, faults)


def _common_names(
    optimizer: Any, live: list[list[str]], stored: Mapping[str, Any]
) -> tuple[list[list[_Key]], list[list[_Key]]]:
    """Stored and live rows of names to compare: the parameters' own, else both sides' `param_names`.

    With the model in the one state and only the optimizer in the other, the former have a prefix more.
    """
    saved = [list(group["params"]) for group in stored["param_groups"]]
    theirs, ours = _given_names(stored["param_groups"]), _given_names(optimizer.param_groups)
    if theirs is not None and ours is not None and (theirs == saved) != (ours == live):
        return theirs, ours
    return _ranked(saved), _ranked(live)


def _given_names(groups: Sequence[Mapping[str, Any]]) -> list[list[_Key]] | None:
    rows = [group.get("param_names") for group in groups]
    if all(
        isinstance(row, (list, tuple)) and len(row) == len(group["params"])
        for row, group in zip(rows, groups, strict=True)
    ):
        return [list(map(str, row or ())) for row in rows]
    return None


def _ranked(rows: Sequence[Sequence[Any]]) -> list[list[_Key]]:
    """Positions counted among the unnamed of their group: named ones before them may be declared otherwise."""
    result: list[list[_Key]] = []
    for number, row in enumerate(rows):
        unnamed = 0
        result.append([])
        for name in row:
            if type(name) is int or is_position(name):
                result[-1].append(("#", number, unnamed))
                unnamed += 1
            else:
                result[-1].append(name)
    return result


def _checked(
    optimizer: Any,
    pairs: list[Match],
    missing: list[str],
    unused: list[str],
    stored: Mapping[str, Any],
    faults: list[str],
) -> Matching:
    wrong = {number: fault for number, match in enumerate(pairs) if (fault := _shape_fault(match, stored))}
    fits = tuple(match for number, match in enumerate(pairs) if number not in wrong)
    reshaped = [pairs[number].live_as for number in wrong]
    faults = [*faults, *wrong.values()]
    if (faults or not _same_order(fits, stored)) and _spans_parameters(optimizer, stored):
        faults = faults or ["its state is one vector over all parameters, and they are in another order"]
        missing, fits = [match.live_as for match in fits] + missing, ()
    groups = _settings_from(len(optimizer.param_groups), pairs, stored)
    return Matching(fits, groups, tuple(missing), tuple(unused), tuple(reshaped), tuple(faults))


def _spans_parameters(optimizer: Any, stored: Mapping[str, Any]) -> bool:
    """Whether there is state that lays all parameters end to end, as LBFGS keeps it with the first of them.

    Other classes of that kind are known by a vector as long as all parameters together.
    """
    inside = (optimizer, *getattr(optimizer, "__dict__", {}).values())
    if any(isinstance(part, torch.optim.LBFGS) for part in inside):
        return bool(stored["state"])
    shapes = stored.get(SHAPES)
    if not isinstance(shapes, Mapping):
        return False
    sizes = {name: math.prod(shape) for name, shape in shapes.items()}
    total = sum(sizes.values())
    return any(
        size != total and _holds_vector(stored["state"].get(name), total, 0) for name, size in sizes.items()
    )


def _holds_vector(value: Any, length: int, depth: int) -> bool:
    if isinstance(value, torch.Tensor):
        return value.dim() == 1 and value.numel() == length > 1
    if isinstance(value, (Mapping, list, tuple)) and depth < 3:
        items = value.values() if isinstance(value, Mapping) else value
        return any(_holds_vector(item, length, depth + 1) for item in items)
    return False


def _same_order(matches: Sequence[Match], stored: Mapping[str, Any]) -> bool:
    return [match.stored_as for match in matches] == [
        name for group in stored["param_groups"] for name in group["params"]
    ]


def _settings_from(count: int, pairs: list[Match], stored: Mapping[str, Any]) -> tuple[int | None, ...]:
    if len(stored["param_groups"]) == count:
        return tuple(range(count))
    found: list[set[int]] = [set() for _ in range(count)]
    for match in pairs:
        found[match.group].add(match.stored_group)
    return tuple(next(iter(each)) if len(each) == 1 else None for each in found)


def _shape_fault(match: Match, stored: Mapping[str, Any]) -> str | None:
    wanted, shapes = list(match.parameter.shape), stored.get(SHAPES)
    if isinstance(shapes, Mapping):
        seen = list(shapes.get(match.stored_as, wanted))
        return None if seen == wanted else f"{match.live_as} has shape {seen}, live {wanted}"
    saved = stored["state"].get(match.stored_as)
    for key, value in saved.items() if isinstance(saved, Mapping) else ():
        if key in _LIKE_PARAMETER and isinstance(value, torch.Tensor) and list(value.shape) != wanted:
            return f"{match.live_as}: {key} has shape {list(value.shape)}, the parameter {wanted}"
    return None


def faults_of_another_class(
    optimizer: torch.optim.Optimizer, groups: Sequence[Mapping[str, Any]]
) -> list[str]:
    """How the settings say that another class of optimizer was saved; nothing when they may be this one's.

    A newer torch adds settings, and so does a user: either alone is fine. Settings of this class that weren't stored
    beside stored ones that it doesn't know are another class's. (Adam and AdamW have the same ones.)
    """
    own = set(getattr(optimizer, "defaults", ()))  # what only looks like an optimizer may have none
    known = own.union(*(group.keys() for group in optimizer.param_groups))
    stored = set().union(*(group.keys() for group in groups))
    lacking, foreign = sorted(own - stored), sorted(stored - known - _OF_SCHEDULERS)
    if not (groups and lacking and foreign):
        return []
    return [
        f"another class was saved: its groups have {', '.join(map(str, foreign))}, "
        f"{type(optimizer).__qualname__} has {', '.join(map(str, lacking))}"
    ]
