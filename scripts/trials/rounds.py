"""scripts/torture-kill: the rounds of killing, and the summary. checks.py says what must hold afterwards."""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import checks
import evidence
from victims import PATIENCE_S, Daemon, Fault, Trainers, wait_gone

from ckptd.disk.series import latest_valid
from ckptd.snapshot.slot_header import SlotState

RUN = "torture"
KEEP_LAST = 1_000_000  # retention must not be the reason that something is missing
AIM_S = 3.0
TARGETS = ("trainer", "daemon", "both")


class Torture:
    """One root, its trainers and daemons, and what was done to them.

    Attributes:
        kills: How often each target was killed.
        hits: What kills interrupted: "write" (a temp folder was left), "copy" (a slot was half filled),
            "pending" (sealed snapshots were waiting).
    """

    def __init__(self, work: Path, seed: int, aim: float) -> None:
        self.work, self.root, self.stop_file = work, work / "root", work / "stop"
        self.shm, self.runtime = Path(os.environ["CKPTD_SHM_DIR"]), Path(os.environ["CKPTD_RUNTIME_DIR"])
        self.journals = evidence.Journals(work / "journals")
        self.journals.folder.mkdir()
        self.random, self._aimed = random.Random(seed), aim
        self.kills: Counter[str] = Counter()
        self.hits: Counter[str] = Counter()
        self.faults: list[str] = []
        self.daemon = Daemon(self.root, KEEP_LAST)
        self.trainers = Trainers(work, self.root, RUN, self.stop_file)

    @property
    def run_dir(self) -> Path:
        return self.root / RUN

    def begin(self) -> None:
        """The first daemon is started by hand: it writes the policy that keeps everything."""
        self.daemon.start()

    def round(self, number: int) -> None:
        """Let it run until snapshots flow, kill, look at what lies there, check what always holds."""
        if self.daemon.record() is None and self.random.random() < 0.5:
            self.daemon.start()  # else the trainer finds none and starts one
        self.trainers.ensure()
        before = len(self.journals.read().sealed)
        wait_for(lambda: len(self.journals.read().sealed) > before, "a snapshot", self._alive)
        wait_for(lambda: self.daemon.record() is not None, "a daemon", self._alive)
        target = TARGETS[number % 3]
        self._aim(target)
        self._kill(target)
        self._check_now()

    def _alive(self) -> None:
        self.trainers.ensure_unharmed()

    def _aim(self, target: str) -> None:
        """Any moment, or (a share of the time) the next one at which a write or a copy can be seen."""
        if self.random.random() >= self._aimed:
            time.sleep(self.random.uniform(0.0, 0.4))
            return
        deadline = time.monotonic() + AIM_S
        if target == "trainer" or (target == "both" and self.random.random() < 0.5):
            with evidence.open_slots(self.shm) as slots:
                while not evidence.states_of(slots)[SlotState.FILLING] and time.monotonic() < deadline:
                    pass
            return
        while not evidence.being_written(self.run_dir) and time.monotonic() < deadline:
            pass
        time.sleep(self.random.choice((0.0, 0.001, 0.003)))

    def _kill(self, target: str) -> None:
        trainer, record = self.trainers.current, self.daemon.record()
        if trainer is not None and target in ("trainer", "both"):
            trainer.kill()
        if record is not None and target in ("daemon", "both"):
            os.kill(record.pid, signal.SIGKILL)
        if trainer is not None and target in ("trainer", "both"):
            trainer.wait(PATIENCE_S)
        if record is not None and target in ("daemon", "both"):
            wait_gone(record)
            # A trainer that still lives may start the next daemon at once, which cleans up: look quickly.
            self.hits["write"] += evidence.being_written(self.run_dir)
        with evidence.open_slots(self.shm) as slots:
            states = evidence.states_of(slots)
        # only when both died: a daemon that lives frees the slot of a dead trainer at once
        self.hits["copy"] += states[SlotState.FILLING] > 0 and target == "both"
        self.hits["pending"] += states[SlotState.SEALED] + states[SlotState.WRITING] > 0
        self.kills[target] += 1

    def _check_now(self) -> None:
        """From the first acknowledgement on, a valid checkpoint at least as new is there at every instant."""
        acked = self.journals.read().acked
        if not acked:
            return
        found = latest_valid(self.root, RUN)
        if found is None or found.sequence < max(acked.values()):
            self.faults.append(
                f"latest is {found and found.sequence} after {max(acked.values())} was acknowledged"
            )

    def finish(self) -> None:
        """The next start, the last trainer, a clean exit; then everything is looked at."""
        if self.daemon.record() is None:
            self.daemon.start()
        self.trainers.ensure()
        before = len(self.journals.read().acked)
        wait_for(lambda: len(self.journals.read().acked) > before, "an acknowledgement", self._alive)
        self.stop_file.touch()
        self.trainers.finish()
        self.trainers.end()
        for command in (("drain", "--verified"), ("stop",)):
            done = self.daemon.command(*command, "--root", str(self.root))
            if done.returncode != 0:
                self.faults.append(f"ckptd {command[0]} left with {done.returncode}: {done.stderr.strip()}")

    def check(self) -> dict[str, int]:
        """All checks; faults are collected, counts returned."""
        journals = self.journals.read()
        found = checks.read_checkpoints(self.run_dir)
        self.faults += found.faults
        self.faults += checks.acknowledged_are_there(found, journals)
        self.faults += checks.sealed_are_written_once(found, journals)
        self.faults += checks.nothing_else_is_there(found, journals)
        self.faults += checks.sequences_are_in_order(found)
        self.faults += [f"shared memory left: {path}" for path in evidence.left_over(self.shm)]
        self.faults += [f"socket left: {path}" for path in evidence.left_over(self.runtime)]
        self.faults += [f"temp folder left: {name}" for name in evidence.temp_folders(self.run_dir)]
        if any((self.run_dir / "quarantine").glob("*")):
            self.faults.append("something was quarantined")
        return {
            "begun": journals.begun, "sealed": len(journals.sealed), "acknowledged": len(journals.acked),
            "on disk": sum(map(len, found.by_key.values())), "trainers": len(journals.resumed),
            "killed in snapshot()": journals.begun - len(journals.sealed),
            "resumed above 0": sum(step is not None and step > 0 for step in journals.resumed),
        }  # fmt: skip


