# ruff: noqa: TID253
"""Stored optimizer state checked against a live optimizer: the plan that sets it, or what doesn't fit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from ckptd.errors import StateMismatch
from ckptd.tensors.optim import SHAPES, TIES, held_optimizer, is_torch_form
from ckptd.tensors.optim_class import CLASS, OtherClass, compare_class
from ckptd.tensors.optim_match import Matching, match_parameters
from ckptd.tensors.optim_placing import can_take
from ckptd.tensors.optim_plan import OURS, OptimizerPlan
from ckptd.tensors.optim_plan import has_own_load as has_own_load


def match_optimizer(
    owner: Any, names: Mapping[int, str], stored: Any, *, strict: bool = True
) -> OptimizerPlan:
    """Find for every parameter of the optimizer its stored state; nothing is changed.

    Load pre-hooks of the optimizer run here, on a copy in torch's own form and in the live order, so that
    what they make of it is checked too. They may adapt what wouldn't fit; they get that in the stored order.

    Args:
        owner: The live optimizer, or an object that wraps one.
        names: `ckptd.tensors.optim.name_parameters(state)`.
        stored: What `optimizer_to_plain` gave, or torch's own state_dict() (matched by position). What else
            looks like that goes to the owner's own load_state_dict as it is.
        strict: False tolerates other names, shapes, groups and classes, and lists them in the plan.

    Raises:
        StateMismatch: Other groups, names, shapes, or another class; `faults` lists each. When not strict:
            nothing says which parameter is which, or owner has no optimizer.
    """
    optimizer = held_optimizer(owner)
    if optimizer is None:
        raise _mismatch(["there is no optimizer to take it"])
    found = _matching(optimizer, names, stored)
    recorded, hooked = stored.get(CLASS) if isinstance(stored, Mapping) else None, False
    if has_own_load(owner):
        if found is not None and _is_of_its_own(stored, found):
            return OptimizerPlan(owner, optimizer, stored, (), (), as_given=True)
    elif isinstance(stored, Mapping) and getattr(optimizer, "_optimizer_load_state_dict_pre_hooks", None):
        first, stored = found, _through_hooks(optimizer, stored, found, strict=strict)
        found, hooked = _with_lists_of(first, _matching(optimizer, names, stored), strict=strict), True
    if found is None:
        raise _mismatch(["not the state of an optimizer"])
    other = compare_class(optimizer, recorded, stored["param_groups"], may_adapt=hooked)
    if found.fatal or (strict and (found.faults or other.faults)):
        raise _mismatch(found.fatal or (*found.faults, *other.faults))
    return _planned(owner, optimizer, stored, found, other)


def _planned(
    owner: Any, optimizer: Any, stored: Mapping[str, Any], found: Matching, other: OtherClass
) -> OptimizerPlan:
    return OptimizerPlan(
        owner,
        optimizer,
        stored,
        found.matches,
        found.groups,
        missing=found.missing,
        unused=found.unused,
        reshaped=found.reshaped,
        tolerated=(*found.regrouped, *other.faults),
        warnings=other.warnings,
    )


def _matching(optimizer: Any, names: Mapping[int, str], stored: Any) -> Matching | None:
    """None when stored isn't the state of any optimizer."""
    if not is_torch_form(stored):
        return None
    rows = [group["params"] for group in stored["param_groups"]]
    if not all(isinstance(row, (list, tuple)) for row in rows):
        return None
    if not all(isinstance(name, (str, int)) for row in rows for name in row):
        return None
    return match_parameters(optimizer, names, stored)


def _is_of_its_own(stored: Mapping[str, Any], found: Matching) -> bool:
    """Whether stored only looks like torch's form: names that we didn't give, or other groups than those shown."""
    numbered = all(type(name) is int for group in stored["param_groups"] for name in group["params"])
    return SHAPES not in stored and (not numbered or bool(found.fatal))


def _through_hooks(optimizer: Any, stored: Mapping[str, Any], found: Matching | None, *, strict: bool) -> Any:
    given, ties = dict(stored), {}
    if SHAPES in stored and found is not None:
        if not found.fatal and not (strict and found.faults):
            plan = OptimizerPlan(optimizer, optimizer, stored, found.matches, found.groups)
            given, ties = plan.numbered(), plan.numbered_ties()
        else:
            given = _numbered_as_stored(stored)
    for hook in optimizer._optimizer_load_state_dict_pre_hooks.values():
        changed = hook(optimizer, given)
        given = given if changed is None else changed
    return {**given, TIES: ties} if ties and isinstance(given, Mapping) else given


def _numbered_as_stored(stored: Mapping[str, Any]) -> dict[str, Any]:
    names = [name for group in stored["param_groups"] for name in group["params"]]
    number = {name: index for index, name in enumerate(names)}
    groups = [{**group, "params": [number[n] for n in group["params"]]} for group in stored["param_groups"]]
    state = {number.get(name, name): saved for name, saved in stored["state"].items()}
    others = {key: value for key, value in stored.items() if key not in OURS}
    return {**others, "state": state, "param_groups": groups}


def _with_lists_of(first: Matching | None, found: Matching | None, *, strict: bool) -> Matching | None:
    # After hooks parameters have numbers, and those without a counterpart the state that they had.
    if strict or first is None or found is None:
        return found
    return replace(
        found,
        missing=first.missing + found.missing,
        unused=first.unused + found.unused,
        reshaped=first.reshaped + found.reshaped,
        regrouped=first.regrouped + found.regrouped,
    )


def _mismatch(faults: Sequence[str]) -> StateMismatch:
    return StateMismatch(
        "the optimizer doesn't fit",
        seen=shorten(list(faults)),
        todo="make the optimizer over the same parameters and groups as when it was saved",
        faults=tuple(faults),
    )


def shorten(faults: list[str], most: int = 20) -> str:
    """The faults in one line, the first `most` of them."""
    text = "; ".join(faults[:most])
    return text if len(faults) <= most else f"{text}; and {len(faults) - most} more"


def into(before: Any, value: torch.Tensor) -> torch.Tensor:
    """value, written into `before` when that is a tensor of its kind: others may hold it (CUDA graphs do)."""
    taken: torch.Tensor = before.copy_(value) if can_take(before, value, value.device) else value
    return taken
