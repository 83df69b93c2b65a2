# ruff: noqa: TID253
"""Which stored parameter each live one is: by name, else by position; and everything that doesn't fit."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import torch

from ckptd.tensors.optim import SHAPES, is_position, is_torch_form, live_names
from ckptd.tensors.optim_groups import (
    Grouping,
    Match,
    count_faults,
    group_by_name,
    group_by_position,
)

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
#: A name, or ("#", group, which of the unnamed in it) for a parameter that has none.
_Key: TypeAlias = Any

_WITHOUT_NAMES: Final = (
    "where names are unknown, in the checkpoint or here, only equal numbers say which parameter is which, so strict=False "
    "doesn't take it either: put the module into the state, before it is saved too"
)
_SPANS: Final = "its state is one vector over all parameters, and they are"


@dataclass(frozen=True, slots=True)
class Matching:
    """What fits, and what doesn't.

    Attributes:
        matches: Every live parameter that has a stored counterpart of its shape, in the live order.
        groups: For each live group the stored one that its settings come from; None: it keeps its own.
        missing: Live parameters that the checkpoint doesn't have.
        unused: Stored parameters that the live optimizer doesn't have.
        reshaped: Live parameters whose stored counterpart has another shape.
        faults: What refuses a strict restore, each in words; empty when everything fits.
        fatal: What refuses any restore.
        regrouped: For a restore that isn't strict, each in words: how the groups differ and whose settings are taken; why
            state that spans all parameters is left out.
        pairs: Every live parameter that has a stored counterpart, of whatever shape.
    """

    matches: tuple[Match, ...]
    groups: tuple[int | None, ...]
    missing: tuple[str, ...]
    unused: tuple[str, ...]
    reshaped: tuple[str, ...]
    faults: tuple[str, ...]
    fatal: tuple[str, ...] = ()
    regrouped: tuple[str, ...] = ()
    pairs: tuple[Match, ...] = ()


def match_form(optimizer: Any, names: Mapping[int, str], stored: Any) -> Matching | None:
    """`match_parameters` of what may be anything; None when it isn't the state of any optimizer."""
    if not is_torch_form(stored):
        return None
    rows = [group["params"] for group in stored["param_groups"]]
    if not all(isinstance(row, (list, tuple)) for row in rows):
        return None
    if not all(isinstance(name, (str, int)) for row in rows for name in row):
        return None
    return match_parameters(optimizer, names, stored)


def match_parameters(optimizer: Any, names: Mapping[int, str], stored: Mapping[str, Any]) -> Matching:
    """Find the stored counterpart of every parameter of the optimizer. Nothing is changed.

    Args:
        optimizer: The live one, or what shows its `param_groups`.
        names: `ckptd.tensors.optim.name_parameters(state)`.
        stored: In torch's form, with names or numbers for parameters.
    """
    live = live_names(optimizer, names)
    saved = [list(group["params"]) for group in stored["param_groups"]]
    if _unnamed(live) or _unnamed(saved):
        return _by_position(optimizer, live, saved, stored)
    return _by_name(optimizer, names, live, stored)


def _unnamed(rows: Sequence[Sequence[Any]]) -> bool:
    return all(type(name) is int or is_position(name) for row in rows for name in row)


def _by_position(
    optimizer: Any,
    live: list[list[str]],
    saved: list[list[Any]],
    stored: Mapping[str, Any],
) -> Matching:
    faults = count_faults(len(live), len(saved)) or tuple(
        f"group {number} has {len(theirs)} parameters, the live one {len(ours)}"
        for number, (ours, theirs) in enumerate(zip(live, saved, strict=True))
        if len(ours) != len(theirs)
    )
    if faults:
        faults = (*faults, _WITHOUT_NAMES)
        return Matching((), (), (), (), (), faults, faults)
    pairs = [
        Match(
            optimizer.param_groups[number]["params"][position], name, live[number][position], number, number
        )
        for number, row in enumerate(saved)
        for position, name in enumerate(row)
    ]
    reshaped = {match.group for match in pairs if _shape_fault(match, stored)}
    grouping = group_by_position(optimizer.param_groups, stored["param_groups"], reshaped)
    return _checked(optimizer, pairs, [], [], stored, grouping)


