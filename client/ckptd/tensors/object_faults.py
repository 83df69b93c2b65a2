# ruff: noqa: TID253
"""What torch's own schedulers and GradScaler would refuse half-way, or take over wrongly without a word.

`LRScheduler.load_state_dict` takes any dict. The state of another class, or of a chain with another number of
parts, leaves a scheduler that steps to other learning rates, or fails after half of it is set.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

import torch
from torch.optim.lr_scheduler import LRScheduler

from ckptd.snapshot.keypath import Path
from ckptd.tensors.tags import type_name

#: Keys of a scheduler that load_state_dict can't do without, though they are private.
_NEEDED: Final = frozenset({"_schedulers", "_scale_fn_custom"})
#: Keys that only some versions of torch have.
_OF_A_VERSION: Final = frozenset({"verbose"})
#: Lists with one entry per parameter group.
_PER_GROUP: Final = ("base_lrs", "lr_lambdas", "max_lrs", "min_lrs", "_last_lr")


def object_faults(live: Any, stored: Any, path: Path) -> Iterator[tuple[Path, str]]:
    """Key path and reason of each thing in stored that live, an object of torch's, can't take over right.

    Nothing is said of objects of other classes: a class of one's own says it by `check_state_dict(state)`.
    """
    if isinstance(live, LRScheduler):
        yield from _scheduler_faults(live, stored, path)
    elif isinstance(live, torch.amp.GradScaler):
        yield from _scaler_faults(live, stored, path)


def _scheduler_faults(live: LRScheduler, stored: Any, path: Path) -> Iterator[tuple[Path, str]]:
    if not isinstance(stored, Mapping):
        yield path, f"is {type_name(stored)} in the checkpoint, a scheduler in the live state"
        return
    if not type(live).__module__.startswith("torch."):
        return  # one of the user's own may keep what and when it likes
    now = live.state_dict()
    wanted, seen = _keys(now), _keys(stored)
    if wanted != seen:
        yield path, _other_keys(live, wanted - seen, seen - wanted)
        return
    for key in _PER_GROUP:
        if isinstance(now.get(key), list) and isinstance(stored.get(key), list):
            yield from _count_faults(len(now[key]), len(stored[key]), (*path, key))
    yield from _lambda_faults(now, stored, path)
    if "_schedulers" in now:
        yield from _part_faults(live, stored["_schedulers"], (*path, "_schedulers"))


def _keys(state: Mapping[Any, Any]) -> set[Any]:
    return {key for key in state if not str(key).startswith("_") or key in _NEEDED} - _OF_A_VERSION


def _other_keys(live: LRScheduler, missing: set[Any], extra: set[Any]) -> str:
    parts = [f"no {', '.join(sorted(map(str, missing)))}"] if missing else []
    parts += [f"{', '.join(sorted(map(str, extra)))}"] if extra else []
    return f"is not the state of a {type(live).__name__}: it has {' but '.join(parts)}"


def _count_faults(live: int, stored: int, path: Path) -> Iterator[tuple[Path, str]]:
    if live != stored:
        yield path, f"is for {stored} parameter groups, the live optimizer has {live}"


def _lambda_faults(
    now: Mapping[str, Any], stored: Mapping[str, Any], path: Path
) -> Iterator[tuple[Path, str]]:
    pairs = zip(now.get("lr_lambdas") or (), stored.get("lr_lambdas") or (), strict=False)
    for index, (ours, theirs) in enumerate(pairs):
        if (ours is None) != (theirs is None):
            was, is_now = (
                ("function", "object with state") if theirs is None else ("object with state", "function")
            )
            yield (
                (*path, "lr_lambdas", index),
                f"was a {was}, the live one is a{'n' if theirs is None else ''} {is_now}",
            )


def _part_faults(live: Any, stored: Any, path: Path) -> Iterator[tuple[Path, str]]:
    parts = live._schedulers
    if not isinstance(stored, (list, tuple)) or len(stored) != len(parts):
        count = len(stored) if isinstance(stored, (list, tuple)) else 0
        yield path, f"has {count} parts, the live {type(live).__name__} {len(parts)}"
        return
    for index, (part, state) in enumerate(zip(parts, stored, strict=True)):
        yield from _scheduler_faults(part, state, (*path, index))


def _scaler_faults(live: torch.amp.GradScaler, stored: Any, path: Path) -> Iterator[tuple[Path, str]]:
    if not isinstance(stored, Mapping):
        yield path, f"is {type_name(stored)} in the checkpoint, a GradScaler in the live state"
    elif not live.is_enabled():
        if stored:
            yield path, "has a state in the checkpoint, and the live GradScaler is disabled: it would be lost"
    elif not stored:
        yield path, "is empty in the checkpoint (disabled then), the live GradScaler is enabled"
    else:
        missing = live.state_dict().keys() - stored.keys()
        if missing:
            yield path, f"is not the state of a GradScaler: it has no {', '.join(sorted(missing))}"
