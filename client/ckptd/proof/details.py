"""What a report says beside the finding itself: how far two tensors are apart, and what weakens the proof."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path

from ckptd.proof.comparing import Finding
from ckptd.proof.elements import apart
from ckptd.proof.trace import Leaf, Moment, Trace, component_of


def how_far_apart(found: Finding, wanted: Trace, seen: Trace) -> str:
    """`3 of 12 elements differ, …` for a tensor whose bytes both runs kept; else ""."""
    one, other = seen.moments.get(found.step), wanted.moments.get(found.step)
    if not found.key or one is None or other is None or not (one.values and other.values):
        return ""
    leaf, right = one.leaves.get(found.key), other.leaves.get(found.key)
    if (
        leaf is None
        or right is None
        or not leaf.dtype
        or (leaf.dtype, leaf.nbytes) != (right.dtype, right.nbytes)
    ):
        return ""
    count = math.prod(_shape(leaf)) or 1
    return apart(leaf.dtype, leaf.nbytes // count, _bytes(one, leaf), _bytes(other, right))


def _shape(leaf: Leaf) -> list[int]:
    dims = leaf.text.partition("[")[2].partition("]")[0]
    return [int(dim) for dim in dims.split(",") if dim.strip()]


def _bytes(moment: Moment, leaf: Leaf) -> bytes:
    with Path(moment.values).open("rb") as file:
        file.seek(leaf.offset)
        return file.read(leaf.nbytes)


def notes_on(base: Trace) -> Iterator[str]:
    """What would make a proof worth little."""
    losses = [moment.losses for moment in base.moments.values() if moment.losses]
    bad = next(
        (m.step for m in base.moments.values() if not all(_finite(x) for x in m.losses.values())), None
    )
    if bad is not None:
        yield f"a loss is not finite from step {bad} on: what follows proves little"
    elif all(one == losses[0] for one in losses):
        yield "the losses never change: does the job train?"
    first, last = base.moments[0].leaves, base.moments[max(base.moments)].leaves
    for name, kind in base.kinds.items():
        if kind == "module" and _unchanged(name, first, last):
            yield f"state[{name!r}] never changed: is it the object that the loop trains?"


def _unchanged(name: str, first: Mapping[str, Leaf], last: Mapping[str, Leaf]) -> bool:
    return all(leaf.same(last.get(key)) for key, leaf in first.items() if component_of(key) == name)


def _finite(text: str) -> bool:
    return math.isfinite(float(text))
