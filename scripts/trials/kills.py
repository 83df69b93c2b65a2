"""SIGKILL, SIGSTOP, SIGTERM and OOM kills of trainer, daemon and verifier. checks.py says what must hold then."""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import checks
import evidence
import out_of_memory
from blows import BLOWS, Victims
from part import Deadline, Findings, Part, say
from victims import PATIENCE_S, Broken, Daemon, Trainers

from ckptd.disk.series import latest_valid
from ckptd.snapshot.slot_header import SlotState

RUN = "torture"
KEEP_LAST = 1_000_000  # retention must not be the reason that something is missing
AIM_S = 3.0
LEFT_TO_CHANCE = 50  # so many kills have hit a write, a copy and what waits, too
_ENDS_DAEMON = ("SIGKILL of daemon", "SIGKILL of both", "OOM kill of daemon")
#: How trainers' clients are set, besides the defaults.
SETTINGS: Final[tuple[dict[str, Any], ...]] = (
    {}, {"slots": 1}, {"overlap": True}, {"transport": "stream"}, {"daemon": "attach"},
    {"on_busy": "skip"}, {"on_busy": "supersede"}, {"on_busy": "skip", "slots": 1},
    {"on_busy": "supersede", "overlap": True}, {"on_busy": "supersede", "transport": "stream"},
    {"on_busy": "skip", "transport": "stream"}, {"overlap": True, "transport": "stream"},
)  # fmt: skip


class Torture:
    """One root, its trainers and daemons, and what was done to them.

    Attributes:
        blows: How often each was dealt.
        struck: How many were, but for those who died by themselves.
        hits: What kills interrupted: "write" (a temp folder was left), "copy" (a slot was half filled),
            "pending" (sealed snapshots were waiting).
    """

    def __init__(self, work: Path, seed: int, aim: float) -> None:
        self.work, self.root, self.stop_file = work, work / "root", work / "stop"
        self.shm, self.runtime = Path(os.environ["CKPTD_SHM_DIR"]), Path(os.environ["CKPTD_RUNTIME_DIR"])
        self.journals = evidence.Journals(work / "journals")
        self.journals.folder.mkdir()
        self.random, self._aimed = random.Random(seed), aim
        self.blows: Counter[str] = Counter()
        self.hits: Counter[str] = Counter()
        self._attaches = False
        self._counted: set[int] = set()
        self._died = self._doomed_trainer = False
        self.struck = 0
        self.faults: list[str] = []
        self.daemon = Daemon(self.root, KEEP_LAST)
        self.trainers = Trainers(work, self.root, RUN, self.stop_file)
        self._victims = Victims(self.trainers, self.daemon, self.random)

    @property
    def run_dir(self) -> Path:
        return self.root / RUN

    @property
    def starved(self) -> int:
        return self._victims.starved

    def begin(self) -> None:
        """The first daemon is started by hand: it writes the policy that keeps everything."""
        self.daemon.start()

    def round(self) -> None:
        """Let it run until snapshots flow, kill, look at what lies there, check what always holds."""
        self._have_both()
        before = len(self.journals.read().taken)
        wait_for(
            lambda: self._has_died() or len(self.journals.read().taken) > before, "a snapshot", self._alive
        )
        if not self._died:
            wait_for(lambda: self.daemon.record() is not None, "a daemon", self._alive)
            names = list(BLOWS)
            blow = names[self.struck] if self.struck < len(names) else self.random.choice(names)
            self._aim(blow)
            self._strike(blow)
            self.struck += 1
        self._check_now()

    def _have_both(self) -> None:
        """A trainer, and a daemon: started by hand, or by the trainer that finds none and may."""
        settings, attaches = self.random.choice(SETTINGS), self._attaches
        new_trainer = self._victims.trainer() is None
        if new_trainer and (self.daemon.doomed is None or self.daemon.doomed.poll() is not None):
            self._attaches = attaches = "daemon" in settings
        elif new_trainer:  # one that dies by itself serves: who insists on a daemon may find none
            settings, self._attaches, attaches = {}, False, False
        serving = self.daemon.record() is not None
        if not serving and not attaches and self.random.random() < 0.4:
            serving = self.daemon.start_doomed(self.random.randint(1, 400), half=self.random.random() < 0.3)
        if not serving and (attaches or self.random.random() < 0.5):
            self.daemon.start()
        if new_trainer and self.random.random() < 0.2 and settings.get("transport") != "stream":
            settings = settings | {"dies_at": self.random.randint(1, 20)}
        self._doomed_trainer = "dies_at" in settings if new_trainer else self._doomed_trainer
        self.trainers.ensure(settings)

    def _has_died(self) -> bool:
        """Whether one has killed itself since at the call that it was told."""
        self._died = False
        for whom, process in (("trainer", self.trainers.current), ("daemon", self.daemon.doomed)):
            if process is not None and process.poll() == -signal.SIGKILL and process.pid not in self._counted:
                self._counted.add(process.pid)
                self._died = self._died or whom == "daemon" or self._doomed_trainer
                self.blows[f"SIGKILL of {whom} at a call"] += self._died
        return self._died

    def _alive(self) -> None:
        self.trainers.ensure_unharmed()

    def _aim(self, blow: str) -> None:
        """Any moment, or (a share of the time) the next one at which a write or a copy can be seen."""
        if self.random.random() >= self._aimed:
            time.sleep(self.random.uniform(0.0, 0.4))
            return
        deadline = time.monotonic() + AIM_S
        if blow == "SIGKILL of trainer" or (blow == "SIGKILL of both" and self.random.random() < 0.5):
            with evidence.open_slots(self.shm) as slots:
                while not evidence.states_of(slots)[SlotState.FILLING] and time.monotonic() < deadline:
                    pass
            return
        while not evidence.being_written(self.run_dir) and time.monotonic() < deadline:
            pass
        time.sleep(self.random.choice((0.0, 0.001, 0.003)))

    def _strike(self, blow: str) -> None:
        BLOWS[blow](self._victims)
        # A trainer that still lives may start the next daemon at once, which cleans up: look quickly.
        self.hits["write"] += blow in _ENDS_DAEMON and evidence.being_written(self.run_dir)
        with evidence.open_slots(self.shm) as slots:
            states = evidence.states_of(slots)
        # only when both died: a daemon that lives frees the slot of a dead trainer at once
        self.hits["copy"] += states[SlotState.FILLING] > 0 and blow == "SIGKILL of both"
        self.hits["pending"] += states[SlotState.SEALED] + states[SlotState.WRITING] > 0
        self.blows[blow] += 1

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
        if self._doomed_trainer:
            self._victims.end_trainer(signal.SIGKILL)
        if self.daemon.doomed is not None and self.daemon.doomed.poll() is None:
            self._victims.kill_daemon()
        if self.daemon.record() is None:
            self.daemon.start()
        self.trainers.ensure({})
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
        self.faults += checks.what_gave_way_is_not_there(found, journals)
        self.faults += checks.contents_are_as_taken(found, journals)
        self.faults += checks.nothing_else_is_there(found, journals)
        self.faults += checks.sequences_are_in_order(found)
        self.faults += [f"shared memory left: {path}" for path in evidence.left_over(self.shm)]
        self.faults += [f"socket left: {path}" for path in evidence.left_over(self.runtime)]
        self.faults += [f"temp folder left: {name}" for name in evidence.temp_folders(self.run_dir)]
        if any((self.run_dir / "quarantine").glob("*")):
            self.faults.append("something was quarantined")
        return {
            "begun": journals.begun.total(), "taken": len(journals.taken), "sealed": len(journals.sealed),
            "acknowledged": len(journals.acked), "gave way": len(journals.gone),
            "on disk": sum(map(len, found.by_key.values())), "trainers": len(journals.resumed),
            "killed in snapshot()": journals.begun.total() - len(journals.taken),
            "resumed above 0": sum(step is not None and step > 0 for step in journals.resumed),
        }  # fmt: skip


