"""What a process writes without a daemon, again and again with one more call of a kind failing, until none is met."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, Protocol

import torch

import ckptd
from ckptd.errors import CkptdError, NoSpace, OutcomeUnknown, SaveFailed
from ckptd.names import parse_work_folder
from failing_stories import Told
from kept_promises import says_too_little
from nth_call import Orders, failing

_MANY: Final = 20  #: rounds in one folder


def state_of(step: int) -> dict[str, Any]:
    return {"weights": torch.full((300,), float(step)), "counter": step}


class Writer(Protocol):
    """Writes into a folder of its own while a call fails, and after that once more."""

    def write(self) -> Iterator[str]:
        """Write; what is wrong with what it said or raised."""

    def wrong(self) -> Iterator[str]:
        """Nothing fails any more: what is wrong on the disk, or with one more write."""


class WithoutDaemon:
    """`Client(daemon="off")`: opened, restored from, two snapshots, closed."""

    def __init__(self, folder: Path) -> None:
        self.root, self.step = folder / "fresh" / "root", 0
        self.acked, self.unknown = set[int](), set[int]()

    def write(self) -> Iterator[str]:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", ckptd.CheckpointWarning)
                yield from self._session()
        except CkptdError as error:
            yield from says_too_little(error)

    def wrong(self) -> Iterator[str]:
        yield from self._session(well=True)
        for path in self.root.rglob("*"):
            if parse_work_folder(path.name) is not None:
                yield f"left over: {path.relative_to(self.root)}"
        newest = max(self.acked)
        if (found := ckptd.latest_valid(self.root)) is None or found.step != newest:
            yield f"latest is {found and found.step}, not {newest}"

    def _session(self, *, well: bool = False) -> Iterator[str]:
        with ckptd.Client(self.root, daemon="off") as client:
            state = state_of(0)
            resumed = client.restore(state)
            if (
                resumed is not None and resumed.passed_over and not well
            ):  # it couldn't be read, and that was said
                self.unknown |= {step for step in self.acked if step > resumed.step}
                self.acked -= self.unknown
            yield from self._resumed(None if resumed is None else resumed.step, state)
            for _ in range(2):
                self.step += 1
                ticket = client.snapshot(self.step, state_of(self.step))
                if ticket.committed:
                    self.acked.add(self.step)
                elif ticket.state == "unknown":
                    self.unknown.add(self.step)
                if ticket.error is not None:
                    yield from says_too_little(ticket.error)
                if well and not ticket.committed:
                    yield f"the next save is {ticket.state}: {ticket.error}"

    def _resumed(self, step: int | None, state: dict[str, Any]) -> Iterator[str]:
        newest = max(self.acked, default=None)
        if step not in {newest, *(one for one in self.unknown if one > (newest or 0))}:
            yield f"resumed from {step}, acknowledged was {newest}"
        elif step is not None and not torch.equal(state["weights"], state_of(step)["weights"]):
            yield f"step {step} has another state"


class Saved:
    """`ckptd.save`, to a folder whose parents are missing."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._number = folder, 0
        self._said: Exception | None = None

    def write(self) -> Iterator[str]:
        self._number += 1
        self._said = None
        try:
            ckptd.save(self._path, state_of(self._number), step=self._number)
        except (NoSpace, SaveFailed, OutcomeUnknown) as error:
            self._said = error
            yield from says_too_little(error)

    def wrong(self) -> Iterator[str]:
        if self._said is not None and not isinstance(self._said, OutcomeUnknown) and self._path.exists():
            yield f"it is there, and was said not to be: {self._said}"
        if self._said is None and not self._path.exists():
            yield "it isn't there, and was said to be"
        if not self._path.exists():
            ckptd.save(self._path, state_of(self._number), step=self._number)
        ckptd.verify(self._path)
        if not torch.equal(ckptd.load(self._path)["weights"], state_of(self._number)["weights"]):
            yield "it holds another state"
        if (others := os.listdir(self._path.parent)) != [self._path.name]:
            yield f"left over: {others}"

    @property
    def _path(self) -> Path:
        return self._folder / str(self._number) / "below" / "checkpoint"


class OneFile:
    """A file that is replaced whole: `atomic_save` or `atomic_write_json`."""

    def __init__(self, folder: Path, save: Callable[[int, Path], None], load: Callable[[Path], int]) -> None:
        folder.mkdir(parents=True)
        self._path, self._save, self._load, self._number = folder / "file", save, load, 1
        save(1, self._path)
        self._right = {1}

    def write(self) -> Iterator[str]:
        before = self._number
        self._number += 1
        self._right = {self._number}
        try:
            self._save(self._number, self._path)
        except OSError:
            self._right |= {before}
        yield from ()

    def wrong(self) -> Iterator[str]:
        if (there := self._load(self._path)) not in self._right:
            yield f"it holds {there}, not {self._right}"
        self._number += 1
        self._save(self._number, self._path)
        if (there := self._load(self._path)) != self._number:
            yield f"it holds {there}, not {self._number}"
        if (others := os.listdir(self._path.parent)) != [self._path.name]:
            yield f"left over: {others}"


def _with_torch(folder: Path) -> Writer:
    return OneFile(folder, ckptd.atomic_save, lambda path: int(torch.load(path, weights_only=True)))


def _as_json(folder: Path) -> Writer:
    return OneFile(
        folder,
        lambda number, path: ckptd.atomic_write_json(path, number),
        lambda path: int(json.loads(path.read_text())),
    )


WRITERS: Final[dict[str, Callable[[Path], Writer]]] = {
    "a client without a daemon": WithoutDaemon,
    "save": Saved,
    "atomic_save": _with_torch,
    "atomic_write_json": _as_json,
}


def tell_alone(
    make: Callable[[Path], Writer], kind: str, how: Callable[[int], str], folder: Path, *, lasting: bool = False,
    first: int = 1, every: int = 1,
) -> Iterator[Told]:  # fmt: skip
    """One round after the other, with the first call failing, the second, …, until none is met."""
    orders, own = Orders.here(), folder / kind
    writer = make(own)
    for rounds, number in enumerate(itertools.count(first, every), start=1):
        if rounds % _MANY == 0:
            shutil.rmtree(own)
            writer = make(own)
        told = _round(writer, own, orders, (kind, number, how(number)), lasting)
        yield told
        if told.met == 0:
            break
    shutil.rmtree(own)


def _round(writer: Writer, own: Path, orders: Orders, fault: tuple[str, int, str], lasting: bool) -> Told:
    with failing(orders, own.parent, Path(os.environ["CKPTD_SHM_DIR"])):
        orders.fail(*fault, lasting=lasting)
        wrong = list(writer.write())
    wrong += writer.wrong()
    wrong += [f"descriptor left: {left}" for left in _open_below(own)]
    return Told(fault[1], orders.met, tuple(wrong))


def _open_below(folder: Path) -> Iterator[str]:
    for fd in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            where = os.readlink(f"/proc/self/fd/{fd}")
            if where.startswith(f"{folder}/"):
                yield where
