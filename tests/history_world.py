"""A history: trainers, daemons and a disk, to which random things happen, all of it logged for history_checker."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import ckptd
from ckptd.disk.rootdir import process_started
from ckptd.errors import CkptdError
from ckptd_places import daemon_of
from fake_daemon import wait_until
from history_disk import flip, listed
from obstructed_daemon import ObstructedDaemon, obstructed_daemon

RUNS: Final = ("a", "b", "c")
KEEP_LAST: Final = 3
_MOST_LOGGED: Final = 4000
_TROUBLES: Final = (
    ("write", "EIO"),
    ("write", "ENOSPC"),
    ("mkdir", "EIO"),
    ("write", "stall"),
    ("read", "EIO"),
)


@dataclass(frozen=True)
class _Trainers:
    """A process of trainers: of which runs, and when it was started (None: it had ended before anybody looked)."""

    runs: list[str]
    pid: int
    started: int | None

    def lives(self) -> bool:
        return self.started is not None and process_started(self.pid) == self.started

    def kill(self) -> None:
        if self.lives():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


class World:
    """One root with its runs.

    Args:
        folder: For the root and the logs; empty.
        seed: Decides what happens, deed by deed. When, and so to which checkpoints, the machine decides too.

    Attributes:
        done: How often each thing was done.
    """

    def __init__(self, folder: Path, seed: int) -> None:
        self.root, self._logs, self._stop = folder / "root", folder / "logs", folder / "stop"
        self._logs.mkdir()
        self._chance, self._seed, self._deeds = random.Random(), seed, 0
        self._events: list[dict[str, Any]] = []
        self.done: Counter[str] = Counter()
        self._started = 0
        self._trainers: list[_Trainers] = []
        self._daemon: ObstructedDaemon | None = None
        self._of_daemon = contextlib.ExitStack()
        self._nursery = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("history_trainers.py")), str(self._logs)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def __enter__(self) -> World:
        return self

    def __exit__(self, *_: object) -> None:
        for one in self._trainers:
            one.kill()
        if self._nursery.stdin is not None and self._nursery.stdout is not None:
            self._nursery.stdin.close()
            self._nursery.wait(60)
            self._nursery.stdout.close()
        self._of_daemon.close()
        if (record := daemon_of(self.root)) is not None:
            os.kill(record.pid, signal.SIGKILL)

    # --- what happens -------------------------------------------------------------------------------

    def live(self, deeds: int) -> None:
        """Let so many things happen."""
        self._note("policy", time.monotonic(), RUNS, keep_last=KEEP_LAST)
        self._start_daemon()
        self._start_trainers()
        wait_until(lambda: self.told("committed") > 0, timeout_s=180)
        chances = {
            self._ask_latest: 24, self._list: 12, self._kill_trainer: 4, self._kill_daemon: 4, self._end_daemon: 2,
            self._trouble: 5, self._damage: 2, self._delete: 2, self._start_daemon: 5, self._pause: 40,
        }  # fmt: skip
        for _ in range(deeds):
            self._deeds += 1
            self._chance.seed(f"{self._seed} {self._deeds}")  # whatever chance had a say in before
            self._start_trainers()
            (deed,) = self._chance.choices(list(chances), list(chances.values()))
            deed()

    def end(self) -> list[dict[str, Any]]:
        """Let the trainers leave and everything be written; the whole log, with the disk as it is then."""
        self._stop.touch()
        wait_until(lambda: not any(one.lives() for one in self._trainers), timeout_s=180)
        self._start_daemon()
        self._clear()
        for run in RUNS:
            with ckptd.Client(self.root, run=run) as client:
                client.drain(120.0, verified=True)
        self._end_daemon()
        wait_until(lambda: daemon_of(self.root) is None)
        for run in RUNS:
            self._note("final", time.monotonic(), [run], checkpoints=listed(self.root / run, whole=True))
        return self._events + [
            json.loads(line)
            for path in sorted(self._logs.glob("trainer-*"))
            for line in path.read_text().splitlines()
        ]  # fmt: skip

    def told(self, state: str) -> int:
        """How many snapshots their clients know to be in this state."""
        return sum(path.read_text().count(f'"state": "{state}"') for path in self._logs.glob("trainer-*"))

    def died(self) -> list[str]:
        """Trainers that ended by something that no trainer expects."""
        return [path.read_text() for path in sorted(self._logs.glob("died-*"))]

    def _note(self, op: str, call: float, runs: Any, **fields: Any) -> None:
        for run in runs:
            self._events.append({"op": op, "run": run, "call": call, "ret": time.monotonic(), **fields})

    def _start_trainers(self) -> None:
        """One process for the first two runs, by threads, and one for the third."""
        self._trainers = [one for one in self._trainers if one.lives()]
        busy = [run for one in self._trainers for run in one.runs]
        for runs in (["a", "b"], ["c"]):
            if runs[0] not in busy and self._nursery.stdin is not None and self._nursery.stdout is not None:
                self._started += 1
                asked = {
                    "root": str(self.root), "runs": runs, "first": self._started * 10**8, "stop": str(self._stop),
                    "seed": f"{self._seed} {self._started}",
                }  # fmt: skip
                self._nursery.stdin.write(json.dumps(asked) + "\n")
                self._nursery.stdin.flush()
                pid = int(self._nursery.stdout.readline())
                self._trainers.append(_Trainers(runs, pid, process_started(pid)))
                self.done["trainers started"] += 1

    def _kill_trainer(self) -> None:
        for one in self._chance.sample(self._trainers, min(1, len(self._trainers))):
            one.kill()
            wait_until(lambda one=one: not one.lives())  # type: ignore[misc]
            self.done["trainers killed"] += 1

    def _kill_daemon(self) -> None:
        self._end_daemon(signal.SIGKILL)

    def _end_daemon(self, number: int = signal.SIGTERM) -> None:
        """The next is started by a trainer that finds none, or by hand."""
        if (record := daemon_of(self.root)) is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(record.pid, number)
        self.done["daemons killed" if number == signal.SIGKILL else "daemons ended"] += 1
        if number == signal.SIGKILL:
            self._clear()
            wait_until(lambda: not record.alive())

    def _start_daemon(self) -> None:
        if daemon_of(self.root) is not None:
            return
        self._of_daemon.close()
        with contextlib.suppress(AssertionError):  # a trainer was quicker, and this one left
            flags = ("--keep-last", str(KEEP_LAST), "--grace-s", "0.3")
            self._daemon = self._of_daemon.enter_context(obstructed_daemon(self.root, *flags))
            self.done["daemons started"] += 1

    def _trouble(self) -> None:
        """The disk fails, for the daemon, for a while."""
        if self._daemon is None or self._daemon.process.poll() is not None:
            return
        call = time.monotonic()
        what, how = self._chance.choice(_TROUBLES)
        path = {"write": "*/.tmp-*", "mkdir": "*/.tmp-*", "read": "*/step-*/index.json"}[what]
        self._daemon.obstruct(what, path, how)
        time.sleep(self._chance.uniform(0.05, 0.3))
        self._daemon.clear()
        self._note("trouble", call, RUNS)
        self.done[f"{what} {how}"] += 1

    def _clear(self) -> None:
        if self._daemon is not None:
            self._daemon.clear()

    def _hit(self, what: str) -> None:
        """Only where others are left: a run without any valid one is over."""
        run = self._chance.choice(RUNS)
        found = listed(self.root / run)
        if len(found) < KEEP_LAST:
            return
        victim = self._chance.choice([*found, max(found, key=lambda each: each["sequence"])])
        call = time.monotonic()
        path = self.root / run / victim["name"]
        done = False
        with contextlib.suppress(OSError):  # retention was quicker
            if what == "delete":
                shutil.rmtree(path)
            else:
                flip(self._chance.choice([*sorted(path.glob("*.pt")), path / "index.json"]), self._chance)
            done = True
            self.done[what] += 1
        self._note("hit", call, [run], identity=victim["identity"], what=what, done=done)
        self._ask_latest(run)  # before the verifier knows

    def _damage(self) -> None:
        self._hit("damage")

    def _delete(self) -> None:
        self._hit("delete")

    def _pause(self) -> None:
        """Until the trainers have got on: on a busy machine as far as on an idle one."""
        wanted, ends = self._logged() + self._chance.randrange(_MOST_LOGGED), time.monotonic() + 20
        while (
            self._logged() < wanted and time.monotonic() < ends and any(one.lives() for one in self._trainers)
        ):
            time.sleep(0.005)

    def _logged(self) -> int:
        """How much the trainers have logged, in bytes."""
        return sum(path.stat().st_size for path in self._logs.glob("trainer-*"))

    # --- what is seen -------------------------------------------------------------------------------

    def _ask_latest(self, run: str = "") -> None:
        run = run or self._chance.choice(RUNS)
        call, error, found = time.monotonic(), "", None
        try:
            found = ckptd.latest_valid(self.root, run)
        except CkptdError as caught:
            error = f"{type(caught).__name__}: {caught}"
        self._note(
            "latest", call, [run], error=error, sequence=None if found is None else found.sequence,
            answer=None if found is None else int(found.metrics["identity"]),
        )  # fmt: skip
        self.done["asked"] += 1

    def _list(self) -> None:
        run = self._chance.choice(RUNS)
        call = time.monotonic()
        self._note("listing", call, [run], checkpoints=listed(self.root / run))