def wait_for(reached: Callable[[], bool], what: str, alive: Callable[[], None]) -> None:
    """Until reached() or a fault."""
    deadline = time.monotonic() + PATIENCE_S
    while not reached():
        alive()
        if time.monotonic() > deadline:
            raise Fault(f"no {what} within {PATIENCE_S:g} s")
        time.sleep(0.01)


def proved_nothing(torture: Torture, counts: dict[str, int]) -> list[str]:
    """Why this torture proves nothing, if it doesn't."""
    doubts = [f"no kill of {target}" for target in TARGETS if not torture.kills[target]]
    doubts += [] if torture.hits["write"] else ["no kill during a write"]
    doubts += [] if torture.hits["pending"] else ["no kill while sealed snapshots were waiting"]
    doubts += [] if counts["killed in snapshot()"] else ["no kill of a trainer inside snapshot()"]
    doubts += [
        f"{name}: 0" for name in ("sealed", "acknowledged", "on disk", "resumed above 0") if not counts[name]
    ]
    return doubts


def torture_once(work: Path, rounds: int, seed: int, aim: float) -> int:
    torture = Torture(work, seed, aim)
    counts: dict[str, int] = {}
    started = time.monotonic()
    try:
        torture.begin()
        for number in range(rounds):
            torture.round(number)
            sys.stderr.write(
                f"\rround {number + 1}/{rounds}  kills {dict(torture.kills)}  hits {dict(torture.hits)} "
            )
        sys.stderr.write("\n")
        torture.finish()
        counts = torture.check()
    except Fault as fault:
        torture.faults.append(str(fault))
    finally:
        torture.trainers.end()
        torture.daemon.end()
    doubts = proved_nothing(torture, counts) if not torture.faults else []
    summary = {
        "rounds": rounds, "seed": seed, "seconds": round(time.monotonic() - started, 1),
        "kills": dict(torture.kills), "interrupted": dict(torture.hits), **counts,
        "faults": torture.faults, "proved nothing because": doubts,
    }  # fmt: skip
    print(json.dumps(summary, indent=2))
    return 1 if torture.faults or doubts else 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/torture-kill", description=__doc__)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--seed", type=int, default=None, help="of the random moments (default: a fresh one)")
    parser.add_argument("--aim", type=float, default=0.5, help="share of kills aimed at a write or a copy")
    parser.add_argument("--keep", action="store_true", help="leave the folder with root, journals and logs")
    arguments = parser.parse_args()
    seed = random.SystemRandom().randrange(2**31) if arguments.seed is None else arguments.seed
    work = Path(tempfile.mkdtemp(prefix="ckptd-torture-"))
    shm = Path(tempfile.mkdtemp(prefix="ckptd-torture-", dir="/dev/shm"))
    os.environ |= {"CKPTD_SHM_DIR": str(shm), "CKPTD_RUNTIME_DIR": str(work / "runtime")}
    try:
        code = torture_once(work, arguments.rounds, seed, arguments.aim)
    finally:
        shutil.rmtree(shm, ignore_errors=True)
    if code and not arguments.keep:
        print(f"what it left is in {work}", file=sys.stderr)
    elif not arguments.keep:
        shutil.rmtree(work)
    return code


if __name__ == "__main__":
    sys.exit(main())
