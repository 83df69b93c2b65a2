# ruff: noqa: TID253
"""Whether gradients were accumulated since the last optimizer step: what a snapshot without them would lose.

Torch's hook after every optimizer step notes the gradients of two parameters of each group, the first and the last
that have one: which tensor it is and how often it was changed. A snapshot that finds another one, and not all zeros,
comes after a backward pass that no step has used. Two, as the first layers may be frozen later on, or get zeros only.
The hook touches no object of the user and keeps no gradient alive.

What looks like that and isn't is no reason for a warning, so in doubt there is none:

- Zeros: what zero_grad(set_to_none=False) leaves.
- Infinities and NaN: GradScaler left out the step. The next one begins with zero_grad.
- A backward pass through a model whose own optimizer stepped before (a GAN's discriminator): whoever steps last has
  the notes of all renewed.
- A step that torch.compile took in: nothing is known of it.
- The first gradients of an optimizer whose parameters were all frozen: they are looked for every 64 steps only.
- Gradients that are there when the hook comes into being: a step that nobody saw may have used them.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.weak import TensorWeakRef

from ckptd.limits import MAX_TREE_DEPTH
from ckptd.snapshot import keypath
from ckptd.snapshot.keypath import Path
from ckptd.snapshot.values import SCALARS
from ckptd.tensors.capture import has_state_dict
from ckptd.tensors.gradients import Gradients
from ckptd.tensors.optim import held_optimizer
from ckptd.tensors.registered_tags import fields_of

__all__ = ["accumulated_in", "left_out"]

#: Above this many optimizers each renews its own notes only: one for each parameter would cost a square.
_MOST_RENEWED: Final = 8
#: Steps after which a group without any gradient is searched again: it may have been frozen, and no longer be.
_LOOK_AGAIN_EVERY: Final = 64
#: Longer ones hold data, such as losses; to look into them at each snapshot would cost more than to copy them.
_LONGEST_SEARCHED: Final = 1000
_LOOKED_AT: Final = (torch.optim.Optimizer, Gradients)
_PLAIN: Final = (torch.Tensor, torch.nn.Parameter)


class _Note:
    """The gradient that a parameter had at the end of the last step."""

    __slots__ = ("_grad", "_parameter", "_version")

    def __init__(self, parameter: torch.Tensor, grad: torch.Tensor) -> None:
        self._parameter, self._grad = TensorWeakRef(parameter), TensorWeakRef(grad)
        self._version = grad._version

    def is_of(self, parameter: torch.Tensor) -> bool:
        """Another parameter may have the address of one that is gone."""
        return self._parameter() is parameter

    def is_alive(self) -> bool:
        return self._parameter() is not None

    def is_still(self, grad: torch.Tensor) -> bool:
        return self._grad() is grad and grad._version == self._version


class _Stepped:
    """An optimizer that has stepped, and which parameter of each group is looked at.

    One that had a gradient has one again, so it is tried first: a search through frozen ones costs more than a step.
    """

    __slots__ = ("_places", "_steps", "optimizer")

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = weakref.ref(optimizer)
        #: For each group the positions of the two; None: no gradient was found in it; (): none was looked for.
        self._places: list[tuple[int, ...] | None] = []
        self._steps = 0

    def renew(self, notes: dict[int, _Note]) -> None:
        """Put the notes of its groups in the place of those of its step before: an old one would look like news."""
        optimizer = self.optimizer()
        if optimizer is None:
            return
        groups = optimizer.param_groups
        if len(self._places) != len(groups):
            self._places = [()] * len(groups)
        for number, group in enumerate(groups):
            parameters, places = group["params"], self._places[number]
            if places is not None and _renewed(
                [parameters[at] for at in places if at < len(parameters)], notes
            ):
                continue
            if places is not None or self._steps % _LOOK_AGAIN_EVERY == 0:
                self._places[number] = _found(parameters, notes)
        self._steps += 1

    @property
    def found_nothing(self) -> bool:
        """Whether its steps had no gradient when they were last looked for: what is there since may be used."""
        return bool(self._places) and not any(self._places) and None in self._places

    def begin(self, notes: dict[int, _Note]) -> None:
        """Note what is there as if it had stepped now; a group without any gradient need not be a frozen one."""
        self.renew(notes)
        self._places = [places or () for places in self._places]


def _renewed(parameters: list[torch.Tensor], notes: dict[int, _Note]) -> bool:
    """Whether each of them has a gradient still; without one it has no note any more."""
    for each in parameters:
        notes.pop(id(each), None)
    return bool(parameters) and all(_noted(each, notes) for each in parameters)


def _found(parameters: list[torch.Tensor], notes: dict[int, _Note]) -> tuple[int, ...] | None:
    """The first and the last that have a gradient: these are noted, and no note of another optimizer's stays."""
    first = None
    for at, each in enumerate(parameters):
        notes.pop(id(each), None)
        if first is None and _noted(each, notes):
            first = at
    if first is None:
        return None
    return first, next(at for at in range(len(parameters) - 1, -1, -1) if _noted(parameters[at], notes))


