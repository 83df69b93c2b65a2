# ruff: noqa: TID253
"""Optimizer state by parameter name: stored by it, matched by it, and loaded without changing a dtype.

`Optimizer.load_state_dict` is not used for tensor state: it matches by position and casts moments to the
parameter's dtype.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

import torch

from ckptd.errors import UnstorableState
from ckptd.snapshot import keypath
from ckptd.snapshot.keypath import Path
from ckptd.tensors.module_names import Canonical
from ckptd.tensors.optim_class import CLASS, class_of
from ckptd.tensors.optim_storable import check_state
from ckptd.tensors.registered_tags import branches_below

#: Keys of the stored form that torch's own state_dict() doesn't have: each parameter's shape, and for each
#: parameter the keys of its state that are the parameter itself (a master weight that is the weight).
SHAPES: Final = "param_shapes"
TIES: Final = "param_ties"

_POSITION = re.compile(r"#[0-9]+\.[0-9]+", re.ASCII)


class Names(dict[int, str]):
    """id(parameter) → its name. `others` has every further name of a parameter that is tied."""

    def __init__(self) -> None:
        super().__init__()
        self.others: dict[int, tuple[str, ...]] = {}


def name_parameters(state: Mapping[Any, Any]) -> Names:
    """id(parameter) → name, for every parameter of every module in the state: "model.h.0.weight".

    A tied parameter has the first of its names, and the rest in `others`: which one is first depends on the
    order of declaration. Names are unique.
    """
    names = Names()
    _name_below(state, "", names, set(), set())
    return names


def _name_below(value: Any, prefix: str, names: Names, taken: set[str], seen: set[int]) -> None:
    if isinstance(value, torch.nn.Module):
        canonical = Canonical(value)
        for raw, parameter in value.named_parameters(remove_duplicate=False):
            name, number = f"{prefix}{canonical.name(raw)}", id(parameter)
            if number not in names:
                names[number] = _unique(name, taken)
            elif name != names[number]:
                names.others[number] = (*names.others.get(number, ()), name)
        return
    if id(value) in seen:
        return
    for key, item in branches_below(value):
        seen.add(id(value))
        _name_below(item, f"{prefix}{key}.", names, taken, seen)


def _unique(name: str, taken: set[str]) -> str:
    """name, or name#2, name#3 …: `{"a": {"b": m}, "a.b": m2}` would give one name to two parameters."""
    candidate, number = name, 1
    while candidate in taken:
        number += 1
        candidate = f"{name}#{number}"
    taken.add(candidate)
    return candidate


def live_names(optimizer: Any, names: Mapping[int, str]) -> list[list[str]]:
    """The name of each parameter of each group: from a module of the state, else the optimizer's own
    `param_names`, else its position ("#0.3" is parameter 3 of group 0)."""
    result, taken, known = [], set(names.values()), dict(names)
    for number, group in enumerate(optimizer.param_groups):
        given = group.get("param_names")
        row = []
        for position, parameter in enumerate(group["params"]):
            name = known.get(id(parameter))
            if name is None:
                name = _unique(str(given[position]) if given else f"#{number}.{position}", taken)
                known[id(parameter)] = name
            row.append(name)
        result.append(row)
    return result


def held_optimizer(value: Any) -> Any:
    """The optimizer whose state value gives and takes: itself, or the one it wraps; None when there is none.

    A wrapper shows its optimizer's `param_groups` and `state`, or has exactly one optimizer as an attribute.
    """
    if isinstance(value, torch.optim.Optimizer):
        return value
    if isinstance(value, torch.nn.Module):
        return None
    groups = getattr(value, "param_groups", None)
    if isinstance(groups, list) and isinstance(getattr(value, "state", None), Mapping):
        return value
    inside = [
        part for part in getattr(value, "__dict__", {}).values() if isinstance(part, torch.optim.Optimizer)
    ]
    return inside[0] if len(inside) == 1 else None


def optimizer_to_plain(owner: Any, names: Mapping[int, str], path: Path = ("optimizer",)) -> Any:
    """The optimizer's state_dict() with parameter names in place of numbers, each parameter's shape, and the class.

    Args:
        owner: An optimizer, or any object with `state_dict`: one that wraps an optimizer and gives its state
            is stored as that. Hooks of state_dict() run. Another form, one of its own or what a hook made,
            is stored as it is given.
        names: `name_parameters(state)`.
        path: Where the owner is in the state, for errors.

    Raises:
        UnstorableState: The optimizer keeps state that can't come back as it is: under a key that torch
            takes for a parameter's, an object with a state of its own, or tensors that overlap.
    """
    stored, optimizer = owner.state_dict(), held_optimizer(owner)
    if optimizer is None or not _is_numbered(stored, optimizer.param_groups):
        return stored
    rows = live_names(optimizer, names)
    name_of = {
        number: name
        for group, row in zip(stored["param_groups"], rows, strict=True)
        for number, name in zip(group["params"], row, strict=True)
    }
    _refuse_clashes(optimizer, name_of, path)
    state = {
        name_of.get(key, key) if type(key) is int else key: item for key, item in stored["state"].items()
    }
    groups = [{**group, "params": row} for group, row in zip(stored["param_groups"], rows, strict=True)]
    parameters = {
        name: parameter
        for row, group in zip(rows, optimizer.param_groups, strict=True)
        for name, parameter in zip(row, group["params"], strict=True)
    }
    ties = check_state(state, groups, parameters, path)
    shapes = {name: list(parameter.shape) for name, parameter in parameters.items()}
    others = {key: value for key, value in stored.items() if key not in ("state", "param_groups")}
    return {
        "state": state,
        "param_groups": groups,
        SHAPES: shapes,
        CLASS: class_of(optimizer),
        **({TIES: ties} if ties else {}),
        **others,
    }


def _refuse_clashes(optimizer: Any, name_of: Mapping[int, str], path: Path) -> None:
    # torch numbers the parameters, so a key 0 of the optimizer's own silently takes a parameter's place.
    taken = {*name_of, *name_of.values()}
    clashes = [key for key in optimizer.state if not isinstance(key, torch.Tensor) and key in taken]
    if clashes:
        raise UnstorableState(
            "the optimizer keeps state under a parameter's name or number",
            where=keypath.show((*path, "state", clashes[0])),
            todo="keep it under another key",
        )


def _is_numbered(stored: Any, groups: Any) -> bool:
    """Whether stored is torch's own form, numbers for parameters, of these groups."""
    return (
        is_torch_form(stored)
        and [len(group["params"]) for group in stored["param_groups"]]
        == [len(group["params"]) for group in groups]
        and all(type(number) is int for group in stored["param_groups"] for number in group["params"])
    )


def is_torch_form(stored: Any) -> bool:
    """Whether stored looks like what torch's Optimizer.state_dict() gives."""
    return (
        isinstance(stored, Mapping)
        and isinstance(stored.get("state"), Mapping)
        and isinstance(stored.get("param_groups"), (list, tuple))
        and all(isinstance(group, Mapping) and "params" in group for group in stored["param_groups"])
    )


def is_position(name: Any) -> bool:
    """Whether a stored name only says where the parameter was: "#0.3"."""
    return isinstance(name, str) and _POSITION.fullmatch(name) is not None
