"""What is done to processes: SIGKILL, SIGSTOP for a while, storms of SIGTERM, no memory left."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Final

import out_of_memory
from victims import PATIENCE_S, Daemon, Trainers, wait_gone

from ckptd.disk.rootdir import DaemonRecord

_MOST_STOPPED_S: Final = 1.5
_LEFT_BYTES: Final = (0, 2**18, 2**20, 2**22)  #: to who is starved


@dataclass
class Victims:
    """Who is there when a blow falls.

    Attributes:
        starved: How many the kernel has killed for want of memory.
    """

    trainers: Trainers
    daemon: Daemon
    random: random.Random
    starved: int = 0

    def trainer(self) -> int | None:
        current = self.trainers.current
        return current.pid if current is not None and current.poll() is None else None

    def end_trainer(self, number: signal.Signals) -> None:
        """Send it, and return once the trainer is gone."""
        current = self.trainers.current
        if current is not None:
            current.send_signal(number)
            current.wait(PATIENCE_S)

    def kill_daemon(self) -> DaemonRecord | None:
        record = self.daemon.record()
        if record is not None:
            _send(record.pid, signal.SIGKILL)
            wait_gone(record)
        return record

    def pause(self, most_s: float) -> None:
        time.sleep(self.random.uniform(0.0, most_s))

    def stopped(self, pid: int | None) -> AbstractContextManager[None]:
        return stopped_for(pid, self.random.uniform(0.0, _MOST_STOPPED_S))


@contextmanager
def stopped_for(pid: int | None, seconds: float) -> Iterator[None]:
    """It hears and does nothing for so long, and until the end of the context."""
    _send(pid, signal.SIGSTOP)
    try:
        time.sleep(seconds)
        yield
    finally:
        _send(pid, signal.SIGCONT)


def _send(pid: int | None, number: signal.Signals) -> None:
    if pid is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _daemon_pid(victims: Victims) -> int | None:
    record = victims.daemon.record()
    return None if record is None else record.pid


def _kill_trainer(victims: Victims) -> None:
    victims.end_trainer(signal.SIGKILL)


def _kill_daemon(victims: Victims) -> None:
    victims.kill_daemon()


def _kill_both(victims: Victims) -> None:
    _send(victims.trainer(), signal.SIGKILL)
    victims.kill_daemon()
    victims.end_trainer(signal.SIGKILL)


def _kill_verifier(victims: Victims) -> None:
    _send(victims.daemon.verifier(), signal.SIGKILL)


def _stop_trainer(victims: Victims) -> None:
    with victims.stopped(victims.trainer()):
        if victims.random.random() < 0.5:
            victims.kill_daemon()


def _stop_daemon(victims: Victims) -> None:
    with victims.stopped(_daemon_pid(victims)):
        if victims.random.random() < 0.5:
            victims.end_trainer(signal.SIGKILL)


def _stop_verifier(victims: Victims) -> None:
    with victims.stopped(victims.daemon.verifier()):
        pass


def _storm_trainer(victims: Victims) -> None:
    for _ in range(victims.random.randint(1, 5)):
        _send(victims.trainer(), signal.SIGTERM)
    victims.end_trainer(signal.SIGTERM)


def _storm_daemon(victims: Victims) -> None:
    """The first asks it to leave once its clients have, the second to leave at once."""
    record = victims.daemon.record()
    for _ in range(victims.random.randint(2, 6)):
        _send(None if record is None else record.pid, signal.SIGTERM)
        victims.pause(0.02)
    if record is not None:
        wait_gone(record)


def _starve_daemon(victims: Victims) -> None:
    if (record := victims.daemon.record()) is not None:
        victims.starved += out_of_memory.starve(record.pid, victims.random.choice(_LEFT_BYTES))
        wait_gone(record)


def _starve_trainer(victims: Victims) -> None:
    current = victims.trainers.current
    if current is not None:
        victims.starved += out_of_memory.starve(current.pid, victims.random.choice(_LEFT_BYTES))
        current.wait(PATIENCE_S)


#: By name; the first three are what the summary must have.
BLOWS: Final[dict[str, Callable[[Victims], None]]] = {
    "SIGKILL of trainer": _kill_trainer,
    "SIGKILL of daemon": _kill_daemon,
    "SIGKILL of both": _kill_both,
    "SIGKILL of verifier": _kill_verifier,
    "SIGSTOP of daemon": _stop_daemon,
    "SIGSTOP of trainer": _stop_trainer,
    "SIGSTOP of verifier": _stop_verifier,
    "SIGTERMs to daemon": _storm_daemon,
    "SIGTERMs to trainer": _storm_trainer,
}
if not out_of_memory.why_not():
    BLOWS |= {"OOM kill of daemon": _starve_daemon, "OOM kill of trainer": _starve_trainer}
