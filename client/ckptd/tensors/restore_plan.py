# ruff: noqa: TID253
"""What a restore will write, decided without writing: a walk over live and stored values side by side."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any, Final, TypeAlias

import numpy
import torch
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]

from ckptd.errors import StateMismatch
from ckptd.snapshot import keypath
from ckptd.snapshot.keypath import Path
from ckptd.tensors.capture import has_state_dict
from ckptd.tensors.generator_state import GENERATORS, kind_of, set_generator, skip_generator
from ckptd.tensors.module_names import Canonical
from ckptd.tensors.optim import is_torch_form, name_parameters
from ckptd.tensors.optim_restore import match_optimizer, shorten
from ckptd.tensors.registered_restore import plan_fields
from ckptd.tensors.registered_tags import fields_of
from ckptd.tensors.tag_reader import GeneratorElsewhere
from ckptd.tensors.tags import is_namedtuple
from ckptd.tensors.torch_support import BITS_BY_ITEMSIZE

#: Writes one value and returns what its parent should hold: the live object itself, or a replacement.
Write: TypeAlias = Callable[[], Any]

_IMMUTABLE_SCALARS: Final = frozenset({type(None), bool, int, float, complex, str, bytes})


class Planner:
    """Collects problems while it plans; nothing live is changed before the writes it returns are called.

    Attributes:
        problems: What refuses the restore.
        missing: Key paths live but not stored, tolerated.
        unused: Key paths stored but not live, tolerated.
    """

    def __init__(self, state: Mapping[Any, Any], *, strict: bool) -> None:
        self.problems: list[str] = []
        self.missing: list[str] = []
        self.unused: list[str] = []
        self._state, self._strict = state, strict
        self._names: dict[int, str] | None = None

    def raise_problems(self) -> None:
        if self.problems:
            raise StateMismatch(
                "the checkpoint doesn't fit the live state",
                where="state",
                seen=shorten(self.problems),
                todo="build the state as it was when it was saved, or pass strict=False or only=[…]",
            )

    def plan_component(self, name: Any, components: Mapping[Any, Any]) -> Write | None:
        if name not in components:
            self.missing_at((name,))
            return None
        return self.plan(self._state[name], components[name], (name,))

    def missing_at(self, path: Path) -> None:
        self._tolerate(self.missing, path, "is not in the checkpoint")

    def unused_at(self, path: Path) -> None:
        self._tolerate(self.unused, path, "is in the checkpoint, not in the live state")

    def _tolerate(self, found: list[str], path: Path, fault: str) -> None:
        if self._strict:
            self.problem(path, fault)
        else:
            found.append(keypath.show(path))

    def problem(self, path: Path, fault: str) -> None:
        self.problems.append(f"{keypath.show(path)} {fault}")

    def plan(self, live: Any, stored: Any, path: Path) -> Write:
        """The write that brings live to stored; problems are noted."""
        if type(live) in _IMMUTABLE_SCALARS:
            return lambda: stored
        if isinstance(live, torch.nn.Module):
            return self._module(live, stored, path)
        if isinstance(live, torch.optim.Optimizer):
            return self._optimizer(live, stored, path)
        if isinstance(live, torch.Tensor):
            return self._tensor(live, stored, path)
        if isinstance(live, GENERATORS):
            return self._generator(live, stored, path)
        if has_state_dict(live):
            return self._object(live, stored, path)
        return self._container(live, stored, path)

    # --- objects ------------------------------------------------------------------------------------

    def _module(self, live: torch.nn.Module, stored: Any, path: Path) -> Write:
        if not isinstance(stored, Mapping):
            return self._wrong_kind(live, stored, path)
        wanted = live.state_dict()
        stored = Canonical(live).back(stored, wanted)
        for name in wanted:
            if name not in stored:
                self.missing_at((*path, name))
        for name, value in stored.items():
            if name not in wanted:
                self.unused_at((*path, name))
            elif isinstance(wanted[name], torch.Tensor):
                self._check_tensor(wanted[name], value, (*path, name), shape_matters=True)

        def write() -> Any:
            if self._strict:
                live.load_state_dict(stored)
            else:
                live.load_state_dict(stored, strict=False)
            return live

        return write

    def _optimizer(self, live: torch.optim.Optimizer, stored: Any, path: Path) -> Write:
        if not is_torch_form(stored) and has_own_form(live):
            return self._object(live, stored, path)
        if self._names is None:
            self._names = name_parameters(self._state)
        try:
            plan = match_optimizer(live, self._names, stored)
        except StateMismatch as error:
            self.problem(path, f"doesn't fit: {error.seen}")
            return lambda: live

        def write() -> Any:
            plan.apply()
            return live

        return write

    def _object(self, live: Any, stored: Any, path: Path) -> Write:
        if isinstance(stored, Mapping) and not stored and live.state_dict():
            self.problem(
                path,
                f"is empty in the checkpoint, the live {type(live).__qualname__} has state (disabled then?)",
            )

        def write() -> Any:
            live.load_state_dict(stored)
            return live

        return write

    def _generator(self, live: Any, stored: Any, path: Path) -> Write:
        if isinstance(stored, GeneratorElsewhere):
            if isinstance(live, torch.Generator) and live.device.type == "cpu":
                self.problem(path, f"was on {stored.device}, the live generator is on the CPU")
            return lambda: skip_generator(live, stored, path)
        if type(stored) is not type(live) or kind_of(stored) != kind_of(live):
            return self._wrong_kind(live, stored, path)

        def write() -> Any:
            set_generator(live, stored)
            return live

        return write

    # --- tensors and plain data ---------------------------------------------------------------------

    def _tensor(self, live: torch.Tensor, stored: Any, path: Path) -> Write:
        if stored is None and not self._strict:
            return lambda: None
        fits = self._check_tensor(live, stored, path, shape_matters=self._strict)
        overlaps = any(
            stride == 0 and size > 1 for stride, size in zip(live.stride(), live.shape, strict=True)
        )
        if not fits or overlaps:
            return lambda: stored

        def write() -> Any:
            with torch.no_grad():
                bits = BITS_BY_ITEMSIZE[live.itemsize]
                live.detach().view(bits).copy_(stored.detach().view(bits))
            return live

        return write

    def _check_tensor(self, live: torch.Tensor, stored: Any, path: Path, *, shape_matters: bool) -> bool:
        """Whether stored can be copied into live bit for bit; notes what refuses the restore."""
        if not isinstance(stored, torch.Tensor):
            self.problem(path, f"is {kind_of(stored)} in the checkpoint, a tensor in the live state")
            return False
        if isinstance(live, UninitializedTensorMixin):
            return True
        if live.shape != stored.shape and shape_matters:
            self.problem(path, f"has shape {list(stored.shape)}, live {list(live.shape)}")
        elif live.dtype != stored.dtype and self._strict:
            self.problem(path, f"is {stored.dtype}, live {live.dtype}")
        return live.shape == stored.shape and live.dtype == stored.dtype

    def _container(self, live: Any, stored: Any, path: Path) -> Write:
        if fields_of(live) is not None:
            return plan_fields(live, stored, path, self.plan) or self._wrong_kind(live, stored, path)
        if isinstance(live, MutableMapping):
            return self._dict(live, stored, path)
        if isinstance(live, list):
            return self._list(live, stored, path)
        if isinstance(live, tuple):
            return self._tuple(live, stored, path)
        if isinstance(live, numpy.ndarray):
            return lambda: _fill_array(live, stored)
        if isinstance(live, (set, deque, bytearray)):
            return self._refill(live, stored, path)
        return lambda: stored

    def _dict(self, live: MutableMapping[Any, Any], stored: Any, path: Path) -> Write:
        if not isinstance(stored, Mapping):
            return self._wrong_kind(live, stored, path)
        kept = [key for key in live if key not in stored]
        for key in kept:
            self.missing_at((*path, key))
        writes = {
            key: self.plan(live[key], value, (*path, key)) if key in live else _constant(value)
            for key, value in stored.items()
        }

        def write() -> Any:
            items = {key: write() for key, write in writes.items()}
            items.update((key, live[key]) for key in kept)
            live.clear()  # then the order of the keys is the stored one too
            live.update(items)
            return live

        return write

    def _list(self, live: list[Any], stored: Any, path: Path) -> Write:
        if not isinstance(stored, list):
            return self._wrong_kind(live, stored, path)
        if _IMMUTABLE_SCALARS.issuperset(map(type, live)):
            writes = [_constant(value) for value in stored] if len(stored) < 64 else None
        else:
            for index in range(len(stored), len(live)):
                if holds_live(live[index]):
                    self.missing_at((*path, index))
            writes = [
                self.plan(live[index], value, (*path, index)) if index < len(live) else _constant(value)
                for index, value in enumerate(stored)
            ]

        def write() -> Any:
            live[:] = stored if writes is None else [write() for write in writes]
            return live

        return write

    def _tuple(self, live: tuple[Any, ...], stored: Any, path: Path) -> Write:
        if not holds_live(live):
            return lambda: _as_namedtuple(live, stored)
        if not isinstance(stored, tuple) or len(stored) != len(live):
            return self._wrong_kind(live, stored, path)
        writes = [
            self.plan(item, value, (*path, i))
            for i, (item, value) in enumerate(zip(live, stored, strict=True))
        ]

        def write() -> Any:
            items = [write() for write in writes]
            same = all(new is old for new, old in zip(items, live, strict=True))
            return live if same else tuple.__new__(type(live), items)

        return write

    def _refill(self, live: Any, stored: Any, path: Path) -> Write:
        if type(stored) is not type(live):
            return self._wrong_kind(live, stored, path)
        if isinstance(live, deque) and live.maxlen != stored.maxlen:
            return lambda: stored

        def write() -> Any:
            live.clear()
            live.update(stored) if isinstance(live, set) else live.extend(stored)
            return live

        return write

    def _wrong_kind(self, live: Any, stored: Any, path: Path) -> Write:
        self.problem(path, f"is {kind_of(stored)} in the checkpoint, {kind_of(live)} in the live state")
        return lambda: live


def has_own_form(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer overrides how its state is given and taken."""
    return type(optimizer).load_state_dict is not torch.optim.Optimizer.load_state_dict


