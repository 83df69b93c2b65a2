"""Saves on a disk that is full, read-only or cut off in the middle, and what is there afterwards."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Iterator

from ckptd.disk import own_leftovers
from ckptd.errors import CkptdError
from failing_machine import Machine
from failing_stories import Told, save, served
from kept_promises import left_over, says_too_little
from nth_call import Orders, failing
from real_disks import Disk


def while_short(
    disk: Disk, shorten: Callable[[int], None], steps: int, most: int, enough: Callable[[], None]
) -> Iterator[Told]:
    """A save with none left, with a step more, …, until one goes well: how often it failed, and what was wrong."""
    machine = Machine(disk.path, Orders.here())
    try:
        for number in range(0, most, steps):
            served(machine)
            shorten(number)
            acked = len(machine.promised.acked)
            save(machine)
            failed = len(machine.promised.acked) == acked
            wrong = _wrong(machine)
            enough()
            own_leftovers.remove(machine.path)
            if (verdict := save(machine)) != "verified":
                wrong.append(f"the next save isn't verified but {verdict!r}")
            yield Told(number, int(failed), (*wrong, *_wrong(machine), *left_over(machine.path)))
            if not failed and not wrong:
                return
    finally:
        machine.stop()


def cut_at_each_change(disk: Disk, flush: int, first: int = 1, every: int = 1) -> Iterator[Told]:
    """The power goes before one call that changes something, the next, …; then a start on what is left."""
    orders = Orders.here()
    for number in itertools.count(first, every):
        machine = Machine(disk.path / f"{number}", orders)
        served(machine)
        os.sync()
        with failing(orders, disk.path, cut=lambda: disk.cut(flush)):
            orders.fail("change", number, "cut")
            with contextlib.suppress(CkptdError, OSError):
                save(machine)
                save(machine)
        machine.errors.clear()
        machine.stop()
        if orders.met:
            disk.unmount()
            disk.mount()
        yield Told(number, orders.met, tuple(_after_the_cut(machine)))
        if orders.met == 0:
            return


def _after_the_cut(machine: Machine) -> Iterator[str]:
    yield from machine.promised.broken(machine.path)
    own_leftovers._left.clear()  # another process starts
    machine.start()
    try:
        yield from machine.promised.broken(machine.path)
        if (verdict := save(machine)) != "verified":
            yield f"the next save isn't verified but {verdict!r}: {machine.errors}"
        yield from machine.promised.broken(machine.path)
        yield from left_over(machine.path)
    finally:
        machine.stop()


def _wrong(machine: Machine) -> list[str]:
    found = [said for error in machine.errors for said in says_too_little(error)]
    machine.errors.clear()
    return [*found, *machine.promised.broken(machine.path)]
