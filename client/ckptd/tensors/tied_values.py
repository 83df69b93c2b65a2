# ruff: noqa: TID253
"""Live tensors that share memory, wholly or in part: what is written to all of them must leave each right."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy
import torch

from ckptd.snapshot import keypath
from ckptd.snapshot.keypath import Path
from ckptd.tensors.generator_state import GENERATORS, state_of
from ckptd.tensors.optim_storable import place
from ckptd.tensors.registered_tags import fields_of
from ckptd.tensors.tag_reader import GeneratorElsewhere
from ckptd.tensors.unread import NOTHING_UNREAD, Unread

_ALIGNMENT: Final = 16  # of the widest dtype


@dataclass(frozen=True, slots=True, eq=False)
class Target:
    """A live tensor, and what will be written into it.

    Attributes:
        stored: None where it keeps its value, or where nobody knows what becomes of it.
        set_apart: Has what holds it get a tensor of its own instead; None where that can't be: it is an object's, or
            isn't written.
        by_place: Whether the checkpoint keeps its ties. It doesn't keep an array's: their values tell.
        arrived: Says to what writes it that stored's bytes are in live already; None where the write may do more than
            copy them.
    """

    path: Path
    live: torch.Tensor
    stored: torch.Tensor | None
    set_apart: Callable[[], None] | None = None
    by_place: bool = True
    arrived: Callable[[], None] | None = None


@dataclass(frozen=True, slots=True)
class Ties:
    """What to do about live tensors that share memory.

    Attributes:
        apart: Those that are to be set apart: the checkpoint has them by themselves.
        faults: Key path and reason of each that would be overwritten by another, and can't be set apart.
    """

    apart: list[Target] = field(default_factory=list)
    faults: list[tuple[Path, str]] = field(default_factory=list)


def settle_ties(targets: Iterable[Target], held: Iterable[Target], unread: Unread = NOTHING_UNREAD) -> Ties:
    """Decide which live tensors stay tied.

    Those of objects stay as they are, and are right only if their stored values agree: each group is written into a
    copy of its memory, and every member is read back. One in plain data stays tied where the checkpoint ties
    it to the same tensors, or is another view with values that agree; never to one that isn't written.

    Args:
        targets: Those that will be written.
        held: Any others of the state; those of targets may be among them.
        unread: Stored tensors without content; those that are compared are read.
    """
    ties, known = Ties(), [*held, *targets]
    written = {place(one.live) for one in _written(known) if one.set_apart is None}
    known = [one for one in known if one.stored is not None or place(one.live) not in written]
    order = {id(target): position for position, target in enumerate(known)}
    for group in overlapping(known):
        if is_one_tensor(group):
            continue
        unread.need([one.stored for one in _written(group)])
        apart = _apart(sorted(group, key=lambda target: (target.set_apart is not None, order[id(target)])))
        ties.apart.extend(apart)
        gone = set(map(id, apart))
        ties.faults.extend(_faults([target for target in _written(group) if id(target) not in gone]))
    return ties


def is_one_tensor(group: list[Target]) -> bool:
    """Whether all of them are one live tensor, tied as the stored ones are."""
    first = group[0]
    return all(_same_tensor(one, first) for one in group) and not _may_overlap_itself(first.live)


def _written(group: Iterable[Target]) -> list[Target]:
    return [target for target in group if target.stored is not None]


def _apart(group: Iterable[Target]) -> list[Target]:
    """Those of plain data that don't go with what comes before them in the group."""
    kept: list[Target] = []
    apart: list[Target] = []
    for target in group:
        goes = target.set_apart is None or _goes_with(kept, target)
        (kept if goes else apart).append(target)
    return apart


def _goes_with(kept: Iterable[Target], target: Target) -> bool:
    if any(one.stored is None and _meet(one.live, target.live) for one in kept):
        return False
    for one in kept:
        if target.by_place and place(one.live) == place(target.live):
            return _same_tensor(one, target)
    return not _overwritten([*_written(kept), target]) or bool(_overwritten([target]))


