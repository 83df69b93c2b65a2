# ruff: noqa: TID253
"""Restoring a module: names compared without what wrappers add, then its own load_state_dict."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from ckptd.snapshot.keypath import Path
from ckptd.tensors.module_names import Canonical
from ckptd.tensors.rehearsal import rehearse, translates
from ckptd.tensors.restore_findings import Findings, Write
from ckptd.tensors.restore_tensor import plan_module_tensor
from ckptd.tensors.tags import type_name
from ckptd.tensors.unread import Unread


def plan_module(found: Findings, live: torch.nn.Module, stored: Any, path: Path) -> Write:
    """The write of a module; parameters and buffers stay the objects they are.

    `requires_grad`, the device and what state_dict() leaves out (non-persistent buffers) stay the live side's.
    """
    now = live.state_dict()
    if not isinstance(now, Mapping):
        found.problem(
            path, f"gives {type_name(now)} by state_dict() and has no load_state_dict() of its own for it"
        )
        return lambda: live
    if not isinstance(stored, Mapping):
        return found.wrong_kind(live, stored, path)
    names = Canonical(live)
    given, own = names.back(stored, now), _own_tensors(live)
    fit = _Fit(names, path, own, now, given)
    if not fit.is_whole() and fit.translated(live, found.unread):
        left_alone: set[str] = set()  # load_state_dict has said that it takes the state as it is
        fit.report(found)
    else:
        left_alone = fit.report(found, own if loads_plainly(live) else {})
    rest = OrderedDict((name, value) for name, value in given.items() if name not in left_alone)
    if hasattr(given, "_metadata"):
        rest._metadata = given._metadata  # type: ignore[attr-defined]

    def write() -> Any:
        # A plain module: nothing else would be done, and torch goes through all names once for each of its parts.
        if fit.arrived and fit.arrived == rest.keys():
            with torch.no_grad():
                for name in fit.arrived:
                    own[name].copy_(own[name])  # nothing but a new version
            return live
        rest.update((name, own[name]) for name in fit.arrived)
        overridden = type(live).load_state_dict is not torch.nn.Module.load_state_dict
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Casting complex values to real")  # which was said by name
            if overridden and found.strict:
                live.load_state_dict(rest)
            else:
                # The names were compared above; torch refuses too late, and refuses what hooks have left out.
                live.load_state_dict(rest, strict=False)
        return live

    return write


def has_own_form(live: torch.nn.Module) -> bool:
    """Whether a module gives and takes a form that is its own, so that only its own load_state_dict can judge it.

    That is when it overrides both methods and what it gives is no dict, or holds anything but its parameters, buffers
    and extra states: by their names, or as they lie in memory.
    """
    plain = torch.nn.Module
    if type(live).state_dict is plain.state_dict or type(live).load_state_dict is plain.load_state_dict:
        return False
    now, own = live.state_dict(), _own_tensors(live)
    if not isinstance(now, Mapping):
        return True
    places = {_place(tensor) for tensor in own.values()}
    return not all(
        name in own or _is_extra(name, own) or (isinstance(value, torch.Tensor) and _place(value) in places)
        for name, value in now.items()
    )


def own_form_for(live: torch.nn.Module, stored: Any) -> Any:
    """A form of its own as the module gave it: by the names that wrappers inside of it have now."""
    now = live.state_dict()
    if not (isinstance(stored, Mapping) and isinstance(now, Mapping)):
        return stored
    given = Canonical(live).back(stored, [name for name in now if isinstance(name, str)])
    return stored if list(given) == list(stored) else given


def loads_plainly(live: torch.nn.Module) -> bool:
    """Whether load_state_dict does nothing but copy each value, as it is, into the tensor of its name."""
    return (
        type(live).load_state_dict is torch.nn.Module.load_state_dict
        and not torch.__future__.get_swap_module_params_on_conversion()
        and all(map(_loads_plainly_itself, live.modules()))
    )


def _loads_plainly_itself(part: torch.nn.Module) -> bool:
    plain, kind = torch.nn.Module, type(part)
    load = kind._load_from_state_dict
    return (
        not part._load_state_dict_pre_hooks
        and not part._load_state_dict_post_hooks
        and kind.set_extra_state is plain.set_extra_state
        # torch's own layers only add what old checkpoints lack.
        and (load is plain._load_from_state_dict or load.__module__.startswith("torch.nn.modules."))
        and vars(part).keys().isdisjoint(("load_state_dict", "_load_from_state_dict", "set_extra_state"))
        and not isinstance(part, torch.jit.ScriptModule)
    )


def _own_tensors(live: torch.nn.Module) -> dict[Any, torch.Tensor]:
    tensors: dict[Any, torch.Tensor] = dict(live.named_parameters(remove_duplicate=False))
    return tensors | dict(live.named_buffers(remove_duplicate=False))


def _is_extra(name: Any, own: Mapping[Any, torch.Tensor]) -> bool:
    """Whether what get_extra_state() gave has this name: whatever it is, set_extra_state() takes it."""
    return isinstance(name, str) and name.rpartition(".")[2] == "_extra_state" and name not in own


def _place(tensor: torch.Tensor) -> Any:
    if is_lazy(tensor):
        return id(tensor)
    return tensor.data_ptr() if tensor.numel() and not tensor.is_meta else None, tensor.shape, tensor.dtype


class _Fit:
    """The names of a module and of a stored state side by side."""

    def __init__(
        self, names: Canonical, path: Path, own: Mapping[Any, torch.Tensor],
        now: Mapping[str, Any], given: Mapping[str, Any],
    ) -> None:  # fmt: skip
        self._names, self._path, self._now, self._given = names, path, now, given
        self._missing = [name for name in now if name not in given]
        self._unused = [name for name in given if name not in now]
        self._pairs = [
            (name, now[name], value)
            for name, value in given.items()
            if name in now and isinstance(now[name], torch.Tensor) and not _is_extra(name, own)
        ]
        self._resized: frozenset[str] = frozenset()
        self.arrived: set[str] = set()  # names whose stored bytes are in the live tensors already

    def is_whole(self) -> bool:
        """Whether each name has its counterpart, and each tensor one of its shape."""
        shapes = all(
            isinstance(value, torch.Tensor) and _shape(live) in (None, value.shape)
            for _, live, value in self._pairs
        )
        return shapes and not self._missing and not self._unused

    def translated(self, live: torch.nn.Module, unread: Unread) -> bool:
        """Whether the module itself makes more of the state than its names say; then that is what counts."""
        if translates(live):
            unread.need(self._given)
        rehearsed = rehearse(live, self._given)
        if rehearsed is None:
            return False
        self._missing, self._unused = list(rehearsed.missing), list(rehearsed.unused)
        self._resized = rehearsed.resized
        self._pairs = [(name, self._now.get(name), value) for name, value in rehearsed.writes.items()]
        return True

    def report(self, found: Findings, plain: Mapping[str, torch.Tensor] | None = None) -> set[str]:
        """Enter what doesn't fit into found; returns the names that are to be left alone.

        plain has the live tensors that get nothing but their stored bytes.
        """
        for name in self._missing:
            found.missing_at(self._shown(name))
        for name in self._unused:
            found.unused_at(self._shown(name))
        return {
            name
            for name, live, value in self._pairs
            if isinstance(live, torch.Tensor)
            and not plan_module_tensor(
                found,
                live,
                value,
                self._shown(name),
                resized=name in self._resized,
                arrived=self._arrival(name, live, plain or {}),
            )
        }

    def _arrival(
        self, name: str, live: torch.Tensor, plain: Mapping[str, torch.Tensor]
    ) -> Callable[[], None] | None:
        own = plain.get(name)
        if own is None or type(own) not in (torch.Tensor, torch.nn.Parameter) or _place(own) != _place(live):
            return None
        return lambda: self.arrived.add(name)

    def _shown(self, name: Any) -> Path:
        return (*self._path, self._names.name(name) if isinstance(name, str) else name)


def _shape(tensor: torch.Tensor) -> torch.Size | None:
    return None if is_lazy(tensor) else tensor.shape
