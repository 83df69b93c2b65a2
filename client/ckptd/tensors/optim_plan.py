# ruff: noqa: TID253
"""Stored optimizer state that fits a live optimizer, and how it is set there."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from ckptd.snapshot import keypath
from ckptd.snapshot.keypath import Path
from ckptd.tensors.optim import SHAPES, TIES
from ckptd.tensors.optim_class import CLASS
from ckptd.tensors.optim_groups import LIVE_DECIDES, NOT_SETTINGS, Match
from ckptd.tensors.optim_placing import Placing, Rehearsal, rebuild, step_of_fused
from ckptd.tensors.optim_setting import roundings

#: What the stored form has beyond torch's own.
OURS: Final = frozenset({SHAPES, TIES, CLASS})


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
        tolerated: Other groups and another class, each in words. () when strict.
        warnings: What is worth a warning, each in words.
        as_given: The owner's load_state_dict takes stored as it is: a form of its own.
        arrived: Ids of the live tensors whose stored bytes are in them already; `apply` leaves those alone.
    """

    owner: Any
    optimizer: Any
    stored: Mapping[str, Any]
    matches: tuple[Match, ...]
    groups: tuple[int | None, ...]
    missing: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    reshaped: tuple[str, ...] = ()
    tolerated: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    as_given: bool = False
    arrived: set[int] = field(default_factory=set)

    def apply(self) -> None:
        """Set state and settings of the optimizer; state that the checkpoint doesn't have is cleared.

        Moments keep the dtype they were stored with. Tensors of the stored state become the optimizer's own.
        Settings that only the live group has keep their value; so do `capturable`, `fused`, `foreach` and
        `differentiable`. An owner with a load_state_dict of its own is given torch's form through that.
        Post-hooks of load_state_dict run at the end.
        """
        if self.as_given:
            self.owner.load_state_dict(self.stored)
            return
        if has_own_load(self.owner):
            self._load_own()
            return
        with torch.no_grad():
            placing = Placing(self._parameters(), self.arrived)
            for group, key, value in self._new_settings(placing):
                group[key] = value
            state = self._new_state(placing)
            self.optimizer.state.clear()
            self.optimizer.state.update(state)
            self._update_old_state()
        for hook in getattr(self.optimizer, "_optimizer_load_state_dict_post_hooks", {}).values():
            hook(self.optimizer)

    def _parameters(self) -> list[torch.Tensor]:
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    def written(self) -> list[tuple[torch.Tensor, torch.Tensor, bool]]:
        """The live tensors that `apply` will write into, with what, and whether each write is a copy of bytes alone.

        [] where the owner loads in a way of its own. Settings are computed with.
        """
        if self.as_given or has_own_load(self.owner):
            return []
        with torch.no_grad():
            placing = Rehearsal(self._parameters())
            for _ in self._new_settings(placing):
                pass
            settings = len(placing.written)
            self._new_state(placing)
        return [(*pair, number >= settings) for number, pair in enumerate(placing.written)]

    def _new_settings(self, placing: Placing) -> Iterator[tuple[dict[str, Any], str, Any]]:
        """Group, key and value, one at a time: each is to be set before the next."""
        first: dict[int | None, Any] = {}
        for live, number in zip(self.optimizer.param_groups, self.groups, strict=True):
            other = first.setdefault(number, live)
            for key, value in self._settings(live, number):
                yield live, key, placing.setting(live.get(key), _own(key, value, live, other))

    def _settings(self, live: Mapping[str, Any], number: int | None) -> list[tuple[str, Any]]:
        saved = {} if number is None else self.stored["param_groups"][number]
        return [
            (key, value)
            for key, value in saved.items()
            if key not in NOT_SETTINGS and not (key in LIVE_DECIDES and key in live)
        ]

    def rounded(self, path: Path) -> Iterator[str]:
        """Which settings a live tensor can't hold as they were stored, each in words.

        Args:
            path: Where the owner is in the state.
        """
        for at, (live, number) in enumerate(zip(self.optimizer.param_groups, self.groups, strict=False)):
            for key, value in self._settings(live, number):
                where = (*path, "param_groups", at, key)
                for place, stored, held, dtype in roundings(live.get(key), value, where):
                    yield (
                        f"{keypath.show(place)}: {stored!r} was stored, and the live {dtype} tensor holds {held!r}, so "
                        "training goes on with that; to go on exactly make the live one a number or a wider tensor"
                    )

    def placed(self) -> Iterator[tuple[Any, Any]]:
        """Stored and live values side by side, once `apply` is done."""
        for live, number in zip(self.optimizer.param_groups, self.groups, strict=False):
            for key, value in self._settings(live, number):
                yield value, live.get(key)
        live_keys = {match.stored_as: match.parameter for match in self.matches}
        for name, saved in self.stored["state"].items() if self.matches else ():
            yield saved, self.optimizer.state.get(live_keys.get(name, name))

    def _new_state(self, placing: Placing) -> dict[Any, Any]:
        before, groups = self.optimizer.state, self.optimizer.param_groups
        matches = {match.stored_as: match for match in self.matches}
        theirs = {name for group in self.stored["param_groups"] for name in group["params"]}
        state: dict[Any, Any] = {}
        for name, saved in self.stored["state"].items():
            match = matches.get(name)
            if match is not None:
                old = before.get(match.parameter)
                state[match.parameter] = placing.state(saved, old, match.parameter, groups[match.group])
                self._tie(match, saved, state[match.parameter])
            elif name not in theirs:
                state[name] = placing.own(saved, before.get(name))
        return {**state, **self._kept()}

    def _tie(self, match: Match, saved: Any, state: Any) -> None:
        # The value itself is the module's to restore: here it only becomes the parameter again.
        for key in self.stored.get(TIES, {}).get(match.stored_as, ()):
            as_it_is = isinstance(saved[key], torch.nn.Parameter)
            state[key] = match.parameter if as_it_is else match.parameter.detach()

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
                for key in live.keys() & before.keys() - NOT_SETTINGS:
                    if isinstance(before[key], (torch.Tensor, tuple)) or isinstance(live[key], torch.Tensor):
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
        first: dict[int | None, Any] = {}
        groups = [
            self._numbered_group(live, number, at, first.setdefault(at, live))
            for live, at in zip(self.optimizer.param_groups, self.groups, strict=True)
        ]
        others = {key: value for key, value in self.stored.items() if key not in OURS}
        return {**others, "state": state, "param_groups": groups}

    def numbered_ties(self) -> dict[int, Any]:
        """The ties of the stored form, by the numbers that `numbered` gives."""
        number = {id(parameter): index for index, parameter in enumerate(self._parameters())}
        ties = self.stored.get(TIES, {})
        return {number[id(m.parameter)]: ties[m.stored_as] for m in self.matches if m.stored_as in ties}

    def _numbered_group(
        self, live: Mapping[str, Any], number: Mapping[int, int], at: int | None, other: Mapping[str, Any]
    ) -> dict[str, Any]:
        stored = {} if at is None else self.stored["param_groups"][at]
        saved = {key: _own(key, value, live, other) for key, value in stored.items()}
        kept = {key: live[key] for key in live if key in LIVE_DECIDES or key == "param_names"}
        params = [number[id(parameter)] for parameter in live["params"]]
        return {**live, **saved, **kept, "params": params}

    def _undo_casts(self) -> None:
        """Give moments their dtype back where an overridden load ended in torch's, which casts them."""
        for match in self.matches:
            saved, live = self.stored["state"].get(match.stored_as), self.optimizer.state.get(match.parameter)
            if isinstance(saved, Mapping) and isinstance(live, dict):
                group = self.optimizer.param_groups[match.group]
                live.update(
                    {key: _uncast(key, live[key], saved[key], group) for key in live.keys() & saved.keys()}
                )
                self._tie(match, saved, live)


def _own(key: Any, value: Any, live: Mapping[str, Any], other: Mapping[str, Any]) -> Any:
    """value; a copy where other has taken it and the two live groups don't hold one object: they went apart."""
    return value if live.get(key) is other.get(key) else copy.deepcopy(value)


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