def _meet(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether they reach into one stretch of memory."""
    return one.data_ptr() < other.data_ptr() + _reach(other) and other.data_ptr() < one.data_ptr() + _reach(
        one
    )


def _faults(group: list[Target]) -> Iterator[tuple[Path, str]]:
    for target in _overwritten(group):
        other = next((one for one in group if one is not target), None)
        where = "" if other is None else f" with {keypath.show(other.path)}"
        yield (
            target.path,
            f"shares its memory{where or ' between its own elements'} in the live state, "
            "and their values in the checkpoint differ",
        )


def _may_overlap_itself(tensor: torch.Tensor) -> bool:
    """Whether two elements may lie at one place, as in an expanded tensor or an unfolded one; True when in doubt."""
    if tensor.is_contiguous():
        return False
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride <= reach:
                return True
            reach += (size - 1) * stride
    return False


def overlapping(targets: Iterable[Target]) -> Iterator[list[Target]]:
    """Groups whose live bytes overlap, one of them written at least; of one where its own may."""
    by_device: dict[torch.device, list[tuple[int, int, Target]]] = defaultdict(list)
    for target in targets:
        if target.live.numel():
            begin = target.live.data_ptr()
            by_device[target.live.device].append((begin, begin + _reach(target.live), target))
    for spans in by_device.values():
        spans.sort(key=lambda span: span[:2])
        group: list[Target] = []
        end = 0
        for begin, stop, target in spans:
            if group and begin >= end:
                if _is_shared(group):
                    yield group
                group, end = [], 0
            group.append(target)
            end = max(end, stop)
        if _is_shared(group):
            yield group


def _is_shared(group: list[Target]) -> bool:
    written = _written(group)
    return bool(written) and (len(group) > 1 or any(_may_overlap_itself(one.live) for one in written))


def _reach(tensor: torch.Tensor) -> int:
    """Bytes from the first to past the last element; strides are never negative in torch."""
    if tensor.is_contiguous():
        return tensor.nbytes
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.itemsize


def _same_tensor(one: Target, other: Target) -> bool:
    """Whether both are the same view of live memory, and the same view of stored memory: a tie kept."""
    if one.stored is None or other.stored is None:
        return False
    return place(one.live) == place(other.live) and place(one.stored) == place(other.stored)


def _overwritten(group: list[Target]) -> list[Target]:
    if not group or (len(group) == 1 and not _may_overlap_itself(group[0].live)):
        return []
    start = min(target.live.data_ptr() for target in group) // _ALIGNMENT * _ALIGNMENT
    if any(target.live.data_ptr() % target.live.itemsize for target in group):
        return group  # torch can't view what lies askew; refused rather than guessed
    size = max(target.live.data_ptr() + _reach(target.live) for target in group) - start
    memory = torch.zeros(size, dtype=torch.uint8, device="cpu")
    views = [_view(memory, target.live, target.live.data_ptr() - start) for target in group]
    with torch.no_grad():
        stored = [
            one.stored.to(device="cpu", dtype=one.live.dtype) for one in group if one.stored is not None
        ]
        for view, value in zip(views, stored, strict=True):
            _write(view, value)
        return [
            target
            for target, view, value in zip(group, views, stored, strict=True)
            if not same_bits(view, value)
        ]


def _write(view: torch.Tensor, stored: torch.Tensor) -> None:
    for dim, (stride, size) in enumerate(zip(view.stride(), view.shape, strict=True)):
        if stride == 0 and size > 1:  # torch refuses to write one element several times
            view, stored = view.narrow(dim, 0, 1), stored.narrow(dim, 0, 1)
    view.copy_(stored)


def _view(memory: torch.Tensor, live: torch.Tensor, offset: int) -> torch.Tensor:
    """The part of memory that stands for live."""
    part = memory[offset : offset + _reach(live)].view(live.dtype)
    return part.as_strided(live.shape, live.stride(), part.storage_offset())


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two CPU tensors of one shape and dtype hold the same bytes; NaN equals itself, 0 isn't -0."""
    return torch.equal(_bits(one), _bits(other))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def same_stored(one: Any, other: Any) -> bool:
    """Whether two stored values are equal to the bit and in type; False for what can't be compared."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.shape == other.shape and one.dtype == other.dtype and same_bits(one, other)
    if isinstance(one, numpy.ndarray):
        return (
            one.shape == other.shape and one.dtype == other.dtype and bool(one.tobytes() == other.tobytes())
        )
    if isinstance(one, Mapping):
        return list(one) == list(other) and all(same_stored(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple, deque)):
        return len(one) == len(other) and all(map(same_stored, one, other))
    if (fields := fields_of(one)) is not None:
        return same_stored(fields, fields_of(other))
    if isinstance(one, numpy.generic):
        return bool(one.dtype == other.dtype and one.tobytes() == other.tobytes())
    if isinstance(one, GeneratorElsewhere):
        return (one.device, one.state) == (other.device, other.state)
    if isinstance(one, GENERATORS):
        return same_stored(state_of(one), state_of(other))
    if isinstance(one, (float, complex)):
        return repr(one) == repr(other)
    return bool(one == other)
