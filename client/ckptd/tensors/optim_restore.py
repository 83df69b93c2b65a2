# ruff: noqa: TID253
"""Stored optimizer state checked against a live optimizer: the plan that sets it, or what doesn't fit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ckptd.errors import StateMismatch
from ckptd.tensors.optim import SHAPES, held_optimizer
from ckptd.tensors.optim_class import CLASS, OtherClass, compare_class
from ckptd.tensors.optim_hooks import has_load_hooks, through_hooks
from ckptd.tensors.optim_match import Matching, match_form
from ckptd.tensors.optim_placing import can_take
from ckptd.tensors.optim_plan import OptimizerPlan
from ckptd.tensors.optim_plan import has_own_load as has_own_load


def match_optimizer(
    owner: Any, names: Mapping[int, str], stored: Any, *, strict: bool = True
) -> OptimizerPlan:
    """Find for every parameter of the optimizer its stored state; nothing is changed.

    Load pre-hooks of the optimizer run here, on a copy in torch's own form and in the live order, so that
    what they make of it is checked too. They may adapt what wouldn't fit, which they get in the stored order: what they
    leave as it was is refused all the same.

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
    found = match_form(optimizer, names, stored)
    recorded, hooked = stored.get(CLASS) if isinstance(stored, Mapping) else None, False
    if has_own_load(owner):
        if found is not None and _is_of_its_own(stored, found):
            return OptimizerPlan(owner, optimizer, stored, (), (), as_given=True)
    elif isinstance(stored, Mapping) and has_load_hooks(optimizer):
        stored, found, hooked = through_hooks(optimizer, names, stored, found, strict=strict)
    if found is None:
        raise _mismatch(["not the state of an optimizer"])
    other = compare_class(optimizer, recorded, stored["param_groups"], may_adapt=hooked)
    if found.fatal or (strict and (found.faults or other.faults)):
        raise _mismatch(found.fatal or (*found.faults, *other.faults), strict_only=not found.fatal)
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


def _is_of_its_own(stored: Mapping[str, Any], found: Matching) -> bool:
    """Whether stored only looks like torch's form: names that we didn't give, or other groups than those shown."""
    numbered = all(type(name) is int for group in stored["param_groups"] for name in group["params"])
    return SHAPES not in stored and (not numbered or bool(found.fatal))


def _mismatch(faults: Sequence[str], *, strict_only: bool = False) -> StateMismatch:
    return StateMismatch(
        "the optimizer doesn't fit",
        seen=shorten(list(faults)),
        todo="make the optimizer over the same parameters and groups as when it was saved",
        faults=tuple(faults),
        strict_only=strict_only,
    )


def shorten(faults: list[str], most: int = 20) -> str:
    """The faults in one line, the first `most` of them."""
    text = "; ".join(faults[:most])
    return text if len(faults) <= most else f"{text}; and {len(faults) - most} more"


def into(before: Any, value: torch.Tensor) -> torch.Tensor:
    """value, written into `before` when that is a tensor of its kind: others may hold it (CUDA graphs do)."""
    taken: torch.Tensor = before.copy_(value) if can_take(before, value, value.device) else value
    return taken
