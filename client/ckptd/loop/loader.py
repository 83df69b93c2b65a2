# ruff: noqa: TID253
"""A DataLoader that goes on in the middle of an epoch, after the batch it had yielded.

A shuffled epoch is decided by random draws made when its iterator is created and at its first batch, and
workers are seeded then. So the position is: the generators as they were just before, and how many batches
were yielded since. To go on, the epoch is started again from those generators, that many batches are fetched
and dropped, and then every generator is put back to where the restore had left it: the next batch, and the
next draw of the training loop, are those of the uninterrupted run.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from typing import Any

from torch.utils.data import DataLoader

from ckptd.errors import CheckpointWarning, InvalidArgument, StateMismatch
from ckptd.loop.loader_rng import (
    GeneratorStates,
    own_generators,
    read_generators,
    read_global_generators,
    set_generators,
    set_global_generators,
)

_KEYS = {"epoch", "batches", "start", "first", "generators", "workers", "batch_size", "length"}


class ResumableLoader:
    """Wraps any DataLoader; put it into the state and loop over it in place of the loader.

    Exact with and without workers and prefetching, with an own generator, in any epoch, as often as wanted.
    It counts batches *yielded*, so a prefetched batch that the loop hasn't seen yet isn't lost. Going on
    fetches the batches before the position once more. A loop left by `break` counts as paused: a resumed run
    goes on with the rest of that epoch (in the same process a new `for` starts a new one, as with any
    DataLoader).

    Recorded besides the global generators of Python, NumPy and torch: every torch.Generator, NumPy Generator
    or RandomState and random.Random that is an attribute of the loader, its samplers, its dataset (through
    `.dataset` of a Subset too) or its collate_fn. Not recorded: other state of those objects. Call
    `set_epoch` of a DistributedSampler as always, before the loop.

    Args:
        loader: The DataLoader. Everything but iteration is passed on to it (`len`, `.dataset`, …).

    Raises:
        InvalidArgument: Not a DataLoader; or one that can't be resumed exactly: `persistent_workers=True`
            (workers keep their generators over epochs, out of reach) or `in_order=False`.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        if not isinstance(loader, DataLoader):
            raise InvalidArgument(
                "not a DataLoader",
                where="loader",
                seen=type(loader).__name__,
                wanted="torch.utils.data.DataLoader",
            )
        for option, wanted in (("persistent_workers", False), ("in_order", True)):
            if getattr(loader, option, wanted) is not wanted:
                raise InvalidArgument(
                    "a loader that can't be resumed exactly",
                    where=option,
                    seen=str(not wanted),
                    wanted=str(wanted),
                    todo=f"make the DataLoader with {option}={wanted}",
                )
        self._loader = loader
        self._epoch = 0
        self._batches = 0
        self._start: dict[str, Any] | None = None  # None: between two epochs
        self._first: dict[str, Any] | None = None
        self._resuming = False
        self._pass = object()  # Names the iterator whose batches count: an older one no longer does.

    @property
    def epoch(self) -> int:
        """Which pass over the data is under way, from 0; between two, which one comes next."""
        return self._epoch

    @property
    def batch_in_epoch(self) -> int:
        """Batches of that pass which were yielded."""
        return self._batches

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_loader":
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __repr__(self) -> str:
        resuming = " resuming" if self._resuming else ""
        return f"<ResumableLoader epoch={self._epoch} batch={self._batches}{resuming}>"

    def __iter__(self) -> Iterator[Any]:
        self._pass = object()
        if self._resuming:
            self._resuming = False
            return _Batches(self, self._pass, self._go_on(), begun=self._batches > 0)
        if self._start is not None:
            self._epoch += 1  # The pass before was left by break.
        self._batches, self._first = 0, None
        self._start = self._record()
        return _Batches(self, self._pass, iter(self._loader), begun=False)

    def _go_on(self) -> Iterator[Any]:
        found = self._record()
        if self._start is not None:
            self._put(self._start)
        batches: Iterator[Any] = iter(self._loader)
        if self._first is not None:
            self._put(self._first)
        try:
            for _ in range(self._batches):
                next(batches)
        except StopIteration:
            raise StateMismatch(
                "the loader ends before the position", where="loader", wanted=f"over {self._batches} batches",
                todo="restore with the dataset and batch size of the checkpoint",
            ) from None  # fmt: skip
        finally:
            self._put(found)
        return batches

    def _record(self) -> dict[str, Any]:
        return {"global": read_global_generators(), "own": self._generators()}

    def _put(self, record: Mapping[str, Any]) -> None:
        set_global_generators(record["global"])
        set_generators(own_generators(self._loader), record["own"])

    def _generators(self) -> GeneratorStates:
        return read_generators(own_generators(self._loader))

    def _before_the_first_batch(self, which: object) -> None:
        # Without workers the sampler draws its permutation only now, and others may have drawn since iter().
        if which is self._pass and self._loader.num_workers == 0:
            self._first = self._record()

    def _after_a_batch(self, which: object) -> None:
        if which is self._pass:
            self._batches += 1

    def _after_the_last(self, which: object) -> None:
        if which is self._pass and self._start is not None:
            self._epoch += 1
            self._batches, self._start, self._first = 0, None, None

    def state_dict(self) -> dict[str, Any]:
        """The position, as plain values. Draws from no generator."""
        return {
            "epoch": self._epoch,
            "batches": self._batches,
            "start": self._start,
            "first": self._first,
            "generators": self._generators(),
            **self._kind(),
        }

    def _kind(self) -> dict[str, Any]:
        try:
            length = len(self._loader)
        except TypeError:  # an IterableDataset without a length
            length = None
        return {"workers": self._loader.num_workers, "batch_size": self._loader.batch_size, "length": length}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a position; the next iterator goes on from it. Own generators are set at once.

        Raises:
            StateMismatch: It isn't a position, or one of another batch size, length or set of own generators.
                Nothing was changed.
        """
        if not isinstance(state, Mapping) or set(state) != _KEYS:
            raise StateMismatch(
                "not the position of a ResumableLoader", seen=_shape(state), wanted=str(sorted(_KEYS))
            )
        live = self._kind()
        if state["start"] is not None:
            _compare(state, live)
        set_generators(own_generators(self._loader), state["generators"])
        self._epoch, self._batches = int(state["epoch"]), int(state["batches"])
        self._start, self._first = state["start"], state["first"]
        self._resuming = self._start is not None
        self._pass = object()


class _Batches(Iterator[Any]):
    """One pass. It holds the workers; the loader doesn't, so that leaving the loop ends them."""

    def __init__(
        self, loader: ResumableLoader, which: object, batches: Iterator[Any], *, begun: bool
    ) -> None:
        self._loader, self._which, self._batches, self._begun = loader, which, batches, begun

    def __next__(self) -> Any:
        if not self._begun:
            self._begun = True
            self._loader._before_the_first_batch(self._which)
        try:
            batch = next(self._batches)
        except StopIteration:
            self._loader._after_the_last(self._which)
            raise
        self._loader._after_a_batch(self._which)
        return batch


def _compare(state: Mapping[str, Any], live: Mapping[str, Any]) -> None:
    for name in ("batch_size", "length"):
        if state[name] != live[name]:
            raise StateMismatch(
                "the checkpoint is in the middle of an epoch of another loader", where=f"loader.{name}",
                seen=str(live[name]), wanted=str(state[name]),
                todo="give the DataLoader the checkpoint's value, or restore without the loader",
            )  # fmt: skip
    if state["workers"] != live["workers"]:
        warnings.warn(
            f"loader.num_workers is {live['workers']}, {state['workers']} in the checkpoint: the rest of "
            "this epoch has the same samples, but other random draws in their augmentation",
            CheckpointWarning,
            stacklevel=4,
        )


def _shape(state: object) -> str:
    return str(sorted(map(str, state))) if isinstance(state, Mapping) else type(state).__name__
