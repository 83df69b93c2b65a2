"""The first thing in which two runs of a job differ. Pure: traces in, a finding out."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final

from ckptd.proof.trace import Leaf, Moment, Trace, component_of, is_part, root_of, show_key, show_scoped

#: In which order things that differ after the same step are named.
_ORDER: Final = ("module", "optimizer", "scheduler", "loader", "gradients", "data", "generator", "rng")
_ABSENT: Final = "absent"


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """How much of one component differs.

    Attributes:
        component: Its name; "rng" for the global generators.
        differing, total: Values of it that differ, and all it has on either side.
    """

    component: str
    differing: int
    total: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Two runs differ.

    Attributes:
        step: The first step after which they do.
        kind: `loss`, `end` (one has no more steps), or what the component is: module, optimizer, scheduler,
            loader, gradients, data, generator, rng.
        where: `loss`, `losses`, or a key path of the state.
        key: The leaf's key; "" for a loss.
        seen, wanted: The value in the run that is checked, and in the one it is checked against.
        extents: Every component of the state, in the order of the state.
    """

    step: int
    kind: str
    where: str
    key: str
    seen: str
    wanted: str
    extents: tuple[Extent, ...]

    @property
    def rng_differs(self) -> bool:
        return any(one.differing for one in self.extents if one.component == "rng")


def first_difference(wanted: Trace, seen: Trace, *, steps: Collection[int] | None = None) -> Finding | None:
    """The first step of `seen` that `wanted` has too in which they differ, and the first thing in it.

    Args:
        wanted: The run that counts as right.
        seen: The run that is checked.
        steps: Only these; None means all that both have.
    """
    for step in sorted(seen.moments):
        if step in wanted.moments and (steps is None or step in steps):
            found = differing(wanted.moments[step], seen.moments[step], wanted.kinds | seen.kinds)
            if found is not None:
                return found
    if steps is None and seen.ended is not None and seen.ended < wanted.last_step:
        return Finding(
            step=seen.ended + 1, kind="end", where="losses", key="", seen="the job has no more steps",
            wanted="a step", extents=(),
        )  # fmt: skip
    return None


def differing(wanted: Moment, seen: Moment, kinds: Mapping[str, str]) -> Finding | None:
    """The first thing in which two moments of the same step differ; a moment without losses is compared without."""
    if wanted.leaves == seen.leaves and (not seen.losses or wanted.losses == seen.losses):
        return None
    extents = tuple(_extents(wanted.leaves, seen.leaves))
    losses = _first_loss(wanted.losses, seen.losses) if wanted.losses and seen.losses else None
    if losses is not None:
        name, was, should = losses
        where = "loss" if name == "loss" else f"loss {name!r}"
        return Finding(
            step=seen.step, kind="loss", where=where, key="", seen=was, wanted=should, extents=extents
        )
    key = _first_key(wanted.leaves, seen.leaves, kinds)
    if key is None:
        return None
    return Finding(
        step=seen.step, kind=kinds.get(component_of(key), "data"), where=show_key(key), key=key,
        seen=_text(seen.leaves.get(key)), wanted=_text(wanted.leaves.get(key)), extents=extents,
    )  # fmt: skip


def _first_loss(wanted: Mapping[str, str], seen: Mapping[str, str]) -> tuple[str, str, str] | None:
    for name in (*wanted, *seen):
        was, should = seen.get(name, _ABSENT), wanted.get(name, _ABSENT)
        if was != should:
            return name, was, should
    return None


def _first_key(wanted: Mapping[str, Leaf], seen: Mapping[str, Leaf], kinds: Mapping[str, str]) -> str | None:
    first: tuple[int, str] | None = None
    for key in _all_keys(wanted, seen):
        if not _same(wanted, seen, key):
            turn = _turn(kinds.get(component_of(key), "data"))
            if first is None or turn < first[0]:
                first = (turn, key)
    return None if first is None else first[1]


def _turn(kind: str) -> int:
    return _ORDER.index(kind) if kind in _ORDER else _ORDER.index("data")


def _extents(wanted: Mapping[str, Leaf], seen: Mapping[str, Leaf]) -> list[Extent]:
    counts: dict[str, tuple[int, int]] = {}
    for key in _all_keys(wanted, seen):
        name = component_of(key)
        differs, total = counts.get(name, (0, 0))
        counts[name] = (differs + (not _same(wanted, seen, key)), total + 1)
    return [Extent(component=name, differing=one, total=all_) for name, (one, all_) in counts.items()]


def _all_keys(wanted: Mapping[str, Leaf], seen: Mapping[str, Leaf]) -> list[str]:
    return [*wanted, *(key for key in seen if key not in wanted)]


def _same(wanted: Mapping[str, Leaf], seen: Mapping[str, Leaf], key: str) -> bool:
    return key in wanted and wanted[key].same(seen.get(key))


def _text(leaf: Leaf | None) -> str:
    if leaf is None:
        return _ABSENT
    return f"{leaf.text} ({leaf.digest[:12]}…)" if leaf.digest else leaf.text


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspect:
    """Something the job reaches beside its state, of another value right after the restore than at the snapshot.

    Attributes:
        name: The variable or object, such as `ema in losses()` or `state['model']`.
        example: One value of it that differs, such as `ema.decay in losses()`.
        seen, wanted: That value after the restore, and at the snapshot.
        values: How many of its values differ.
        has_state: Whether it is an object with `state_dict`, so that it can be put into the state as it is.
    """

    name: str
    example: str
    seen: str
    wanted: str
    values: int
    has_state: bool = False


def suspects_of(
    wanted: Mapping[str, Leaf], seen: Mapping[str, Leaf], with_state: Collection[str] = ()
) -> tuple[Suspect, ...]:
    """What both runs reach beside the state and that differs, one for each variable or object.

    Args:
        wanted, seen: Name → value; see trace.scoped.
        with_state: Names of objects that have `state_dict`; what differs in one is named after it.
    """
    known = {root_of(name) for name in seen}
    found: dict[str, list[str]] = {}
    for name in wanted:
        if root_of(name) in known and not _same(wanted, seen, name):
            of = next((one for one in with_state if is_part(name, one)), root_of(name))
            found.setdefault(of, []).append(name)
    return tuple(
        Suspect(
            name=show_scoped(of), example=show_scoped(names[0]), seen=_text(seen.get(names[0])),
            wanted=_text(wanted.get(names[0])), values=len(names), has_state=of in with_state,
        )
        for of, names in found.items()
    )  # fmt: skip


def made_anew(wanted: Mapping[str, Leaf], seen: Mapping[str, Leaf]) -> tuple[str, ...]:
    """Variables that the loop had at the snapshot and, resumed, makes anew: it starts from its first line."""
    known = {root_of(name) for name in seen}
    roots = dict.fromkeys(root for name in wanted if (root := root_of(name)) not in known)
    return tuple(show_scoped(root) for root in roots)
