# ruff: noqa: TID253
"""Stored optimizer state that fits a live optimizer, and how it is set."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch

from ckptd.errors import StateMismatch
from ckptd.tensors.optim import SHAPES, TIES, held_optimizer, is_torch_form
from ckptd.tensors.optim_match import Match, Matching, match_parameters
from ckptd.tensors.optim_placing import Placing, can_take, rebuild, step_of_fused

_NOT_SETTINGS: Final = frozenset({"params", "param_names"})
#: How a step is computed and where its counter lives, not what was learned: a live group that has them keeps
#: its own. A run that was captured into a CUDA graph can go on without one, on the CPU, and the other way.
_LIVE_DECIDES: Final = frozenset({"capturable", "fused", "foreach", "differentiable"})
_OURS: Final = frozenset({SHAPES, TIES})


@dataclass(frozen=True, slots=True)
class OptimizerPlan:
    """A stored state that fits an optimizer; `apply` sets it.

    Attributes:
        owner: What was asked to be restored: the optimizer, or an object that wraps it.
        optimizer: Whose `state` and `param_groups` are set.
        stored: The state, after the optimizer's own load_state_dict pre-hooks.
        matches: The parameters that get state.
        groups: For each live group the stored one that its settings come from; None: it keeps its own.
        missing: Parameters that the checkpoint doesn't have, by name; they keep their state. () when strict.
        unused: Stored parameters that the live optimizer doesn't have. () when strict.
        reshaped: Parameters of another shape; they keep their state. () when strict.
    """

    owner: Any
    optimizer: Any
    stored: Mapping[str, Any]
    matches: tuple[Match, ...]
    groups: tuple[int | None, ...]
    missing: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    reshaped: tuple[str, ...] = ()

    def apply(self) -> None:
        """Set state and settings of the optimizer; state that the checkpoint doesn't have is cleared.

        Moments keep the dtype they were stored with. Tensors of the stored state become the optimizer's own.
        Settings that only the live group has keep their value; so do `capturable`, `fused`, `foreach` and
        `differentiable`. An owner with a load_state_dict of its own is given torch's form through that.
        Post-hooks of load_state_dict run at the end.
        """
        if has_own_load(self.owner):
            self._load_own()
            return
        with torch.no_grad():
            placing = Placing(self._parameters())
            self._set_groups(placing)
            self._set_state(placing)
            self._update_old_state()
        for hook in getattr(self.optimizer, "_optimizer_load_state_dict_post_hooks", {}).values():
            hook(self.optimizer)

    def _parameters(self) -> list[torch.Tensor]:
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    def _set_groups(self, placing: Placing) -> None:
        for live, number in zip(self.optimizer.param_groups, self.groups, strict=True):
            saved = {} if number is None else self.stored["param_groups"][number]
            for key, value in saved.items():
                if key not in _NOT_SETTINGS and not (key in _LIVE_DECIDES and key in live):
                    live[key] = placing.setting(live.get(key), value)

    def _set_state(self, placing: Placing) -> None:
        before, groups = self.optimizer.state, self.optimizer.param_groups
        matches = {match.stored_as: match for match in self.matches}
        theirs = {name for group in self.stored["param_groups"] for name in group["params"]}
        state: dict[Any, Any] = {}
        for name, saved in self.stored["state"].items():
            match = matches.get(name)
            if match is not None:
                old = before.get(match.parameter)
                state[match.parameter] = placing.state(saved, old, match.parameter, groups[match.group])
                self._tie(name, match.parameter, saved, state[match.parameter])
            elif name not in theirs:
                state[name] = placing.own(saved, before.get(name))
        state.update(self._kept())
        before.clear()
        before.update(state)

    def _tie(self, name: Any, parameter: torch.Tensor, saved: Any, state: Any) -> None:
        # The value itself is the module's to restore: here it only becomes the parameter again.
        for key in self.stored.get(TIES, {}).get(name, ()):
            state[key] = parameter if isinstance(saved[key], torch.nn.Parameter) else parameter.detach()

    def _kept(self) -> dict[torch.Tensor, Any]:
        """The state of parameters that the checkpoint says nothing about."""
        matched = {id(match.parameter) for match in self.matches}
        return {
            parameter: self.optimizer.state[parameter]
            for parameter in self._parameters()
            if id(parameter) not in matched and parameter in self.optimizer.state
        }

    def _update_old_state(self) -> None:
        """Let the class bring what its older versions stored (a step as a plain number) into its present form."""
        optimizer = self.optimizer
        old = any(
            isinstance(value, (int, float)) and not isinstance(value, bool)
            for state in optimizer.state.values()
            if isinstance(state, Mapping)
            for value in state.values()
        )
        own = not getattr(type(optimizer).__setstate__, "__module__", "").startswith("torch.optim")
        if (old or own) and isinstance(optimizer, torch.optim.Optimizer):
            optimizer.__setstate__({"state": optimizer.state, "param_groups": optimizer.param_groups})

    # --- owners with a load_state_dict of their own -------------------------------------------------

    def _load_own(self) -> None:
        groups = [dict(group) for group in self.optimizer.param_groups]
        self.owner.load_state_dict(self.numbered())
        with torch.no_grad():
            placing = Placing(self._parameters())
            for live, before in zip(self.optimizer.param_groups, groups, strict=True):
                for key in live.keys() & before.keys() - _NOT_SETTINGS:
                    if isinstance(before[key], torch.Tensor):
                        live[key] = placing.setting(before[key], live[key])
            self._undo_casts()

    def numbered(self) -> dict[str, Any]:
        """torch's own form in the live order; parameters without a counterpart have the state they have now."""
        number = {id(parameter): index for index, parameter in enumerate(self._parameters())}
        known = {match.stored_as: number[id(match.parameter)] for match in self.matches}
        theirs = {name for group in self.stored["param_groups"] for name in group["params"]}
        state = {
            known.get(name, name): saved
            for name, saved in self.stored["state"].items()
            if name in known or name not in theirs
        }
        state.update((number[id(parameter)], saved) for parameter, saved in self._kept().items())
        groups = [
            self._numbered_group(live, number, None if at is None else self.stored["param_groups"][at])
            for live, at in zip(self.optimizer.param_groups, self.groups, strict=True)
        ]
        others = {key: value for key, value in self.stored.items() if key not in _OURS}
        return {**others, "state": state, "param_groups": groups}

    def _numbered_group(
        self, live: Mapping[str, Any], number: Mapping[int, int], saved: Mapping[str, Any] | None
    ) -> dict[str, Any]:
        kept = {key: live[key] for key in live if key in _LIVE_DECIDES or key == "param_names"}
        params = [number[id(parameter)] for parameter in live["params"]]
        return {**live, **(saved or {}), **kept, "params": params}

    def _undo_casts(self) -> None:
        """Give moments their dtype back where an overridden load ended in torch's, which casts them."""
        for match in self.matches:
            saved, live = self.stored["state"].get(match.stored_as), self.optimizer.state.get(match.parameter)
            if isinstance(saved, Mapping) and isinstance(live, dict):
                group = self.optimizer.param_groups[match.group]
                live.update(
                    {key: _uncast(key, live[key], saved[key], group) for key in live.keys() & saved.keys()}
                )


