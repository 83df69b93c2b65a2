"""Save, restore elsewhere, compare, with faults in between; then descriptors, memory and threads must stay as they are.

A quarter of the time is for faults: the daemon and its verifier are killed, everybody is stopped for a while. In the
other three quarters the same goes on without kills and, once all are warm, samples are taken.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from blows import stopped_for
from flat import Trend, trend
from part import Deadline, Findings, Part, say
from victims import PATIENCE_S, Broken, Daemon, wait_gone

_KEEP_LAST: Final = 3
_SAMPLE_EVERY_S: Final = 0.5
_WARM_SAVES: Final = 300
_WARM_RESTORES: Final = 50
_MIB: Final = 1024 * 1024
#: Quantity → by how much it may be higher at the end: in its own unit, and as a share of what it was.
_ALLOWED: Final = {
    "descriptors": (1.0, 0.0), "threads": (0.0, 0.0), "memory": (3.0 * _MIB, 0.02), "mapped": (0.0, 1.0),
    "files": (4.0, 0.0), "bytes": (0.0, 0.05),
}  # fmt: skip


@dataclass
class Soak:
    """One root, a trainer, a process that restores, and what was seen of them."""

    folder: Path
    seed: int
    findings: Findings
    samples: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def __post_init__(self) -> None:
        self.root, self._stop = self.folder / "root", self.folder / "stop"
        self._random = random.Random(self.seed)
        self._warm_at = (0, 0)
        self.daemon = Daemon(self.root, _KEEP_LAST)
        self.workers: dict[str, subprocess.Popen[bytes]] = {}

    @contextmanager
    def running(self) -> Iterator[None]:
        self.daemon.start()
        try:
            for number, what in enumerate(("trains", "restores")):
                self.workers[what] = self._worker(what, number)
            yield
            self._stop.touch()
            for what, process in self.workers.items():
                if (code := process.wait(PATIENCE_S)) != 0:
                    self.findings.fault(f"the process that {what} left with {code}: {self._last_words()}")
        finally:
            for process in self.workers.values():
                process.kill()
                process.wait()

    def _worker(self, what: str, number: int) -> subprocess.Popen[bytes]:
        program = str(Path(__file__).with_name("soak_worker.py"))
        journal = self.folder / f"journal-{number}"
        arguments = [what, str(self.root), str(journal), str(self._stop), str(self.seed + number)]
        with (self.folder / "workers.log").open("ab") as log:
            return subprocess.Popen([sys.executable, program, *arguments], stderr=log)

    def _last_words(self) -> str:
        return " | ".join((self.folder / "workers.log").read_text("utf-8", "replace").splitlines()[-5:])

    def check_alive(self) -> None:
        for what, process in self.workers.items():
            if process.poll() is not None:
                raise Broken(f"the process that {what} ended with {process.returncode}: {self._last_words()}")

    def hurt(self) -> None:
        """One of the faults, then a pause for it to be got over."""
        record, verifier = self.daemon.record(), self.daemon.verifier()
        whom = self._random.choice(("daemon", "verifier", "stop daemon", "stop verifier", "stop trainer"))
        if whom == "daemon" and record is not None:
            with suppress(ProcessLookupError):
                os.kill(record.pid, signal.SIGKILL)
            wait_gone(record)
        elif whom == "verifier" and verifier is not None:
            with suppress(ProcessLookupError):
                os.kill(verifier, signal.SIGKILL)
        else:
            pids = {"stop daemon": record and record.pid, "stop verifier": verifier}
            with stopped_for(pids.get(whom, self.workers["trains"].pid), self._random.uniform(0.1, 1.0)):
                pass
        self.findings.tried[f"fault: {whom}"] += 1
        time.sleep(self._random.uniform(0.5, 2.0))

    def warm_up(self) -> None:
        """From now on so much is to be done before samples are taken."""
        saved, restored = (len(_events(self.folder / f"journal-{number}")) for number in range(2))
        self._warm_at = (saved + _WARM_SAVES, restored + _WARM_RESTORES)

    def is_warm(self) -> bool:
        """Whether both have done so much that what is made once is made: threads, pools, code read lazily."""
        done = [len(_events(self.folder / f"journal-{number}")) for number in range(2)]
        return done[0] >= self._warm_at[0] and done[1] >= self._warm_at[1]

    def sample(self) -> None:
        """Of processes and of shared memory."""
        record = self.daemon.record()
        pids = {what: process.pid for what, process in self.workers.items()}
        pids |= {"daemon": record.pid if record is not None else None, "verifier": self.daemon.verifier()}
        for who, pid in pids.items():
            if pid is not None:
                with suppress(OSError, KeyError):  # it has just ended
                    for what, value in _of_process(pid).items():
                        self.samples[f"{what} of {who}"].append(value)
        slots = [path for path in Path(os.environ["CKPTD_SHM_DIR"]).rglob("*") if path.is_file()]
        with suppress(FileNotFoundError):
            self.samples["bytes of shared memory"].append(sum(path.stat().st_size for path in slots))
        runtime = Path(os.environ["CKPTD_RUNTIME_DIR"])
        self.samples["files of sockets"].append(len(list(runtime.iterdir())))
        self.samples["files of root"].append(sum(len(files) for _, _, files in os.walk(self.root)))

    def compare(self) -> None:
        """What was restored against what was saved."""
        saved, restored = _events(self.folder / "journal-0"), _events(self.folder / "journal-1")
        taken = {(event["step"], event["digest"]) for event in saved}
        for event in restored:
            if event["event"] == "restored":
                self.findings.tried["restored elsewhere and compared"] += 1
                if (event["step"], event["digest"]) not in taken:
                    self.findings.fault(f"step {event['step']} was restored with other bytes than were saved")
            else:
                self.findings.tried["restores that found it removed meanwhile"] += 1
                if not event["error"].startswith(_MAY_BE_MISSED):
                    self.findings.fault(f"a restore failed: {event['error']}")
        self.findings.tried["saved"] = len(saved)

    def judge(self) -> None:
        """Whether everything stayed as it was."""
        trends = {what: _trend(what, values) for what, values in self.samples.items()}
        for what, found in trends.items():
            if found is not None and found.grows:
                self.findings.fault(f"{what} grows: {found}")
            self.findings.numbers[what] = str(found) if found is not None else "too few samples"
        if not any(trends.values()):
            self.findings.doubts.append(
                "too few samples to tell whether anything grows: give it more minutes"
            )

    def leave(self) -> None:
        for command in (("drain", "--verified"), ("stop",)):
            done = self.daemon.command(*command, "--root", str(self.root))
            if done.returncode != 0:
                self.findings.fault(f"ckptd {command[0]} left with {done.returncode}: {done.stderr.strip()}")


#: Retention may be quicker than a restore: a checkpoint that is gone, not one that is wrong.
_MAY_BE_MISSED: Final = "NothingThere"


def _of_process(pid: int) -> dict[str, float]:
    """Memory is what is its own: shared pages of libraries come and go with others. Slots and streams are mapped."""
    proc = Path(f"/proc/{pid}")
    fields = dict(line.split(":", 1) for line in (proc / "status").read_text().splitlines() if ":" in line)
    kib = {name: int(fields[name].split()[0]) for name in ("RssAnon", "RssShmem")}
    threads, descriptors = len(os.listdir(proc / "task")), len(os.listdir(proc / "fd"))
    return {
        "descriptors": descriptors, "threads": threads, "memory": kib["RssAnon"] * 1024.0,
        "mapped": kib["RssShmem"] * 1024.0,
    }  # fmt: skip


def _trend(what: str, values: list[float]) -> Trend | None:
    absolute, share = _ALLOWED[what.split()[0]]
    return trend(values, allowed=absolute + share * max(values[: len(values) // 3], default=0.0))


def _events(path: Path) -> list[dict[str, Any]]:
    data = path.read_bytes() if path.exists() else b""
    return [json.loads(line) for line in data[: data.rfind(b"\n") + 1].splitlines()]


def run(minutes: float, seed: int, folder: Path, findings: Findings) -> None:
    soak = Soak(folder, seed, findings)
    faults, all_of_it = Deadline(minutes / 4), Deadline(minutes)
    try:
        with soak.running():
            while not faults.over() and minutes > 0.2:
                soak.hurt()
                soak.check_alive()
            say(f"soak: {dict(soak.findings.tried)}; from now on nothing is killed")
            soak.warm_up()
            while not all_of_it.over() and not soak.is_warm():
                soak.check_alive()
                time.sleep(_SAMPLE_EVERY_S)
            while not all_of_it.over():
                soak.sample()
                soak.check_alive()
                time.sleep(_SAMPLE_EVERY_S)
        soak.leave()
    except Broken as broken:
        soak.findings.fault(str(broken))
    finally:
        soak.daemon.end()
    soak.compare()
    soak.judge()


PART = Part(
    "soak", "saved, restored elsewhere and compared; memory, descriptors and threads stay as they are", run
)