class _Watch:
    """The notes of this process, by the address of the parameter."""

    def __init__(self) -> None:
        self.blind = False  #: a compiled step isn't noted
        self._notes: dict[int, _Note] = {}
        self._sweep_at = 1024
        self._stepped = {id(older): _Stepped(older) for older in _optimizers()}
        for each in self._stepped.values():
            each.begin(self._notes)

    def found_nothing(self, optimizer: torch.optim.Optimizer) -> bool:
        stepped = self._stepped.get(id(optimizer))
        return stepped is not None and stepped.optimizer() is optimizer and stepped.found_nothing

    def after_step(self, optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        """Torch calls it after each step of any optimizer."""
        if torch.compiler.is_compiling():  # traced: only this assignment is left, made at each compiled step
            self.blind = True
            return
        own = self._stepped.get(id(optimizer))
        if own is None or own.optimizer() is not optimizer:
            own = self._met(optimizer)
        # Other threads may step too: what is walked is never the dict itself.
        for each in list(self._stepped.values()) if len(self._stepped) <= _MOST_RENEWED else (own,):
            each.renew(self._notes)
        if len(self._notes) > self._sweep_at:
            self._notes = {key: note for key, note in list(self._notes.items()) if note.is_alive()}
            self._sweep_at = 2 * len(self._notes) + 1024

    def _met(self, optimizer: torch.optim.Optimizer) -> _Stepped:
        own = _Stepped(optimizer)
        alive = {key: one for key, one in list(self._stepped.items()) if one.optimizer() is not None}
        self._stepped = {**alive, id(optimizer): own}
        return own

    def noted(self, parameters: Iterable[torch.Tensor]) -> Iterator[tuple[torch.Tensor, _Note]]:
        """Those of the parameters that have a note."""
        for parameter in parameters:
            note = self._notes.get(id(parameter))
            if note is not None and note.is_of(parameter):
                yield parameter, note


def _optimizers() -> list[torch.optim.Optimizer]:
    """Those of this process that are whole: one may be in the making, or be a copy that has nothing yet."""
    # By the type's id: isinstance() would ask objects for their __class__, which may be code of the user's.
    kinds = {id(kind) for kind in _with_subclasses(torch.optim.Optimizer)}
    found: list[Any] = [each for each in gc.get_objects() if id(type(each)) in kinds]
    return [each for each in found if "param_groups" in vars(each)]


def _with_subclasses(kind: type) -> Iterator[type]:
    yield kind
    below: list[type] = type.__subclasses__(kind)
    for each in below:
        yield from _with_subclasses(each)


def _noted(parameter: torch.Tensor, notes: dict[int, _Note]) -> bool:
    """Note its gradient, if it has one whose changes can be told."""
    grad = _grad_of(parameter)
    if grad is None or grad.is_inference():
        return False
    notes[id(parameter)] = _Note(parameter, grad)
    return True


def accumulated_in(state: Mapping[Any, Any]) -> str | None:
    """The key path of an optimizer of the state whose gradients grew since the last step and aren't in the state.

    None when there is none, or when it can't be told. Before the first step of all, every gradient that isn't
    zero counts, unless it was there before this module.
    """
    if _watch.blind:
        return None
    found = list(_objects(state, (), 0))
    optimizers = [(path, each) for path, each in found if isinstance(each, torch.optim.Optimizer)]
    optimizers += [(path, held) for path, each in found if (held := _held(each)) is not None]
    notes = [list(_watch.noted(_parameters(optimizer))) for _, optimizer in optimizers]
    parts = [part for _, part in found if isinstance(part, Gradients)]
    # What the state has isn't looked at: to read every gradient would cost more than to copy it.
    stored = {id(each) for part in parts for each in part.parameters().values()}
    for (path, optimizer), own in zip(optimizers, notes, strict=True):
        if any(notes):
            grown = _grown(one for one in own if id(one[0]) not in stored)
        elif _watch.found_nothing(optimizer):
            continue
        else:
            grown = _with_gradient(each for each in _parameters(optimizer) if id(each) not in stored)
        if next(grown, None) is not None and not _step_was_left_out(optimizer):
            return keypath.show(path)
    return None


def left_out(where: str, of: str) -> str:
    """What is said of gradients at that key path; of is what lacks them, "snapshot" or "checkpoint"."""
    return (
        f"{where} has gradients accumulated since its last step, and no ckptd.Gradients puts them into the {of}: "
        'a run resumed from it lacks them. Add "gradients": ckptd.Gradients(model) to the state, or save right after '
        "optimizer.step(). If the loop clears them before its next backward(), nothing is lost"
    )


def _grown(noted: Iterable[tuple[torch.Tensor, _Note]]) -> Iterator[torch.Tensor]:
    for parameter, note in noted:
        grad = _grad_of(parameter)
        if grad is not None and not note.is_still(grad) and _is_something(grad):
            yield parameter


def _with_gradient(parameters: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    for parameter in parameters:
        grad = _grad_of(parameter)
        if grad is not None and _is_something(grad):
            yield parameter


def _is_something(grad: torch.Tensor) -> bool:
    return _can_be_looked_at(grad) and bool(_values(grad).any())


def _step_was_left_out(optimizer: torch.optim.Optimizer) -> bool:
    grads = [grad for each in _parameters(optimizer) if (grad := _grad_of(each)) is not None]
    return any(not bool(torch.isfinite(_values(grad)).all()) for grad in grads if _can_be_looked_at(grad))


def _grad_of(parameter: torch.Tensor) -> torch.Tensor | None:
    """Its gradient; of a non-leaf, which a differentiable optimizer makes, torch would warn at the question."""
    return parameter.grad if parameter.is_leaf else None


def _can_be_looked_at(grad: torch.Tensor) -> bool:
    """Whether its values are here, and of a dtype that torch can compare."""
    if type(grad) not in _PLAIN or grad.is_meta:
        return False
    return grad.is_complex() or (grad.is_floating_point() and grad.itemsize >= 2)


def _values(grad: torch.Tensor) -> torch.Tensor:
    return grad.detach() if grad.layout is torch.strided else grad.detach().coalesce().values()


def _parameters(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def _held(value: Any) -> Any:
    """The optimizer that a wrapper in the state may give the state of."""
    if isinstance(value, (*_LOOKED_AT, torch.optim.lr_scheduler.LRScheduler)) or not has_state_dict(value):
        return None
    return held_optimizer(value)


def _objects(value: Any, path: Path, depth: int) -> Iterator[tuple[Path, Any]]:
    if isinstance(value, _LOOKED_AT) or isinstance(_held(value), torch.optim.Optimizer):
        yield path, value
    elif depth < MAX_TREE_DEPTH:
        inner = fields_of(value) or value
        if isinstance(inner, (Mapping, list, tuple)) and len(inner) <= _LONGEST_SEARCHED:
            for key, item in inner.items() if isinstance(inner, Mapping) else enumerate(inner):
                if type(item) not in SCALARS and type(item) not in _PLAIN:
                    yield from _objects(item, (*path, key), depth + 1)


_watch = _Watch()
register_optimizer_step_post_hook(_watch.after_step)
