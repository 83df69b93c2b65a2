# ruff: noqa: TID253
"""A module's load_state_dict played through without a tensor being written: what would go where?

Old checkpoints of many libraries have other names, which a module's own hooks and `_load_from_state_dict` turn into
today's. Only playing these through shows whether such a checkpoint fits, and a restore must know before it
touches anything.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_PLAIN_LOAD = torch.nn.Module._load_from_state_dict


@dataclass(frozen=True, slots=True)
class Rehearsed:
    """What load_state_dict would do.

    Attributes:
        missing: Names the module has and gets no value for.
        unused: Names of the state that nothing takes.
        writes: Name in the module → the tensor it would take over.
        resized: Names of the buffers that it would give another shape first (torch's quantisation observers do).
    """

    missing: tuple[str, ...]
    unused: tuple[str, ...]
    writes: dict[str, torch.Tensor]
    resized: frozenset[str]


def rehearse(module: torch.nn.Module, state: Mapping[str, Any]) -> Rehearsed | None:
    """Play module.load_state_dict(state) through.

    Returns:
        What it would do; None when that can't be found out without changing something, when it would fail, or
        when the module changes no names (then its state_dict() says it all).
    """
    if not translates(module) or not _can_be_rehearsed(module):
        return None
    recorder = _Recorder(module)
    given = OrderedDict(state)
    given._metadata = getattr(state, "_metadata", OrderedDict())  # type: ignore[attr-defined]
    try:
        with _quiet(module), recorder:
            keys = torch.nn.Module.load_state_dict(module, given, strict=False)
    except Exception:  # noqa: BLE001 - whatever it is, the plain comparison of names says what doesn't fit
        return None
    missing = (*keys.missing_keys, *recorder.kept)
    return Rehearsed(missing, tuple(keys.unexpected_keys), recorder.writes, frozenset(recorder.resized))


def translates(module: torch.nn.Module) -> bool:
    """Whether a part of the module has code of its own that may change what it is given to load."""
    return any(
        part._load_state_dict_pre_hooks or type(part)._load_from_state_dict is not _PLAIN_LOAD
        for part in module.modules()
    )


def _can_be_rehearsed(module: torch.nn.Module) -> bool:
    return (
        type(module).load_state_dict is torch.nn.Module.load_state_dict
        and not torch.__future__.get_swap_module_params_on_conversion()
        and not any(isinstance(part, torch.jit.ScriptModule) for part in module.modules())
    )


class _WouldChange(Exception):
    """Loading would change a live tensor in another way than by copying into it."""


class _Recorder(TorchFunctionMode):
    """Notes each copy into a tensor of the module instead of making it, and stops any other change of one.

    A lazy parameter that would get its shape is such a change. A buffer that would be resized is replaced, until
    `_quiet` puts it back, by one of that shape.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        tensors = (
            *module.named_parameters(remove_duplicate=False),
            *module.named_buffers(remove_duplicate=False),
        )
        self._names: dict[int, list[str]] = {}
        for name, tensor in tensors:
            self._names.setdefault(id(tensor), []).append(name)
        self.writes: dict[str, torch.Tensor] = {}
        self.kept: list[str] = []
        self.resized: list[str] = []
        self._parts = list(module.modules())
        self._stand_ins: list[torch.Tensor] = []  # kept, so that no other tensor gets the id of one

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        names = self._names.get(id(args[0])) if args else None
        if names is None:
            return func(*args, **(kwargs or {}))
        if func is torch.Tensor.copy_:
            return self._note(names, args[0], args[1])
        if func is torch.Tensor.resize_:
            return self._resize(names, args[0], args[1:])
        name = getattr(func, "__name__", "")
        if name in ("__set__", "__setitem__", "__delete__") or (name.endswith("_") and name[-2:] != "__"):
            raise _WouldChange(name)
        return func(*args, **(kwargs or {}))

    def _note(self, names: list[str], live: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        # A tied tensor is written once per name, in the order of its names.
        name = next((name for name in names if name not in self.writes), names[0])
        if value is live:  # BatchNorm gives its own counter where an old checkpoint has none
            self.kept.append(name)
        else:
            self.writes[name] = value
        return live

    def _resize(self, names: list[str], live: torch.Tensor, size: tuple[Any, ...]) -> torch.Tensor:
        stand_in = torch.empty(0, dtype=live.dtype, device="cpu").resize_(*size)
        if stand_in.shape == live.shape:
            return live
        if isinstance(live, torch.nn.Parameter):
            raise _WouldChange("resize_")
        self._names[id(stand_in)] = names
        self._stand_ins.append(stand_in)
        self.resized += names
        for part in self._parts:
            part._buffers.update({key: stand_in for key, one in part._buffers.items() if one is live})
        return stand_in


@contextlib.contextmanager
def _quiet(module: torch.nn.Module) -> Iterator[None]:
    """Without what would reach the live state by other ways: set_extra_state and hooks that run after a load."""
    before = [(part, dict(vars(part)), dict(part._buffers)) for part in module.modules()]
    try:
        for part, _, _ in before:
            vars(part)["_load_state_dict_post_hooks"] = OrderedDict()
            vars(part)["set_extra_state"] = _ignore
        yield
    finally:
        for part, attributes, buffers in before:
            part._buffers.update(buffers)
            for name in ("_load_state_dict_post_hooks", "set_extra_state"):
                vars(part).pop(name, None)
                if name in attributes:
                    vars(part)[name] = attributes[name]


def _ignore(state: Any) -> None:
    """In place of set_extra_state."""
