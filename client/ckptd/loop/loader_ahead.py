"""How far workers had run the sampler ahead, where that is another number of batches in the resumed run.

A sampler stands where it was run to, and that isn't where the batches yielded are. So a position's memory of it belongs
to as many batches read ahead: with another number it is the sampler's own way, on the way to the position, that counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from ckptd.loop.loader_memory import Record, is_fetched
from ckptd.warning import warn_after

_KEPT: Final = ("values", "contents")


def reads_ahead(kind: Mapping[str, Any]) -> int | None:
    """How many batches its workers are given before they are yielded; None if it isn't known."""
    workers, prefetch = kind.get("workers"), kind.get("prefetch")
    if not workers:
        return 0
    return workers * prefetch if isinstance(workers, int) and isinstance(prefetch, int) else None


def differs(stored: Mapping[str, Any], live: Mapping[str, Any]) -> bool:
    """Whether loaders of these kinds read ahead differently."""
    before, now = reads_ahead(stored), reads_ahead(live)
    if before is None or now is None:  # older positions don't say how far
        return bool(stored.get("workers") != live.get("workers"))
    return before != now


def as_run(found: Record, now: Record, *, apart: list[str], rebound: list[str]) -> Record:
    """The record found, but of samplers what they came to.

    Args:
        found: Everything's memory when the resume began.
        now: And now that the sampler was run to the position.
        apart: The generators that something else had drawn from too: samplers go on with a line of their own there.
        rebound: The paths of what something else had replaced in samplers.
    """
    record = dict(found)
    for part, others in (("values", []), ("contents", rebound), ("generators", apart)):
        own = {path: entry for path, entry in now[part].items() if _is_its_own(path, others)}
        record[part] = {
            **{path: entry for path, entry in found[part].items() if not _is_its_own(path, others)}, **own
        }  # fmt: skip
    return record


def _is_its_own(path: str, others: list[str]) -> bool:
    return not is_fetched(path) and path not in others


def say_read_ahead(position: Mapping[str, Any], live: Mapping[str, Any]) -> None:
    """Warn where something else than the sampler may have changed what it keeps: that would be lost."""
    of = position["pass"]
    if of is None or of.get("apart") is None or not differs(position["kind"], live):
        return
    rebound = of.get("rebound", ())
    changed = sorted(
        path for part in _KEPT for path, entry in position["now"].get(part, {}).items()
        if not is_fetched(path) and path not in rebound and entry != of["start"].get(part, {}).get(path)
    )  # fmt: skip
    if changed:
        before, now = reads_ahead(position["kind"]), reads_ahead(live)
        warn_after(
            f"workers are given {now} batches ahead, {'another number' if before is None else before} in the checkpoint "
            f"(num_workers, prefetch_factor), and {', '.join(changed)} changed in this epoch: it comes to what the "
            "sampler alone makes of it; what anything else changed there since the epoch began is missing"
        )