def _uncast(key: Any, live: Any, saved: Any, group: Mapping[str, Any]) -> Any:
    def visit(key: Any, value: torch.Tensor, old: Any) -> Any:
        value = step_of_fused(key, value, group)
        cast = isinstance(old, torch.Tensor) and old.shape == value.shape and old.dtype != value.dtype
        if cast and torch.equal(_bits(old), _bits(value.to(old.device, old.dtype))):
            return value.to(old.device)
        return old

    same = type(live) is type(saved)
    return (
        rebuild(saved, live, visit, key)
        if same and isinstance(saved, (torch.Tensor, list, tuple, dict))
        else live
    )


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def has_own_load(owner: Any) -> bool:
    """Whether owner takes its state in a way of its own, not by torch's Optimizer.load_state_dict."""
    return getattr(owner.load_state_dict, "__func__", None) is not torch.optim.Optimizer.load_state_dict


def match_optimizer(
    owner: Any, names: Mapping[int, str], stored: Any, *, strict: bool = True
) -> OptimizerPlan:
    """Find for every parameter of the optimizer its stored state; nothing is changed.

    Load pre-hooks of the optimizer run here, on a copy in torch's own form and in the live order, so that
    what they make of it is checked too.

    Args:
        owner: The live optimizer, or an object that wraps one.
        names: `ckptd.tensors.optim.name_parameters(state)`.
        stored: What `optimizer_to_plain` gave, or torch's own state_dict() (matched by position).
        strict: False tolerates other names, shapes and groups, and lists them in the plan.

    Raises:
        StateMismatch: Other groups, names or shapes; `faults` lists each. When not strict: nothing says which
            parameter is which, or owner has no optimizer.
    """
    optimizer = held_optimizer(owner)
    if optimizer is None:
        raise _mismatch(["there is no optimizer to take it"])
    stored = _through_hooks(owner, optimizer, names, stored)
    if not _is_state(stored):
        raise _mismatch(["not the state of an optimizer"])
    found = match_parameters(optimizer, names, stored)
    if found.fatal or (strict and found.faults):
        raise _mismatch(found.fatal or found.faults)
    return OptimizerPlan(
        owner, optimizer, stored, found.matches, found.groups, found.missing, found.unused, found.reshaped
    )


def _is_state(stored: Any) -> bool:
    return is_torch_form(stored) and all(
        isinstance(group["params"], (list, tuple))
        and all(isinstance(name, (str, int)) for name in group["params"])
        for group in stored["param_groups"]
    )


def _through_hooks(owner: Any, optimizer: Any, names: Mapping[int, str], stored: Any) -> Any:
    hooks = getattr(optimizer, "_optimizer_load_state_dict_pre_hooks", None)
    if not hooks or has_own_load(owner) or not isinstance(stored, Mapping):
        return stored
    given, ties = dict(stored), None
    if SHAPES in stored and _is_state(stored):
        found = match_parameters(optimizer, names, stored)
        given, ties = _for_hooks(optimizer, found, stored)
    for hook in hooks.values():
        changed = hook(optimizer, given)
        given = given if changed is None else changed
    return {**given, TIES: ties} if ties and isinstance(given, Mapping) else given


def _for_hooks(
    optimizer: Any, found: Matching, stored: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[int, list[str]] | None]:
    """torch's own form of stored, in the live order where everything fits: the form that hooks are written for."""
    if not found.faults:
        plan = OptimizerPlan(optimizer, optimizer, stored, found.matches, found.groups)
        number = {match.stored_as: index for index, match in enumerate(found.matches)}
        return plan.numbered(), {number[name]: keys for name, keys in stored.get(TIES, {}).items()}
    names = [name for group in stored["param_groups"] for name in group["params"]]
    number = {name: index for index, name in enumerate(names)}
    groups = [{**group, "params": [number[n] for n in group["params"]]} for group in stored["param_groups"]]
    state = {number.get(name, name): saved for name, saved in stored["state"].items()}
    others = {key: value for key, value in stored.items() if key not in _OURS}
    return {**others, "state": state, "param_groups": groups}, None


def _mismatch(faults: list[str] | tuple[str, ...]) -> StateMismatch:
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
