# ruff: noqa: TID253
"""Stored optimizer state matched to the parameters of a live optimizer by name, checked, then set."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch

from ckptd.errors import StateMismatch
from ckptd.tensors.optim import SHAPES, is_position, is_torch_form, live_names

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
_NOT_SETTINGS: Final = frozenset({"params", "param_names"})


@dataclass(frozen=True, slots=True)
class Match:
    """One live parameter, the name (or number) its state is stored under, and its group."""

    parameter: torch.Tensor
    stored_as: Any
    live_as: str
    group: int


@dataclass(frozen=True, slots=True)
class OptimizerPlan:
    """A stored state that fits an optimizer; `apply` sets it."""

    optimizer: torch.optim.Optimizer
    stored: Mapping[str, Any]
    matches: tuple[Match, ...]

    def apply(self) -> None:
        """Set state and settings of the optimizer; state that the checkpoint doesn't have is cleared.

        Moments keep the dtype they were stored with. Tensors of the stored state become the optimizer's own.
        """
        if type(self.optimizer).load_state_dict is not torch.optim.Optimizer.load_state_dict:
            self.optimizer.load_state_dict(self._numbered())
            return
        with torch.no_grad():
            self._set_state()
            self._set_groups()

    def _set_state(self) -> None:
        state, groups = self.stored["state"], self.optimizer.param_groups
        for match in self.matches:
            saved = state.get(match.stored_as)
            if not saved:
                self.optimizer.state.pop(match.parameter, None)
                continue
            before = self.optimizer.state.get(match.parameter, {})
            self.optimizer.state[match.parameter] = {
                key: _placed(key, value, before.get(key), match.parameter, groups[match.group])
                for key, value in saved.items()
            }
        others = state.keys() - {match.stored_as for match in self.matches}
        for key in [key for key in self.optimizer.state if not isinstance(key, torch.Tensor)]:
            if key not in others:
                del self.optimizer.state[key]
        for key in others:
            self.optimizer.state[key] = state[key]

    def _set_groups(self) -> None:
        for live, saved in zip(self.optimizer.param_groups, self.stored["param_groups"], strict=True):
            for key, value in saved.items():
                if key not in _NOT_SETTINGS:
                    live[key] = _setting(live.get(key), value)

    def _numbered(self) -> dict[str, Any]:
        """torch's own form, in the live order: what an overridden load_state_dict expects."""
        number = {match.stored_as: index for index, match in enumerate(self.matches)}
        groups: list[dict[str, Any]] = [{**group, "params": []} for group in self.stored["param_groups"]]
        for match in self.matches:
            groups[match.group]["params"].append(number[match.stored_as])
        state = {number.get(key, key): value for key, value in self.stored["state"].items()}
        others = {key: value for key, value in self.stored.items() if key != SHAPES}
        return {**others, "state": state, "param_groups": groups}


def match_optimizer(optimizer: torch.optim.Optimizer, names: Mapping[int, str], stored: Any) -> OptimizerPlan:
    """Find for every parameter of the optimizer its stored state; nothing is changed.

    Args:
        optimizer: The live one.
        names: `ckptd.tensors.optim.name_parameters(state)`.
        stored: What `optimizer_to_plain` gave, or torch's own state_dict() (matched by position).

    Raises:
        StateMismatch: Other groups, names or shapes; `seen` lists each fault.
    """
    if not is_torch_form(stored):
        raise _mismatch(["not the state of an optimizer"])
    live = live_names(optimizer, names)
    saved = [list(group["params"]) for group in stored["param_groups"]]
    if len(live) != len(saved):
        raise _mismatch([f"{len(saved)} parameter groups, the live optimizer has {len(live)}"])
    pairs = _by_position(live, saved) if _unnamed(live) or _unnamed(saved) else _by_name(live, saved)
    matches = tuple(
        Match(optimizer.param_groups[group]["params"][position], stored_as, live[group][position], group)
        for group, position, stored_as in pairs
    )
    faults = [fault for match in matches for fault in _shape_faults(match, stored)]
    if faults:
        raise _mismatch(faults)
    return OptimizerPlan(optimizer, stored, matches)


