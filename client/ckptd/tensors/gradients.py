# ruff: noqa: TID253
"""The gradients of a model as a part of the state, for a run that is saved between two optimizer steps.

Gradient accumulation spreads one optimizer step over several batches; what the first of them gave lies in `.grad`
alone. Storing it costs as much as the parameters, so it is stored only when asked.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from ckptd.errors import InvalidArgument, StateMismatch
from ckptd.tensors.module_names import named_parameters
from ckptd.tensors.optim_restore import into, shorten

__all__ = ["Gradients"]


class Gradients:
    """Stores and restores the gradients that a model has accumulated: `"gradients": ckptd.Gradients(model)`.

    Only a run that is saved between two optimizer steps needs it. It holds no gradients itself; each snapshot
    takes those that are there, as many bytes as the parameters that have one. Sparse gradients are refused by
    key path when a snapshot is taken.

    Args:
        of: A module, or an iterable of parameters, or of (name, parameter) pairs as `named_parameters()` gives
            them. A module's names are without what DataParallel, DistributedDataParallel and torch.compile add,
            and parameters that it gets later count too. Parameters without names are stored by position: "0".

    Raises:
        InvalidArgument: `of` is none of these, or two parameters have one name.
    """

    def __init__(
        self, of: torch.nn.Module | Iterable[torch.Tensor] | Iterable[tuple[str, torch.Tensor]]
    ) -> None:
        self._module = of if isinstance(of, torch.nn.Module) else None
        self._named = {} if isinstance(of, torch.nn.Module) else _by_name(of)

    def __repr__(self) -> str:
        named = self.parameters()
        count = sum(parameter.grad is not None for parameter in named.values())
        return f"<Gradients {count} of {len(named)} parameters have one>"

    def parameters(self) -> dict[str, torch.Tensor]:
        """Name → parameter, of all whose gradients this is for."""
        return self._named if self._module is None else dict(named_parameters(self._module))

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Name → gradient, of each parameter that has one: the tensors themselves, not copies."""
        named = self.parameters()
        return {name: each.grad for name, each in named.items() if each.grad is not None}

    def check_state_dict(self, state: Any) -> None:
        """See that load_state_dict(state) would do. Changes nothing.

        Raises:
            StateMismatch: `seen` lists what doesn't fit: a name that no parameter has, another shape or dtype.
        """
        if not isinstance(state, Mapping):
            raise _mismatch([f"a {type(state).__name__}, not the state of Gradients"])
        named = self.parameters()
        faults = [fault for name, stored in state.items() for fault in _faults(name, stored, named)]
        if faults:
            raise _mismatch(faults)

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Set the gradient of every parameter: the stored one, or None where state has none.

        A gradient is copied into the tensor that is there when that is of its kind, else into a new one on the
        parameter's device. Nothing of `state` is kept.

        Raises:
            StateMismatch: As check_state_dict(). No gradient was changed.
        """
        self.check_state_dict(state)
        with torch.no_grad():
            for name, parameter in self.parameters().items():
                stored = state.get(name)
                parameter.grad = None if stored is None else _placed(stored.detach(), parameter)


def missing_gradients(gradients: Gradients) -> list[torch.Tensor]:
    """The trained parameters without a gradient: training will make one the size of each."""
    return [each for each in gradients.parameters().values() if each.requires_grad and each.grad is None]


def without_gradients(restored: Iterable[Any]) -> list[torch.Tensor]:
    """The parameters that have no gradient after a restore of these objects: all but those of a `Gradients`."""
    kept, found = set[int](), dict[int, torch.Tensor]()
    for each in restored:
        if isinstance(each, Gradients):
            kept.update(map(id, each.parameters().values()))
        elif isinstance(each, torch.nn.Module):
            found.update((id(parameter), parameter) for parameter in each.parameters())
        elif isinstance(groups := getattr(each, "param_groups", None), list):
            found.update((id(one), one) for group in groups for one in group["params"])
    return [parameter for key, parameter in found.items() if key not in kept]


def _by_name(of: Any) -> dict[str, torch.Tensor]:
    if isinstance(of, (torch.Tensor, Mapping, str)) or not isinstance(of, Iterable):
        raise _no_parameters(type(of).__name__)
    named: dict[str, torch.Tensor] = {}
    for position, each in enumerate(of):
        name, parameter = each if isinstance(each, tuple) and len(each) == 2 else (str(position), each)
        if not isinstance(name, str) or not isinstance(parameter, torch.Tensor):
            raise _no_parameters(f"{type(each).__name__} at {position}")
        if name in named:
            raise InvalidArgument("two parameters have one name", where="Gradients", seen=repr(name))
        named[name] = parameter
    return named


def _no_parameters(seen: str) -> InvalidArgument:
    return InvalidArgument(
        "not a module and not parameters", where="Gradients", seen=seen, wanted="model or model.parameters()"
    )


def _faults(name: Any, stored: Any, named: Mapping[str, torch.Tensor]) -> list[str]:
    parameter = named.get(name)
    if parameter is None:
        return [f"{name} is in the checkpoint, the live model has no such parameter"]
    if not isinstance(stored, torch.Tensor):
        return [f"{name} is {type(stored).__name__} in the checkpoint, not a tensor"]
    faults = []
    if stored.shape != parameter.shape:
        faults.append(f"{name} has shape {list(stored.shape)}, live {list(parameter.shape)}")
    wanted = getattr(parameter, "grad_dtype", parameter.dtype)  # older versions: always the parameter's
    if wanted is not None and stored.dtype != wanted:
        faults.append(f"{name} is {stored.dtype}, live {wanted}")
    return faults


def _placed(stored: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    moved = stored.to(parameter.device)
    placed = into(parameter.grad, moved)
    return placed.clone() if placed is stored else placed


def _mismatch(faults: list[str]) -> StateMismatch:
    return StateMismatch(
        "the gradients don't fit",
        seen=shorten(faults),
        todo="build the model as it was when it was saved, or leave the gradients out with only=[…]",
    )
