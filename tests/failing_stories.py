"""What a daemon does to its disk, told again and again with one more call of a kind failing, until none is met."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ckptd.disk import own_leftovers
from ckptd.disk.write_mode import Mode
from ckptd.errors import CkptdError
from failing_machine import Machine
from kept_promises import left_over, says_too_little
from nth_call import Orders, failing
from snapshots import sharded


@dataclass(frozen=True)
class Story:
    """What happens while a call fails.

    Attributes:
        act: Done while it fails.
        before: Done just before, with a disk that works.
        mode: As for Machine.
        anew: Each round has a root of its own.
        starts: It is a start: a folder that can't be looked through then is cleared by the next one.
    """

    act: Callable[[Machine], None]
    before: Callable[[Machine], None] = lambda machine: None
    mode: Mode | None = None
    anew: bool = False
    starts: bool = False


def save(machine: Machine, **taken: Any) -> str:
    """As each snapshot goes: written, listed in the run's index, proved; then retention. The verdict."""
    written = machine.write(**taken)
    machine.sum_up()
    return machine.judge(written)


def first_save(machine: Machine) -> None:
    machine.start()
    save(machine)


def served(machine: Machine) -> None:
    """It serves, and there is enough that retention has something to remove."""
    if not machine.serves:
        machine.start()
    while len(machine.promised.acked) < 3:
        save(machine)


def rewind(machine: Machine) -> None:
    served(machine)
    machine.rewind()


def quarantine(machine: Machine) -> None:
    bad = machine.write()
    machine.damage(bad)
    machine.judge(bad)
    machine.judge(machine.write())


def a_crash(machine: Machine) -> None:
    """What one leaves, in every folder of the run; and the run's index is lost."""
    served(machine)
    machine.stop()
    run_dir = machine.run_dir
    for number, name in enumerate(("tmp-9", "trash-8", "tmp-0"), start=1):
        for folder in (run_dir, run_dir / "decisions"):
            left = folder / f".{name}-{number:032x}"
            shutil.rmtree(left, ignore_errors=True)
            left.mkdir()
            (left / "ckpt.pt").write_bytes(bytes(100))
    (run_dir / "index.json").unlink(missing_ok=True)


def start(machine: Machine) -> None:
    machine.start()
    save(machine)


STORIES: Final[dict[str, Story]] = {
    "the first save on a fresh root": Story(first_save, anew=True),
    "a save over others, and retention": Story(save, served),
    "the same in shards, past the page cache": Story(lambda m: save(m, make=sharded), served, "direct"),
    "the same in one large file, through the page cache": Story(save, served, "early"),
    "a rewind: a decision is recorded": Story(save, rewind, anew=True),
    "a checkpoint that is corrupt": Story(quarantine, served, anew=True),
    "a start after a crash": Story(start, a_crash, anew=True, starts=True),
}  # type: ignore[dict-item]


@dataclass(frozen=True)
class Told:
    """A round of a story.

    Attributes:
        number: Which call failed.
        met: How many calls failed.
        wrong: What broke a promise.
    """

    number: int
    met: int
    wrong: tuple[str, ...]


def tell(
    story: Story, kind: str, how: Callable[[int], str], folder: Path, *, lasting: bool = False, first: int = 1,
    every: int = 1,
) -> Iterator[Told]:  # fmt: skip
    """One round after the other, with the first call failing, the second, …, until none is met."""
    orders = Orders.here()
    machine = None
    for number in itertools.count(first, every):
        if machine is None or story.anew:
            machine = Machine(folder / f"{kind}-{number}", orders, story.mode)
        try:
            told = _round(story, machine, orders, (kind, number, how(number)), lasting)
            yield told
        except BaseException:
            machine.stop()
            raise
        if story.anew or told.met == 0:
            machine.stop()
        if told.met == 0:
            return


def _round(
    story: Story, machine: Machine, orders: Orders, fault: tuple[str, int, str], lasting: bool
) -> Told:
    story.before(machine)
    shm, runtime = (Path(os.environ[name]) for name in ("CKPTD_SHM_DIR", "CKPTD_RUNTIME_DIR"))
    with failing(orders, machine.path.parent, shm, runtime):
        orders.fail(*fault, lasting=lasting)
        try:
            story.act(machine)
        except (CkptdError, OSError) as error:  # it didn't start: its process ends, and says so
            machine.errors.append(error)
    wrong = [*_said(machine), *machine.promised.broken(machine.path)]
    if not machine.serves or (story.starts and fault[0] in ("list", "stat")):
        machine.start()
    own_leftovers.remove(machine.path)  # as the loop does every ten seconds
    if (verdict := save(machine)) != "verified":
        wrong.append(f"the next save isn't verified but {verdict!r}: {machine.errors}")
    wrong += [*_said(machine), *machine.promised.broken(machine.path), *left_over(machine.path)]
    wrong += [f"descriptor left: {left}" for left in _open_descriptors(machine)]
    return Told(fault[1], orders.met, tuple(wrong))


def _said(machine: Machine) -> Iterator[str]:
    for error in machine.errors:
        yield from says_too_little(error)
    machine.errors.clear()


def _open_descriptors(machine: Machine) -> list[str]:
    """What is open below the root's parent, but for two that hold its lock and one that says whether it was moved."""
    found = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found.append(os.readlink(f"/proc/self/fd/{fd}"))
    for held in (machine.path, machine.path, machine.path / ".ckptd" / "lock"):
        found.remove(str(held))
    return [where for where in found if where.startswith(str(machine.path.parent))]