def _unnamed(rows: list[list[Any]]) -> bool:
    flat = [name for row in rows for name in row]
    return all(type(name) is int or is_position(name) for name in flat)


def _by_position(live: list[list[str]], saved: list[list[Any]]) -> Iterator[tuple[int, int, Any]]:
    faults = [
        f"group {number} has {len(theirs)} parameters, the live one {len(ours)}"
        for number, (ours, theirs) in enumerate(zip(live, saved, strict=True))
        if len(ours) != len(theirs)
    ]
    if faults:
        raise _mismatch(faults)
    return ((group, position, name) for group, row in enumerate(saved) for position, name in enumerate(row))


def _by_name(live: list[list[str]], saved: list[list[Any]]) -> Iterator[tuple[int, int, Any]]:
    group_of = {name: number for number, row in enumerate(saved) for name in row}
    faults = []
    for number, row in enumerate(live):
        for name in row:
            if name not in group_of:
                faults.append(f"{name} is not in the checkpoint")
            elif group_of[name] != number:
                faults.append(f"{name} is in group {group_of[name]}, live in group {number}")
    known = {name for row in live for name in row}
    faults += [
        f"{name} is in the checkpoint, not in the live optimizer" for name in group_of if name not in known
    ]
    if faults:
        raise _mismatch(faults)
    return ((group, position, name) for group, row in enumerate(live) for position, name in enumerate(row))


def _shape_faults(match: Match, stored: Mapping[str, Any]) -> list[str]:
    wanted = list(match.parameter.shape)
    shapes = stored.get(SHAPES)
    if isinstance(shapes, Mapping):
        seen = shapes.get(match.stored_as)
        return (
            []
            if seen is None or list(seen) == wanted
            else [f"{match.live_as} has shape {list(seen)}, live {wanted}"]
        )
    saved = stored["state"].get(match.stored_as) or {}
    return [
        f"{match.live_as}: {key} has shape {list(value.shape)}, the parameter {wanted}"
        for key, value in saved.items()
        if key in _LIKE_PARAMETER and isinstance(value, torch.Tensor) and list(value.shape) != wanted
    ]


def _mismatch(faults: list[str]) -> StateMismatch:
    return StateMismatch(
        "the optimizer doesn't fit",
        seen=shorten(faults),
        todo="make the optimizer over the same parameters and groups as when it was saved",
    )


def shorten(faults: list[str], most: int = 20) -> str:
    """The faults in one line, the first `most` of them."""
    text = "; ".join(faults[:most])
    return text if len(faults) <= most else f"{text}; and {len(faults) - most} more"


def _placed(key: Any, value: Any, before: Any, parameter: torch.Tensor, group: Mapping[str, Any]) -> Any:
    """A stored value on the device torch's own load picks, in the tensor already there if it fits."""
    if isinstance(value, torch.Tensor):
        on_device = key != "step" or group.get("capturable") or group.get("fused")
        return into(before, value.to(parameter.device if on_device else "cpu"))
    if isinstance(value, (list, tuple)):
        return type(value)(_placed(key, item, None, parameter, group) for item in value)
    if isinstance(value, dict):
        return {name: _placed(name, item, None, parameter, group) for name, item in value.items()}
    return value


def into(before: Any, value: torch.Tensor) -> torch.Tensor:
    """value, written into `before` when that is a tensor of its kind: others may hold it (CUDA graphs do)."""
    same = (
        isinstance(before, torch.Tensor)
        and before.shape == value.shape
        and before.dtype == value.dtype
        and before.device == value.device
        and before.stride() == value.stride()
    )
    return before.copy_(value) if same else value


def _setting(before: Any, value: Any) -> Any:
    if (
        isinstance(before, torch.Tensor)
        and before.numel() == 1
        and not isinstance(value, (list, tuple, dict, str))
    ):
        if isinstance(value, torch.Tensor):
            return into(before, value.to(before.device))
        return before.fill_(value) if isinstance(value, (int, float)) else value
    return value
