"""The ResumableLoaders of a state, and what of them a restore leaves for later."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ckptd.loop.loader import ResumableLoader


def loaders_of(state: Mapping[Any, Any]) -> list[ResumableLoader]:
    """Those of the state, also in containers in it."""
    return list(_loaders_in(state))


def _loaders_in(value: Any) -> Iterator[ResumableLoader]:
    if isinstance(value, ResumableLoader):
        yield value
    elif isinstance(value, (dict, list, tuple)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _loaders_in(item)


def comes_late(loader: ResumableLoader) -> Iterator[Any]:
    """Objects that a restore in mid-epoch leaves as they are: their values come back when the loader is next iterated.

    The position holds them: as a state_dict, or because the batches before it are fetched again.
    """
    if loader.batch_in_epoch:
        memory, again = loader._memory, loader.resumes_by.startswith("refetch")
        for holder in memory._holders:
            if holder.path and (again or memory._covered(holder.path)):
                yield holder.of


def is_between_epochs(loader: ResumableLoader) -> bool:
    """Before an epoch's first batch, or after its last."""
    try:
        return loader.batch_in_epoch in (0, len(loader))
    except TypeError:  # a dataset without a length
        return loader.batch_in_epoch == 0
