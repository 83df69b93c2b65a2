# ruff: noqa: TID253
"""What of a live state is held by objects or keeps its value: data that shares it must not be written through it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import numpy
import torch
from torch.nn.parameter import is_lazy
from torch.optim.lr_scheduler import LRScheduler

from ckptd.snapshot.keypath import Path
from ckptd.snapshot.values import SCALARS
from ckptd.tensors.capture import has_state_dict
from ckptd.tensors.optim import held_optimizer, is_torch_form
from ckptd.tensors.registered_tags import branches_below, items_below
from ckptd.tensors.restore_array import as_bytes
from ckptd.tensors.restore_findings import Held
from ckptd.tensors.restore_module import has_own_form
from ckptd.tensors.tied_values import Target

_MAX_DEPTH: Final = 100


def held_by_objects(state: Mapping[Any, Any], components: Mapping[Any, Any]) -> Iterator[Held]:
    """What every object in the state holds, at any depth, whether it is restored or not.

    Args:
        state: The live state.
        components: What is restored.
    """
    for path, owner in _objects(state, (), set()):
        stored = _at(components, path)
        if isinstance(owner, torch.nn.Module):
            yield Held(path, (*owner.parameters(), *owner.buffers()))
            if has_own_form(owner):
                yield Held(path, _state_of(owner), stored)
            continue
        if (optimizer := held_optimizer(owner)) is not None:
            settings = [
                {key: group[key] for key in group if key != "params"} for group in optimizer.param_groups
            ]
            yield Held(path, [list(optimizer.state.values()), settings])
        if not isinstance(owner, torch.optim.Optimizer):
            # A scheduler keeps what it is given, and copies nothing; what an optimizer copies its plan says.
            known = isinstance(owner, LRScheduler) or is_torch_form(stored)
            yield Held(path, _state_of(owner), None if known else stored)


def _objects(value: Any, path: Path, seen: set[int]) -> Iterator[tuple[Path, Any]]:
    if type(value) in SCALARS or id(value) in seen or len(path) > _MAX_DEPTH:
        return
    seen.add(id(value))
    if has_state_dict(value):
        yield path, value
        return
    for key, item in branches_below(value):
        yield from _objects(item, (*path, key), seen)


def _at(components: Any, path: Path) -> Any:
    for key in path:
        components = dict(items_below(components)).get(key)
    return components


def _state_of(owner: Any) -> Any:
    try:
        return owner.state_dict()
    except Exception:  # noqa: BLE001 - the user's own code: what gives no state yet has no tensors in it
        return None


def containers(held: Iterable[Held]) -> dict[int, tuple[Any, Any]]:
    """id of every container in what is held → it, and what it is to become; None if that isn't known."""
    found = (pair for each in held for pair in _side_by_side(each.live, each.stored))
    kept = (torch.Tensor, numpy.ndarray)
    return {id(live): (live, stored) for live, stored in found if not isinstance(live, kept)}


def targets(held: Iterable[Held]) -> Iterator[Target]:
    """Every tensor and array in what is held."""
    for each in held:
        for live, stored in _side_by_side(each.live, each.stored):
            if isinstance(live, torch.Tensor) and _has_memory(live):
                yield Target(each.path, live, stored if _is_alike(live, stored) else None)
            elif isinstance(live, numpy.ndarray) and live.nbytes:
                yield Target(each.path, as_bytes(live), as_bytes(stored) if _is_alike(live, stored) else None)


def _side_by_side(live: Any, stored: Any, depth: int = 0) -> Iterator[tuple[Any, Any]]:
    """All but scalars and objects, each with its counterpart or None."""
    if type(live) in SCALARS or has_state_dict(live) or depth > _MAX_DEPTH:
        return
    yield live, stored
    if isinstance(live, (torch.Tensor, numpy.ndarray)):
        return
    if ours := branches_below(live):
        theirs = dict(branches_below(stored))
        for key, item in ours:
            yield from _side_by_side(item, theirs.get(key), depth + 1)


def _has_memory(tensor: torch.Tensor) -> bool:
    if is_lazy(tensor) or tensor.layout is not torch.strided or tensor.is_meta or not tensor.numel():
        return False
    try:
        return tensor.data_ptr() != 0
    except RuntimeError:  # a wrapper of other tensors has none of its own
        return False


def _is_alike(live: Any, stored: Any) -> bool:
    """Whether stored can be copied into live as it is."""
    kind = torch.Tensor if isinstance(live, torch.Tensor) else numpy.ndarray
    return isinstance(stored, kind) and (live.shape, live.dtype) == (stored.shape, stored.dtype)
