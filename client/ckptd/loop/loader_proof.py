"""What lets a resume prove itself: the fingerprint of a batch, and the memory that its fetch began with.

Going on relies on knowing all that decides a batch. So the batches yielded last, one of each worker, are made again on
the way to the position; if they aren't what they were, something decides them that nobody knows of.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from ckptd.loop.loader_memory import Glimpse, Record
from ckptd.warning import warn


class Proof(NamedTuple):
    """Of one batch that was yielded.

    Attributes:
        worker: Which made it; 0 without workers.
        print: Its fingerprint; None if nothing of it could be read.
        before: The memory that its fetch began with; None where it isn't known.
    """

    worker: int
    print: int | None
    before: Glimpse | Record | None

    def record(self) -> Record:
        """The memory before, as plain values."""
        if isinstance(self.before, Glimpse):
            return self.before.record()
        return self.before or {}

    def plain(self, *, again: bool) -> dict[str, Any]:
        """As plain values; again: whether it may have to be fetched alone."""
        before = self.record() if again and self.before is not None else None
        return {"worker": self.worker, "print": self.print, "before": before}


def proofs_of(stored: Iterable[dict[str, Any]]) -> list[Proof]:
    return [Proof(one["worker"], one["print"], one["before"]) for one in stored]


def can_be_proven(proofs: Sequence[Proof]) -> bool:
    """Whether fetching these batches again would show something."""
    return all(proof.before is not None for proof in proofs) and any(
        proof.print is not None for proof in proofs
    )


def differ(before: Sequence[Proof], now: Iterable[Proof]) -> bool:
    """Whether the batches that were made again aren't what they were; False where there is nothing to compare with."""
    known, made = ([(proof.worker, proof.print) for proof in proofs] for proofs in (before, now))
    return bool(known) and made != known


def say_other_data() -> None:
    """Warn that a resume didn't prove itself."""
    warn(
        "the data after this resume are most likely not those of the uninterrupted run: the batches before the "
        "position were fetched again with everything that was recorded, and the last of them (by a check number over a "
        "part of their bytes) aren't what they were. The dataset, collate_fn or a sampler depends on something that isn't "
        "recorded: a counter, list, array, iterator or generator out of sight (give the dataset state_dict and "
        "load_state_dict, or draw from the global generators), the time, threads or a file; or on a model that has "
        "been trained since, which alone would be no harm"
    )
