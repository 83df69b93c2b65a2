# ruff: noqa: TID253
"""How a DataLoader can be resumed exactly, decided from what it is; and which can't be."""

from __future__ import annotations

import sys
from typing import Any, Final, Literal, NamedTuple

from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.dataloader import _BaseDataLoaderIter
from torch.utils.data.datapipes.datapipe import IterDataPipe

from ckptd.errors import InvalidArgument
from ckptd.loop.loader_memory import has_state_dict

How = Literal["skip", "load", "refetch"]


class Way(NamedTuple):
    """How a resumed run comes to its position, and why so.

    Attributes:
        how: "skip": the sampler is run to the position, nothing is fetched. "load": the dataset's own state is loaded
            and it goes on from there. "refetch": the batches before the position are fetched again and dropped.
        why: The reason, a clause.
    """

    how: How
    why: str

    def __str__(self) -> str:
        return f"{self.how}: {self.why}"


SKIP: Final = Way("skip", "the order and every generator are known without fetching")


def has_own_iter(loader: DataLoader[Any]) -> bool:
    """Whether its class decides itself what iterating over it means."""
    return type(loader).__iter__ is not DataLoader.__iter__


def is_torchdatas(loader: DataLoader[Any]) -> bool:
    """Whether it is a StatefulDataLoader: what it yields is decided by what it holds, as with torch's, and not by
    the position that it keeps, as long as none was loaded."""
    torchdata = sys.modules.get("torchdata.stateful_dataloader")  # not imported: then nothing is of it
    kind, own = getattr(torchdata, "StatefulDataLoader", None), type(loader)
    methods = ("__iter__", "_get_iterator", "state_dict", "load_state_dict")
    return kind is not None and all(getattr(own, name) is getattr(kind, name) for name in methods)


def draws_apart(loader: DataLoader[Any], way: Way) -> bool:
    """Whether its fetches draw from generators of their own: those that a resume always repeats in this process."""
    return way.how == "refetch" and (not loader.num_workers or has_own_iter(loader))


def is_iterable(loader: DataLoader[Any]) -> bool:
    return isinstance(loader.dataset, IterableDataset)


def is_pipe(loader: DataLoader[Any]) -> bool:
    return isinstance(loader.dataset, IterDataPipe)


def way_of(loader: DataLoader[Any], *, too_many: str = "") -> Way:
    """The way for a loader that isn't refused, as far as its kind decides.

    Args:
        loader: The DataLoader.
        too_many: What there is more of than can be looked into; "" if nothing.
    """
    if has_own_iter(loader):
        return Way("refetch", f"{type(loader).__qualname__} has its own __iter__")
    if is_iterable(loader):
        if loader.num_workers:
            return Way("refetch", "an iterable dataset in workers has no position from outside")
        if has_state_dict(loader.dataset) and not is_pipe(loader):
            return Way("load", "the iterable dataset has a state_dict")
        return Way("refetch", "the iterable dataset has no state_dict")
    if too_many:
        return Way("refetch", f"dataset and samplers hold over {too_many}, too many to look into")
    return SKIP


def refuse_inexact(loader: Any) -> None:
    """Refuse what can't be resumed exactly.

    Raises:
        InvalidArgument: Not a DataLoader, or one of those that ResumableLoader's docstring lists.
    """
    if not isinstance(loader, DataLoader):
        raise InvalidArgument(
            "not a DataLoader",
            where="loader",
            seen=type(loader).__name__,
            wanted="torch.utils.data.DataLoader",
        )
    if has_state_dict(loader) and not is_torchdatas(loader):
        raise InvalidArgument(
            "a loader that keeps its own position", where="loader", seen=type(loader).__qualname__,
            todo="use a plain DataLoader, or put it into the state itself, where it is as exact as it is by itself",
        )  # fmt: skip
    fault = _fault(loader)
    if fault is not None:
        where, seen, todo = fault
        raise InvalidArgument("a loader that can't be resumed exactly", where=where, seen=seen, todo=todo)


def _fault(loader: DataLoader[Any]) -> tuple[str, str, str] | None:
    if loader.num_workers and not getattr(loader, "in_order", True):
        return (
            "in_order",
            "False: batches come in the order in which workers happen to finish",
            "make the DataLoader with in_order=True",
        )
    for name, value in vars(loader).items():
        if name != "_iterator" and isinstance(value, _BaseDataLoaderIter):
            return (
                f"loader.{name}",
                f"{type(loader).__qualname__} keeps an iterator over epochs, whose position is out of reach",
                "use a DataLoader with persistent_workers=True",
            )
    if is_torchdatas(loader) and (loader.next_iter_state or loader._initial_iter_for_state_dict):  # type: ignore[attr-defined]
        return (
            "loader",
            f"{type(loader).__qualname__}, which was given a position, or asked for it, before its first epoch",
            "leave that to ResumableLoader",
        )
    if loader.persistent_workers and (has_own_iter(loader) or is_pipe(loader)):
        kind = type(loader) if has_own_iter(loader) else type(loader.dataset)
        return (
            "persistent_workers",
            f"True, and {kind.__qualname__} has its own __iter__: its workers' generators are out of reach",
            f"{'use a plain DataLoader, or ' * is_torchdatas(loader)}make the DataLoader with persistent_workers=False",
        )
    return None
