# ruff: noqa: TID253
"""Optimizer state by parameter name: stored by it, matched by it, and loaded without changing a dtype.

`Optimizer.load_state_dict` is not used for tensor state: it matches by position and casts moments to the
parameter's dtype.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch

from ckptd.errors import UnstorableState
from ckptd.tensors.module_names import named_parameters

#: Key of the parameters' shapes in the stored form; torch's own state_dict() has none.
SHAPES = "param_shapes"

_POSITION = re.compile(r"#[0-9]+\.[0-9]+", re.ASCII)


def name_parameters(state: Mapping[Any, Any]) -> dict[int, str]:
    """id(parameter) → name, for every parameter of every module in the state: "model.h.0.weight".

    A tied parameter has the first of its names. Names are unique.
    """
    names: dict[int, str] = {}
    taken: set[str] = set()
    _name_below(state, "", names, taken, set())
    return names


def _name_below(value: Any, prefix: str, names: dict[int, str], taken: set[str], seen: set[int]) -> None:
    if isinstance(value, torch.nn.Module):
        for name, parameter in named_parameters(value):
            if id(parameter) not in names:
                names[id(parameter)] = _unique(f"{prefix}{name}", taken)
        return
    if id(value) in seen or not isinstance(value, (Mapping, list, tuple)):
        return
    seen.add(id(value))
    items = value.items() if isinstance(value, Mapping) else enumerate(value)
    for key, item in items:
        _name_below(item, f"{prefix}{key}.", names, taken, seen)


def _unique(name: str, taken: set[str]) -> str:
    """name, or name#2, name#3 …: `{"a": {"b": m}, "a.b": m2}` would give one name to two parameters."""
    candidate, number = name, 1
    while candidate in taken:
        number += 1
        candidate = f"{name}#{number}"
    taken.add(candidate)
    return candidate


def live_names(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> list[list[str]]:
    """The name of each parameter of each group: from a module of the state, else the optimizer's own
    `param_names`, else its position ("#0.3" is parameter 3 of group 0)."""
    result, taken = [], set(names.values())
    for number, group in enumerate(optimizer.param_groups):
        given = group.get("param_names")
        row = []
        for position, parameter in enumerate(group["params"]):
            name = names.get(id(parameter))
            if name is None:
                name = _unique(str(given[position]) if given else f"#{number}.{position}", taken)
            row.append(name)
        result.append(row)
    return result


def optimizer_to_plain(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> dict[str, Any]:
    """The optimizer's state_dict() with parameter names in place of numbers, and each parameter's shape.

    An optimizer that overrides state_dict() with a form of its own is stored as it gives it.

    Raises:
        UnstorableState: The optimizer keeps state under a key that is also a parameter's name.
    """
    stored = optimizer.state_dict()
    rows = live_names(optimizer, names)
    flat = [name for row in rows for name in row]
    if not is_torch_form(stored) or [len(group["params"]) for group in stored["param_groups"]] != list(
        map(len, rows)
    ):
        return stored
    name_of = {
        number: name
        for group, row in zip(stored["param_groups"], rows, strict=True)
        for number, name in zip(group["params"], row, strict=True)
    }
    state = {
        name_of.get(key, key) if type(key) is int else key: value for key, value in stored["state"].items()
    }
    if len(state) != len(stored["state"]):
        raise UnstorableState(
            "the optimizer keeps state under a parameter's name",
            where="optimizer",
            seen=str(sorted(flat))[:200],
        )
    groups = [{**group, "params": row} for group, row in zip(stored["param_groups"], rows, strict=True)]
    shapes = {
        name: list(parameter.shape)
        for row, group in zip(rows, optimizer.param_groups, strict=True)
        for name, parameter in zip(row, group["params"], strict=True)
    }
    others = {key: value for key, value in stored.items() if key not in ("state", "param_groups")}
    return {"state": state, "param_groups": groups, SHAPES: shapes, **others}


def is_torch_form(stored: Any) -> bool:
    """Whether stored looks like what torch's Optimizer.state_dict() gives."""
    return (
        isinstance(stored, Mapping)
        and isinstance(stored.get("state"), Mapping)
        and isinstance(stored.get("param_groups"), (list, tuple))
        and all(isinstance(group, Mapping) and "params" in group for group in stored["param_groups"])
    )


def moment_bytes_to_come(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of moments still to be made: two fp32 tensors a trained parameter, three with amsgrad."""
    total = 0
    for group in optimizer.param_groups:
        count = 3 if group.get("amsgrad") else 2
        for parameter in group["params"]:
            if parameter.requires_grad and not optimizer.state.get(parameter):
                total += count * parameter.numel() * max(4, parameter.itemsize) + 64
    return total


def is_position(name: Any) -> bool:
    """Whether a stored name only says where the parameter was: "#0.3"."""
    return isinstance(name, str) and _POSITION.fullmatch(name) is not None