def _by_name(
    optimizer: Any, names: Mapping[int, str], live: list[list[str]], stored: Mapping[str, Any]
) -> Matching:
    rows, keys = _common_names(optimizer, live, stored)
    where = {
        key: (number, name)
        for number, (group, row) in enumerate(zip(stored["param_groups"], rows, strict=True))
        for key, name in zip(row, group["params"], strict=True)
    }
    others, steady = getattr(names, "others", {}), _steady(rows, keys, where)
    pairs, missing = [], []
    for number, (group, ours, shown) in enumerate(zip(optimizer.param_groups, keys, live, strict=True)):
        for parameter, key, name in zip(group["params"], ours, shown, strict=True):
            found = next((k for k in (key, *others.get(id(parameter), ())) if k in where), None)
            if found is None or (_is_rank(found) and number not in steady):
                missing.append(name)
            else:
                pairs.append(Match(parameter, where[found][1], name, number, where[found][0]))
    matched = {match.stored_as for match in pairs}
    unused = [str(name) for _, name in where.values() if name not in matched]
    whole = not (missing or unused)
    grouping = group_by_name(optimizer.param_groups, stored["param_groups"], pairs, whole=whole)
    return _checked(optimizer, pairs, missing, unused, stored, grouping)


def _steady(
    rows: Sequence[Sequence[_Key]], keys: Sequence[Sequence[_Key]], where: Mapping[_Key, tuple[int, Any]]
) -> set[int]:
    """Groups where a place says which unnamed parameter is which: as many in both, and the named ones were in it."""
    return {
        number
        for number, (theirs, ours) in enumerate(zip(rows, keys, strict=False))
        if sum(map(_is_rank, theirs)) == sum(map(_is_rank, ours))
        and all(where[key][0] == number for key in ours if key in where)
    }


def _is_rank(key: _Key) -> bool:
    return isinstance(key, tuple)


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
    grouping: Grouping,
) -> Matching:
    wrong = {number: fault for number, match in enumerate(pairs) if (fault := _shape_fault(match, stored))}
    fits = tuple(match for number, match in enumerate(pairs) if number not in wrong)
    reshaped = [pairs[number].live_as for number in wrong]
    faults = [*grouping.faults]
    faults += [f"{name} is not in the checkpoint" for name in missing]
    faults += [f"{name} is in the checkpoint, not in the live optimizer" for name in unused]
    faults += wrong.values()
    regrouped = (*grouping.faults, *grouping.taken)
    if (faults or not _same_order(fits, stored)) and _spans_parameters(optimizer, stored):
        faults, fits = faults or [f"{_SPANS} in another order"], ()
        regrouped = (*regrouped, f"{_SPANS} not the same ones in the same order: it was left out")
    lists = (tuple(missing), tuple(unused), tuple(reshaped), tuple(faults))
    return Matching(fits, grouping.sources, *lists, regrouped=regrouped, pairs=tuple(pairs))


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


def _shape_fault(match: Match, stored: Mapping[str, Any]) -> str | None:
    wanted, shapes = list(match.parameter.shape), stored.get(SHAPES)
    if isinstance(shapes, Mapping) and match.stored_as in shapes:
        seen = list(shapes[match.stored_as])
        return None if seen == wanted else f"{match.live_as} has shape {seen}, live {wanted}"
    saved = stored["state"].get(match.stored_as)
    for key, value in saved.items() if isinstance(saved, Mapping) else ():
        if key in _LIKE_PARAMETER and isinstance(value, torch.Tensor) and list(value.shape) != wanted:
            return f"{match.live_as}: {key} has shape {list(value.shape)}, the parameter {wanted}"
    return None
