# ruff: noqa: TID253
"""Restoring a module: names compared without what wrappers add, then its own load_state_dict."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch

from ckptd.snapshot.keypath import Path
from ckptd.tensors.module_names import Canonical
from ckptd.tensors.rehearsal import rehearse
from ckptd.tensors.restore_findings import Findings, Write
from ckptd.tensors.restore_tensor import plan_module_tensor


def plan_module(found: Findings, live: torch.nn.Module, stored: Any, path: Path) -> Write:
    """The write of a module; parameters and buffers stay the objects they are.

    `requires_grad`, the device and what state_dict() leaves out (non-persistent buffers) stay the live side's.
    """
    now = live.state_dict()
    if not isinstance(stored, Mapping) or not isinstance(now, Mapping):
        return found.wrong_kind(live, stored, path)
    names = Canonical(live)
    given = names.back(stored, now)
    fit = _Fit(names, path, now, given)
    if not fit.is_whole() and fit.translated(live):
        left_alone: set[str] = set()  # load_state_dict has said that it takes the state as it is
        fit.report(found)
    else:
        left_alone = fit.report(found)
    rest = OrderedDict((name, value) for name, value in given.items() if name not in left_alone)
    if hasattr(given, "_metadata"):
        rest._metadata = given._metadata  # type: ignore[attr-defined]

    def write() -> Any:
        own = type(live).load_state_dict is not torch.nn.Module.load_state_dict
        if own and found.strict:
            live.load_state_dict(rest)
        else:
            # The names were compared above; torch refuses too late, and refuses what hooks have left out.
            live.load_state_dict(rest, strict=False)
        return live

    return write


class _Fit:
    """The names of a module and of a stored state side by side."""

    def __init__(
        self, names: Canonical, path: Path, now: Mapping[str, Any], given: Mapping[str, Any]
    ) -> None:
        self._names, self._path, self._now, self._given = names, path, now, given
        self._missing = [name for name in now if name not in given]
        self._unused = [name for name in given if name not in now]
        self._pairs = [
            (name, now[name], value)
            for name, value in given.items()
            if name in now and isinstance(now[name], torch.Tensor)
        ]

    def is_whole(self) -> bool:
        """Whether each name has its counterpart, and each tensor one of its shape."""
        shapes = all(
            isinstance(value, torch.Tensor) and _shape(live) in (None, value.shape)
            for _, live, value in self._pairs
        )
        return shapes and not self._missing and not self._unused

    def translated(self, live: torch.nn.Module) -> bool:
        """Whether the module itself makes more of the state than its names say; then that is what counts."""
        rehearsed = rehearse(live, self._given)
        if rehearsed is None:
            return False
        self._missing, self._unused = list(rehearsed.missing), list(rehearsed.unused)
        self._pairs = [(name, self._now.get(name), value) for name, value in rehearsed.writes.items()]
        return True

    def report(self, found: Findings) -> set[str]:
        """Enter what doesn't fit into found; returns the names that are to be left alone."""
        for name in self._missing:
            found.missing_at(self._shown(name))
        for name in self._unused:
            found.unused_at(self._shown(name))
        return {
            name
            for name, live, value in self._pairs
            if isinstance(live, torch.Tensor)
            and not plan_module_tensor(found, live, value, self._shown(name))
        }

    def _shown(self, name: Any) -> Path:
        return (*self._path, self._names.name(name) if isinstance(name, str) else name)


def _shape(tensor: torch.Tensor) -> torch.Size | None:
    return None if torch.nn.parameter.is_lazy(tensor) else tensor.shape
