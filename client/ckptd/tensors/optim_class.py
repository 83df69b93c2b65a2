# ruff: noqa: TID253
"""Whether another class of optimizer was saved than the live one is: by the names of the classes, else by settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch

#: Key of the stored form that torch's own state_dict() doesn't have: what `class_of` gave.
CLASS: Final = "class_of_optimizer"

#: What schedulers and names put into a group.
_OF_SCHEDULERS: Final = frozenset(
    {"params", "param_names", "initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr"}
)


class OtherClass(NamedTuple):
    """What there is to say of the class that was saved.

    Attributes:
        faults: What refuses a strict restore, each in words.
        warnings: What is worth a warning.
    """

    faults: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


def class_of(optimizer: Any) -> list[str | None]:
    """The name of the optimizer's class; and of the class of torch.optim that it is, extends or wraps, else None."""
    return [type(optimizer).__name__, _class_of_torch(optimizer, set())]


def _class_of_torch(optimizer: Any, seen: set[int]) -> str | None:
    for base in type(optimizer).__mro__:
        if base is not torch.optim.Optimizer and getattr(torch.optim, base.__name__, None) is base:
            return str(base.__name__)
    seen.add(id(optimizer))
    held = vars(optimizer).values() if hasattr(optimizer, "__dict__") else ()
    inside = [part for part in held if isinstance(part, torch.optim.Optimizer) and id(part) not in seen]
    return _class_of_torch(inside[0], seen) if len(inside) == 1 else None


def compare_class(
    optimizer: Any, recorded: Any, groups: Sequence[Mapping[str, Any]], *, may_adapt: bool
) -> OtherClass:
    """What says that another class of optimizer was saved. Nothing is changed.

    Two classes of torch's own are told by their names. Under another name than torch's a class may be the same: one
    that was renamed or wrapped, a subclass; that is warned of, and refused only where the settings show more.

    Args:
        optimizer: The live one, or what shows its `param_groups`.
        recorded: What was stored under CLASS. Anything but what `class_of` gives counts as nothing: older
            checkpoints have none, and are told by their settings.
        groups: The stored groups.
        may_adapt: Whether load pre-hooks have changed the state and may have made it one of the live class.
    """
    now, faults = class_of(optimizer), faults_of_settings(optimizer, groups)
    if not _is_class(recorded):
        return OtherClass(tuple(faults))
    was, of_torch = list(recorded), recorded[0] == recorded[1] and now[0] == now[1]
    if was == now:
        return OtherClass() if of_torch else OtherClass(tuple(faults))
    said = f"another class was saved: {_shown(was)}, the live one is {_shown(now)}"
    if of_torch and not may_adapt:
        return OtherClass((said,))
    return OtherClass(tuple(faults), (f"{said}; its state is taken as it is",))


def _is_class(recorded: Any) -> bool:
    return (
        isinstance(recorded, (list, tuple))
        and len(recorded) == 2
        and isinstance(recorded[0], str)
        and isinstance(recorded[1], (str, type(None)))
    )


def _shown(name: list[str | None]) -> str:
    own, of_torch = name
    if own == of_torch:
        return f"torch.optim.{own}"
    return f"{own} (of torch.optim.{of_torch})" if of_torch else str(own)


def faults_of_settings(optimizer: Any, groups: Sequence[Mapping[str, Any]]) -> list[str]:
    """How the settings say that another class of optimizer was saved; nothing when they may be this one's.

    A newer torch adds settings, and so does a user: either alone is fine. Settings of this class that weren't stored
    beside stored ones that it doesn't know are another class's. (Adam and AdamW have the same ones.)
    """
    own = set(getattr(optimizer, "defaults", ()))  # what only looks like an optimizer may have none
    known = own.union(*(group.keys() for group in optimizer.param_groups))
    stored = set().union(*(group.keys() for group in groups))
    lacking, foreign = sorted(own - stored), sorted(stored - known - _OF_SCHEDULERS)
    if not (groups and lacking and foreign):
        return []
    return [
        f"another class was saved: its groups have {', '.join(map(str, foreign))}, "
        f"{type(optimizer).__qualname__} has {', '.join(map(str, lacking))}"
    ]
