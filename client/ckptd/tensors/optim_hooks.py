# ruff: noqa: TID253
"""The load pre-hooks of an optimizer: what they are given, and what of it they really changed.

Hooks see torch's own form, in which parameters are numbers. So what comes out of them says nothing of which parameter
is which: what they leave as it was is judged by the names and shapes that it was stored with.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from ckptd.tensors.optim import SHAPES, TIES, is_torch_form
from ckptd.tensors.optim_match import Matching, match_form
from ckptd.tensors.optim_plan import OURS, OptimizerPlan


class Hooked(NamedTuple):
    """What load pre-hooks made of a stored state.

    Attributes:
        stored: The state after them.
        found: How it fits; None when it isn't the state of any optimizer.
        changed: Whether they changed anything. What they do within a tensor isn't seen.
    """

    stored: Any
    found: Matching | None
    changed: bool


class _Given(NamedTuple):
    """What hooks are given, and what they aren't told: all by the numbers in it.

    Attributes:
        form: torch's own form.
        names: The name of each number.
        number_of: id(live parameter) → the number of its counterpart.
        shapes: Shapes that were stored with the state.
        ties: The ties of the stored form.
    """

    form: dict[str, Any]
    names: Sequence[Any]
    number_of: Mapping[int, int]
    shapes: Mapping[int, Any]
    ties: Mapping[int, Any]


def has_load_hooks(optimizer: Any) -> bool:
    return bool(getattr(optimizer, "_optimizer_load_state_dict_pre_hooks", None))


def through_hooks(
    optimizer: Any,
    names: Mapping[int, str],
    stored: Mapping[str, Any],
    first: Matching | None,
    *,
    strict: bool,
) -> Hooked:
    """Let the optimizer's load pre-hooks adapt a stored state, and match what they made of it.

    What fits they get in the live order, what doesn't in the stored order. A fault that they don't mend stands: a
    parameter gets no other's state because both are numbers now.

    Args:
        optimizer: The live one. It isn't changed, unless by a hook itself.
        names: `ckptd.tensors.optim.name_parameters(state)`.
        stored: As `match_optimizer` takes it; it isn't changed.
        first: How it fits before the hooks.
        strict: As for `match_optimizer`.
    """
    if first is None or SHAPES not in stored:  # no names of ours are lost: it is matched as before
        result, changed = _run(optimizer, dict(stored) if first is None else _copied(stored))
        return Hooked(result, match_form(optimizer, names, result), changed)
    fits = not first.fatal and not (strict and first.faults)
    given = _in_live_order(optimizer, stored, first) if fits else _in_stored_order(stored, first)
    entries, rows = _outline(given.form["state"]), _rows(given.form)
    result, changed = _run(optimizer, given.form)
    if not is_torch_form(result):
        return Hooked(result, None, changed)
    result = {**result, **_ours(given, entries, result["state"])}
    if not fits and _rows(result) == rows:
        result = _named(given, result)
        return Hooked(result, match_form(optimizer, names, result), changed)
    found = match_form(optimizer, names, result)
    if found is not None and not first.fatal:
        found = _judged(first, found, given, strict=strict)
    return Hooked(result, found, changed)


def _run(optimizer: Any, form: dict[str, Any]) -> tuple[Any, bool]:
    before, given = _outline(form), form
    for hook in optimizer._optimizer_load_state_dict_pre_hooks.values():
        made = hook(optimizer, given)
        given = given if made is None else made
    return given, not _is_as(before, given)


# --- what they are given ----------------------------------------------------------------------------


def _in_live_order(optimizer: Any, stored: Mapping[str, Any], first: Matching) -> _Given:
    plan = OptimizerPlan(optimizer, optimizer, stored, first.matches, first.groups)
    live = [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
    shown = {id(match.parameter): match.live_as for match in first.pairs}
    number_of = {one: number for number, one in enumerate(live)}
    names = [shown.get(one, number) for number, one in enumerate(live)]
    return _Given(_copied(plan.numbered()), names, number_of, {}, plan.numbered_ties())


def _in_stored_order(stored: Mapping[str, Any], first: Matching) -> _Given:
    names = [name for group in stored["param_groups"] for name in group["params"]]
    number = {name: index for index, name in enumerate(names)}
    groups = [{**group, "params": [number[n] for n in group["params"]]} for group in stored["param_groups"]]
    state = {number.get(name, name): saved for name, saved in stored["state"].items()}
    others = {key: value for key, value in stored.items() if key not in OURS}
    number_of = {id(match.parameter): number[match.stored_as] for match in first.pairs}
    shapes = {number[name]: shape for name, shape in stored[SHAPES].items() if name in number}
    ties = {number[name]: keys for name, keys in stored.get(TIES, {}).items() if name in number}
    form = _copied({**others, "state": state, "param_groups": groups})
    return _Given(form, names, number_of, shapes, ties)


def _copied(form: Mapping[str, Any]) -> dict[str, Any]:
    """form with containers of its own: a hook may change them, also those of live state that is kept."""
    state = {
        key: copy.copy(saved) if isinstance(saved, Mapping) else saved for key, saved in form["state"].items()
    }
    groups = [{**group, "params": list(group["params"])} for group in form["param_groups"]]
    return {**form, "state": state, "param_groups": groups}


# --- what they made of it ---------------------------------------------------------------------------


def _rows(form: Mapping[str, Any]) -> list[list[Any]]:
    return [list(group["params"]) for group in form["param_groups"]]


def _ours(given: _Given, before: Mapping[Any, Any], state: Mapping[Any, Any]) -> dict[str, Any]:
    """The stored form's own keys, of what the hooks left as it was."""
    shapes = {n: shape for n, shape in given.shapes.items() if not _is_made_anew(before.get(n), state.get(n))}
    ties = {n: [key for key in keys if key in state[n]] for n, keys in given.ties.items() if n in state}
    return {SHAPES: shapes, TIES: ties}


