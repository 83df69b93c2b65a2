"""The processes that are killed: trainers (a spare one has torch loaded already), and the daemon."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ckptd.disk.rootdir import DaemonRecord, Root

PATIENCE_S = 120.0  # for whatever must happen at all, on a busy machine


class Broken(Exception):
    """Something that must never happen has happened."""


class Trainers:
    """The one that trains now, and its successor waiting for its turn."""

    def __init__(self, work: Path, root: Path, run: str, stop_file: Path) -> None:
        self._work, self._arguments, self._stop_file = work, [str(root), run], str(stop_file)
        self._started: list[subprocess.Popen[bytes]] = []
        self._spare = self._spawn()
        self.current: subprocess.Popen[bytes] | None = None

    def _spawn(self) -> subprocess.Popen[bytes]:
        journal = self._work / "journals" / f"journal-{len(self._started):04d}"
        program = str(Path(__file__).with_name("trainer.py"))
        with (self._work / "trainers.log").open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, program, *self._arguments, str(journal), self._stop_file],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
            )  # fmt: skip
        self._started.append(process)
        return process

    def ensure(self, settings: Mapping[str, Any]) -> bool:
        """Have one that trains; a new one has a client of these settings. Whether it is new."""
        self.ensure_unharmed()
        if self.current is not None and self.current.poll() is None:
            return False
        self.current, self._spare = self._spare, self._spawn()
        if self.current.stdout is None or self.current.stdin is None:
            raise Broken("no pipes")
        if (
            not select.select([self.current.stdout], [], [], PATIENCE_S)[0]
            or not self.current.stdout.readline()
        ):
            raise Broken(f"a trainer didn't get ready: {_tail(self._work / 'trainers.log')}")
        self.current.stdin.write(json.dumps(settings).encode() + b"\n")
        self.current.stdin.flush()
        return True

    def ensure_unharmed(self) -> None:
        """A trainer that ended by itself is a fault: nothing that happens to a daemon may end it."""
        if self.current is not None and self.current.poll() not in (None, -signal.SIGKILL, -signal.SIGTERM):
            raise Broken(
                f"a trainer ended by itself: {self.current.returncode}; {_tail(self._work / 'trainers.log')}"
            )

    def finish(self) -> None:
        """Let the current one drain and leave by itself; it must leave well."""
        if self.current is None:
            return
        code = self.current.wait(PATIENCE_S)
        if code != 0:
            raise Broken(f"the last trainer left with {code}; {_tail(self._work / 'trainers.log')}")

    def end(self) -> None:
        """Leave no process behind, whatever happened."""
        for process in self._started:
            if process.poll() is None:
                process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()


class Daemon:
    """Whichever daemon serves the root now: started here by hand, or by a trainer that found none."""

    def __init__(self, root: Path, keep_last: int) -> None:
        self._root, self._keep_last = root, keep_last
        self.by_hand = 0
        self.doomed: subprocess.Popen[bytes] | None = None

    def record(self) -> DaemonRecord | None:
        """The one that lives; None when none does."""
        record = DaemonRecord.read(Root.for_reading(self._root)) if self._root.is_dir() else None
        return record if record is not None and record.alive() else None

    def verifier(self) -> int | None:
        """Its verifier's pid; None when it has none now."""
        record = self.record()
        if record is None:
            return None
        try:
            children = Path(f"/proc/{record.pid}/task/{record.pid}/children").read_text().split()
        except OSError:
            return None
        return int(children[0]) if children else None

    def start(self) -> None:
        """`ckptd start --detach`; that a trainer was quicker is no fault."""
        flags = ["--detach", "--root", str(self._root), "--keep-last", str(self._keep_last)]
        done = self.command("start", *flags)
        if done.returncode not in (0, 6):
            raise Broken(f"ckptd start left with {done.returncode}: {done.stderr.strip()}")
        self.by_hand += done.returncode == 0

    def start_doomed(self, number: int, *, half: bool) -> bool:
        """One that kills itself at that call; whether it came up before."""
        if self.doomed is not None:
            self.doomed.wait(PATIENCE_S)
        program = str(Path(__file__).with_name("doomed_daemon.py"))
        how = "half" if half else "whole"
        self.doomed = subprocess.Popen(
            [sys.executable, program, str(number), how, str(self._root), str(self._keep_last)],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        deadline = time.monotonic() + PATIENCE_S
        while self.doomed.poll() is None:
            record = self.record()
            if record is not None and record.pid == self.doomed.pid:
                return True
            if time.monotonic() > deadline:
                raise Broken("a daemon didn't come up")
            time.sleep(0.005)
        return False

    def command(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run one `ckptd` command to its end."""
        command = [sys.executable, "-m", "ckptd_daemon.cli.main", *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)

    def end(self) -> None:
        """Leave no daemon behind, whatever happened."""
        record = self.record()
        if record is not None:
            os.kill(record.pid, signal.SIGKILL)
            wait_gone(record)
        if self.doomed is not None:
            self.doomed.kill()
            self.doomed.wait()


def wait_gone(record: DaemonRecord) -> None:
    """Until a killed daemon is dead: a kill returns before the kernel has done it."""
    deadline = time.monotonic() + PATIENCE_S
    while record.alive():
        if time.monotonic() > deadline:
            raise Broken(f"pid {record.pid} survived SIGKILL")
        time.sleep(0.002)


def _tail(path: Path) -> str:
    lines = path.read_text("utf-8", "replace").strip().splitlines() if path.exists() else []
    return " | ".join(lines[-5:])