def wait_for(reached: Callable[[], bool], what: str, alive: Callable[[], None]) -> None:
    """Until reached() or a fault."""
    deadline = time.monotonic() + PATIENCE_S
    while not reached():
        alive()
        if time.monotonic() > deadline:
            raise Broken(f"no {what} within {PATIENCE_S:g} s")
        time.sleep(0.01)


def doubts_about(torture: Torture, counts: dict[str, int]) -> list[str]:
    """Why this torture proves nothing, if it doesn't."""
    doubts = [f"no {blow}" for blow in list(BLOWS)[:3] if not torture.blows[blow]]
    doubts += [
        f"{name}: 0" for name in ("sealed", "acknowledged", "on disk", "resumed above 0") if not counts[name]
    ]
    if torture.blows.total() < LEFT_TO_CHANCE:
        return doubts
    doubts += [] if torture.hits["write"] else ["no kill during a write"]
    doubts += [] if torture.hits["pending"] else ["no kill while sealed snapshots were waiting"]
    doubts += [] if counts["killed in snapshot()"] else ["no kill of a trainer inside snapshot()"]
    return doubts


def torture_until(
    over: Callable[[int], bool], work: Path, seed: int, findings: Findings, aim: float = 0.5
) -> None:
    """Rounds until over(how many blows were dealt); then everything is looked at."""
    torture, counts = Torture(work, seed, aim), dict[str, int]()
    if why_not := out_of_memory.why_not():
        findings.not_tried["an OOM kill by a memory cgroup"] = why_not
    try:
        torture.begin()
        while not over(torture.struck):
            torture.round()
            if torture.struck % 10 == 0:
                say(f"kills: {torture.struck} blows, interrupted {dict(torture.hits)}")
        torture.finish()
        counts = torture.check()
    except Broken as broken:
        torture.faults.append(str(broken))
    finally:
        torture.trainers.end()
        torture.daemon.end()
        for what in torture.faults:
            findings.fault(what)
        findings.tried.update(torture.blows)
        findings.numbers = {
            "interrupted": dict(torture.hits),
            "killed by the kernel": torture.starved,
            **counts,
        }
    findings.doubts = [] if findings.faults else doubts_about(torture, counts)


def run(minutes: float, seed: int, folder: Path, findings: Findings) -> None:
    deadline = Deadline(minutes)
    torture_until(lambda made: made >= 3 and deadline.over(), folder, seed, findings)


PART = Part("kills", "trainer, daemon, verifier killed, stopped and told to leave at random moments", run)