def _named(given: _Given, result: Mapping[str, Any]) -> dict[str, Any]:
    """result with the stored names for the numbers that stand where they stood."""
    name = dict(enumerate(given.names))
    by_name = {
        key: {name.get(number, number): value for number, value in result[key].items()}
        for key in ("state", SHAPES, TIES)
    }
    groups = [{**group, "params": [name[n] for n in group["params"]]} for group in result["param_groups"]]
    return {**result, **by_name, "param_groups": groups}


def _judged(first: Matching, found: Matching, given: _Given, *, strict: bool) -> Matching:
    moved = tuple(_misplaced(found, given))
    if strict:
        first_faults = first.faults if moved else ()
        return replace(found, faults=(*dict.fromkeys((*first_faults, *moved, *found.faults)),))
    # Parameters have numbers now, and those without a counterpart the state that they had.
    return replace(
        found,
        missing=first.missing + found.missing,
        unused=first.unused + found.unused,
        reshaped=first.reshaped + found.reshaped,
        regrouped=first.regrouped + found.regrouped + moved,
    )


def _misplaced(found: Matching, given: _Given) -> Iterator[str]:
    """Live parameters that would get, by their place, what another had; a number that a hook made is its own affair."""
    for match in found.pairs:
        number, wanted = match.stored_as, given.number_of.get(id(match.parameter))
        known = type(number) is int and 0 <= number < len(given.names)
        if number != wanted and (known or wanted is not None):
            seen = given.names[number] if known else number
            yield f"{match.live_as} stands where the load pre-hooks put what {seen} had"


def _is_made_anew(before: Any, after: Any) -> bool:
    """Whether a hook has made the state of a parameter anew: nothing of it says what shape it has then."""
    kept = {id(tensor) for tensor in _tensors(before) if tensor.numel() > 1}
    return not (_is_as(before, after) or any(id(tensor) in kept for tensor in _tensors(after)))


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (Mapping, list, tuple)):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors(item)


def _outline(value: Any) -> Any:
    """value's containers made anew, with what is in them: to tell later whether they were changed."""
    if isinstance(value, Mapping):
        return {key: _outline(item) for key, item in value.items()}
    return [_outline(item) for item in value] if isinstance(value, (list, tuple)) else value


def _is_as(before: Any, value: Any) -> bool:
    """Whether value is what _outline gave `before` of."""
    if isinstance(before, Mapping):
        same = isinstance(value, Mapping) and before.keys() == value.keys()
        return same and all(_is_as(item, value[key]) for key, item in before.items())
    if isinstance(before, list):
        same = isinstance(value, (list, tuple)) and len(before) == len(value)
        return same and all(map(_is_as, before, value))
    plain = isinstance(before, (bool, int, float, str)) and type(before) is type(value)
    return before is value or (plain and bool(before == value))