def holds_live(value: Any, depth: int = 0) -> bool:
    """Whether something in value is restored in place: a tensor, module, generator or other object."""
    if isinstance(
        value, (torch.Tensor, torch.nn.Module, torch.optim.Optimizer, *GENERATORS)
    ) or has_state_dict(value):
        return True
    if isinstance(value, (Mapping, list, tuple)) and depth < 100:
        return any(
            holds_live(item, depth + 1) for item in (value.values() if isinstance(value, Mapping) else value)
        )
    return depth < 100 and any(holds_live(item, depth + 1) for item in (fields_of(value) or {}).values())


def _constant(value: Any) -> Write:
    return lambda: value


def _as_namedtuple(live: Any, stored: Any) -> Any:
    """stored as the live class, where it was read as one that only looks like it."""
    kind = type(live)
    if (
        is_namedtuple(kind)
        and isinstance(stored, tuple)
        and getattr(type(stored), "_fields", None) == kind._fields
    ):
        return tuple.__new__(kind, stored)
    return stored


def _fill_array(live: numpy.ndarray, stored: Any) -> Any:
    same = isinstance(stored, numpy.ndarray) and stored.shape == live.shape and stored.dtype == live.dtype
    if not same or not live.flags.writeable:
        return stored
    live[...] = stored
    return live
