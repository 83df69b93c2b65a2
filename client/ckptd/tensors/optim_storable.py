# ruff: noqa: TID253
"""Whether an optimizer's state can come back as it is: what it holds, and which of its tensors share memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch

from ckptd.errors import UnstorableState
from ckptd.snapshot import keypath
from ckptd.snapshot.keypath import Path
from ckptd.snapshot.values import SCALARS

_MAX_DEPTH: Final = 100


def check_state(
    state: Mapping[Any, Any],
    groups: Sequence[Mapping[str, Any]],
    parameters: Mapping[str, torch.Tensor],
    path: Path,
) -> dict[str, list[str]]:
    """Refuse what a restore couldn't bring back, and find the state that is a parameter itself.

    Two tensors of the state that are the same memory seen the same way are a tie, which the files keep. Any
    other overlap would come back as two copies, and a change of the one would no longer be seen in the other.

    Args:
        state: By parameter name, or by a key of the optimizer's own.
        groups: The parameter groups.
        parameters: By name.
        path: Where the optimizer is in the state.

    Returns:
        Parameter name → the keys of its state that are the parameter itself.

    Raises:
        UnstorableState: An object with a state of its own, or tensors that overlap without being the same.
    """
    storages = {parameter.untyped_storage().data_ptr() for parameter in parameters.values()}
    if all(_apart(each, storages, 0) for each in (state, *groups)):
        return {}
    found: list[_Found] = []
    for name, saved in state.items():
        _collect(saved, (*path, "state", name), found, 0)
    for number, group in enumerate(groups):
        _collect(group, (*path, "param_groups", number), found, 0)
    found += [_Found(parameter, (*path, "params", name), True) for name, parameter in parameters.items()]
    shared: dict[int, list[_Found]] = {}
    for each in found:
        shared.setdefault(each.tensor.untyped_storage().data_ptr(), []).append(each)
    ties: dict[str, list[str]] = {}
    for together in shared.values():
        if len(together) > 1:
            _refuse_overlaps(_without_own(together, len(path), ties))
    return ties


def _apart(value: Any, storages: set[int], depth: int) -> bool:
    """Whether every tensor below has memory of its own; False where a closer look is needed."""
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided or value.is_meta or not value.numel():
            return True
        storage, before = value.untyped_storage().data_ptr(), len(storages)
        storages.add(storage)
        return len(storages) > before
    if type(value) is dict or isinstance(
        value, (Mapping, list, tuple)
    ):  # of an abstract class it takes ten times as long
        items = value.values() if type(value) is dict or isinstance(value, Mapping) else value
        return depth >= _MAX_DEPTH or all(
            type(item) in SCALARS or _apart(item, storages, depth + 1) for item in items
        )
    return not _has_state(value)


def _has_state(value: Any) -> bool:
    return callable(getattr(value, "load_state_dict", None)) and callable(getattr(value, "state_dict", None))


class _Found(NamedTuple):
    tensor: torch.Tensor
    path: Path
    is_parameter: bool = False


def _collect(value: Any, path: Path, found: list[_Found], depth: int) -> None:
    if isinstance(value, torch.Tensor):
        if value.layout is torch.strided and value.numel() and not value.is_meta:
            found.append(_Found(value, path))
    elif isinstance(value, (Mapping, list, tuple)):
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, item in items if depth < _MAX_DEPTH else ():
            if type(item) not in SCALARS:
                _collect(item, (*path, key), found, depth + 1)
    elif _has_state(value):
        raise UnstorableState(
            "an object inside an optimizer's state would come back as its plain state",
            where=keypath.show(path),
            seen=type(value).__qualname__,
            todo="put the object into the state on its own",
        )


def _without_own(together: list[_Found], depth: int, ties: dict[str, list[str]]) -> list[_Found]:
    """Note in ties what is its own parameter, and give the rest, each place once."""
    places = {place(each.tensor): each.path[-1] for each in together if each.is_parameter}
    rest: dict[Any, _Found] = {}
    for each in together:
        kind, name = each.path[depth], each.path[depth + 1]
        key = (place(each.tensor), each.is_parameter)
        if kind == "state" and len(each.path) == depth + 3 and places.get(key[0]) == name:
            ties.setdefault(name, []).append(each.path[-1])
        else:
            rest.setdefault(key, each)
    return list(rest.values())


def place(tensor: torch.Tensor) -> tuple[Any, ...]:
    """What makes two tensors one: the same bytes seen the same way."""
    return tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()


def extent(tensor: torch.Tensor) -> tuple[int, int]:
    """First and last + 1 address that a strided tensor of at least one element can reach."""
    if tensor.is_contiguous():
        return tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
    steps = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.data_ptr()
    return start, start + (steps + 1) * tensor.element_size()


def _refuse_overlaps(together: list[_Found]) -> None:
    reaching: list[tuple[int, _Found]] = []
    for start, end, _, each in sorted((*extent(e.tensor), n, e) for n, e in enumerate(together)):
        reaching = [(until, other) for until, other in reaching if until > start]
        for _, other in reaching:
            # How two parameters share memory is their module's business, and stored there.
            if not (each.is_parameter and other.is_parameter) and overlap(each.tensor, other.tensor):
                raise UnstorableState(
                    "a tensor in an optimizer's state shares memory and would come back apart",
                    where=keypath.show((each if other.is_parameter else other).path),
                    seen=f"shared with {keypath.show((other if other.is_parameter else each).path)}",
                    todo="keep a copy in the state",
                )
        reaching.append((end, each))


def overlap(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether two strided tensors have a byte in common: columns of one matrix reach across, but have none."""
    if first.untyped_storage().data_ptr() != second.untyped_storage().data_ptr():
        return False
    seen = torch.zeros(first.untyped_storage().nbytes(), dtype=torch.bool, device="cpu")
    _bytes_of(first, seen).fill_(True)
    return bool(_bytes_of(second, seen).any())


def _bytes_of(tensor: torch.Tensor, storage: torch.Tensor) -> torch.Tensor:
    width = tensor.element_size()
    return storage.as_strided(
        (*tensor.shape, width),
        (*(stride * width for stride in tensor.stride()), 1),
        tensor.storage_offset() * width,
    )
