# ruff: noqa: TID253
"""Which tensors of a state nothing but an optimizer's step changes: their copy can run beside the next forward pass.

They are the parameters of modules in the state that an optimizer in the state trains, and that optimizer's own state. All
else is copied at once: buffers, gradients, averaged weights, tensors of the caller's, and of those parameters what
a forward pass writes (an embedding with max_norm) or what has an optimizer whose steps torch's hook doesn't see.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import Any, Final

import torch

from ckptd.limits import MAX_TREE_DEPTH
from ckptd.tensors.capture import has_state_dict
from ckptd.tensors.optim import held_optimizer
from ckptd.tensors.registered_tags import items_below

__all__ = ["Deferred", "calls_hooks", "deferred"]

#: Longer containers hold data, such as losses; what they hold is copied at once.
_LONGEST_SEARCHED: Final = 1000
_WRAPPED_AT_MOST: Final = 100
#: What torch wraps around the step of each optimizer class, and what calls the hooks.
_CALLS_HOOKS: Final = torch.optim.Optimizer.profile_hook_step(lambda optimizer: None).__code__

Place = tuple[int, int]  # address and bytes


@dataclass(frozen=True, slots=True)
class Deferred:
    """Attributes:
    waits: For each source whether its copy can wait.
    modules: Those whose own parameters are among them.
    unheard: Classes of optimizers in the state whose steps don't call torch's hooks.
    """

    waits: tuple[bool, ...]
    modules: tuple[torch.nn.Module, ...] = ()
    unheard: tuple[str, ...] = ()


def deferred(state: Mapping[Any, Any], sources: Sequence[torch.Tensor]) -> Deferred:
    """Tell which of the captured sources of `state` can wait."""
    found = list({id(one): one for one in _objects(state, 0)}.values())
    optimizers = [one for one in found if isinstance(one, torch.optim.Optimizer)]
    modules = [one for top in found if isinstance(top, torch.nn.Module) for one in top.modules()]
    unheard = [one for one in optimizers if not calls_hooks(one)]
    trained = {_place(one) for optimizer in optimizers for one in _parameters(optimizer)}
    own = {_place(one) for module in modules for one in _own_parameters(module)}
    places = (trained & own) | {
        _place(one) for optimizer in optimizers for one in _state_apart_from_gradients(optimizer)
    }
    places -= {_place(one) for module in modules for one in _written_in_forward(module)}
    places -= {_place(one) for each in unheard for one in (*_parameters(each), *_state_of(each))}
    waits = tuple(source.numel() > 0 and _place(source) in places for source in sources)
    return Deferred(
        waits,
        tuple(one for one in modules if any(_place(each) in places for each in _own_parameters(one))),
        tuple(sorted({type(one).__qualname__ for one in unheard})),
    )


def calls_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its step(), as it is now, changes nothing before torch's wrapper runs: one set on the instance or class may.

    What lies around that wrapper and isn't torch's own (a scheduler's) may change anything before it calls it. One made
    by functools.wraps says of itself what the wrapped step says, also that it is wrapped: torch then leaves it alone.
    """
    step: Any = optimizer.step
    for _ in range(_WRAPPED_AT_MOST):
        step = getattr(step, "__func__", step)
        if getattr(step, "__code__", None) is _CALLS_HOOKS:
            return True
        if not _is_torchs(step):
            return False
        step = getattr(step, "__wrapped__", None)
    return False


def _is_torchs(function: Any) -> bool:
    """By where its code comes from, which functools.wraps doesn't copy."""
    module = getattr(function, "__globals__", {}).get("__name__", "")
    return isinstance(module, str) and module.partition(".")[0] == "torch"


def _objects(value: Any, depth: int) -> Iterator[torch.nn.Module | torch.optim.Optimizer]:
    if isinstance(value, torch.nn.Module):
        yield value
    elif has_state_dict(value):
        optimizer = held_optimizer(value)
        if isinstance(optimizer, torch.optim.Optimizer):
            yield optimizer
    elif depth < MAX_TREE_DEPTH and not _is_data(value):
        for _, item in items_below(value):
            yield from _objects(item, depth + 1)


def _is_data(value: Any) -> bool:
    return isinstance(value, torch.Tensor) or (isinstance(value, Sized) and len(value) > _LONGEST_SEARCHED)


def _place(tensor: torch.Tensor) -> Place:
    return tensor.data_ptr(), tensor.nbytes


def _parameters(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    return (one for group in optimizer.param_groups for one in group["params"] if _has_place(one))


def _own_parameters(module: torch.nn.Module) -> list[torch.Tensor]:
    """Not those of a scripted module: it takes no hook that would tell of a load."""
    if isinstance(module, torch.jit.ScriptModule):
        return []
    return [one for one in module._parameters.values() if one is not None and _has_place(one)]


def _written_in_forward(module: torch.nn.Module) -> list[torch.Tensor]:
    written: list[torch.Tensor] = [
        one for one in module._buffers.values() if one is not None and _has_place(one)
    ]
    if getattr(module, "max_norm", None) is not None:
        written += _own_parameters(module)
    return written


def _state_of(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    return _tensors(optimizer.state.values())


def _state_apart_from_gradients(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """A backward pass changes gradients, and with them whatever shares their memory."""
    gradients = {
        grad.untyped_storage().data_ptr()
        for one in _parameters(optimizer)
        if one.is_leaf and (grad := one.grad) is not None and _has_place(grad)
    }
    return (one for one in _state_of(optimizer) if one.untyped_storage().data_ptr() not in gradients)


def _tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            if _has_place(value):
                yield value
        elif isinstance(value, Mapping):
            yield from _tensors(value.values())
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def _has_place(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_meta
