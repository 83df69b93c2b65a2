"""scripts/torture: try every promise for as long as it is given, and report what was tried, found and not tried."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

import parts
from part import say

HERE = Path(__file__).resolve().parent

DEFAULT_MINUTES: Final = 20.0
OVERTIME_S: Final = 900.0  # a part that takes that much longer than it was given hangs
LAST_WORDS_S: Final = 60.0  # for a part that is told to end: it reports what it tried until then


class Trials:
    """The parts one after the other, each for its share of the time that is left."""

    def __init__(self, names: list[str], minutes: float, seed: int, folder: Path) -> None:
        self._names, self._seed, self._folder = names, seed, folder
        self._ends = time.monotonic() + 60 * minutes
        self.found: dict[str, Any] = {}

    def run(self) -> None:
        for number, name in enumerate(self._names):
            left = max(0.0, self._ends - time.monotonic()) / 60
            minutes = round(parts.first_share(self._names[number:], left), 3)
            say(f"== {name}: {minutes:g} minutes")
            began, found = time.monotonic(), _nothing()
            self.found[name] = found
            try:
                self._one(name, minutes, found)
            finally:
                found["seconds"] = round(time.monotonic() - began, 1)
            say(f"== {name}: {'passed' if found['passed'] else 'FAILED'}")

    def _one(self, name: str, minutes: float, found: dict[str, Any]) -> None:
        work = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=self._folder))
        shm = Path(tempfile.mkdtemp(prefix="ckptd-torture-", dir="/dev/shm"))
        runtime = Path(tempfile.mkdtemp(prefix="ckptd-torture-", dir="/tmp"))  # a socket's path has 107 bytes
        env = os.environ | {"CKPTD_SHM_DIR": str(shm), "CKPTD_RUNTIME_DIR": str(runtime)}
        report = self._folder / f"{name}.json"
        command = [
            sys.executable, str(HERE / "one_part.py"), name, f"{minutes:g}", str(self._seed), str(work), str(report),
        ]  # fmt: skip
        try:
            wrong = _end_of(command, env, 60 * minutes + OVERTIME_S, work)
        finally:
            found |= json.loads(report.read_text()) if report.exists() else {}
            shutil.rmtree(shm, ignore_errors=True)
            shutil.rmtree(runtime, ignore_errors=True)
        if wrong is not None:
            _add(found, f"the part {wrong}", " ".join(command))
        if found["passed"]:
            shutil.rmtree(work, ignore_errors=True)


def _end_of(command: list[str], env: dict[str, str], limit_s: float, work: Path) -> str | None:
    """Run a part to its end; what is wrong with that: it hung, or left with an error or left a process behind."""
    process = subprocess.Popen(command, env=env, start_new_session=True)
    hung = left = False
    try:
        process.wait(limit_s)
    except subprocess.TimeoutExpired:
        hung = True
    finally:
        _tell_to_end(process)
        left = _end_session(process)
        left |= _end_all_of(work)
    if hung:
        return f"hung: it was ended after {limit_s:.0f} s"
    if process.returncode != 0:
        return f"left with {process.returncode}"
    return "left processes behind" if left else None


def _tell_to_end(process: subprocess.Popen[bytes]) -> None:
    """It alone, not its children: it reports what it tried until now."""
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(LAST_WORDS_S)


def _end_session(process: subprocess.Popen[bytes]) -> bool:
    """Whether the group of the process had anybody in it after it ended; nobody is in it afterwards."""
    left = process.poll() is not None
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        left = False
    process.wait()
    return left


def _end_all_of(work: Path) -> bool:
    """Whether a process with sessions of its own, a daemon, still served something in this folder; none does after."""
    found = False
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if os.fsencode(work) in path.read_bytes():
                os.kill(int(path.parent.name), signal.SIGKILL)
                found = True
    return found


def _nothing() -> dict[str, Any]:
    return {
        "passed": False, "tried": {}, "faults": [], "not tried": {}, "proved nothing because": [], "numbers": {},
    }  # fmt: skip


def _add(found: dict[str, Any], what: str, repeat: str) -> None:
    found["faults"].append({"what": what, "repeat": repeat})
    found["passed"] = False


def summary(found: dict[str, Any]) -> str:
    """The report as lines."""
    lines = []
    for name, part in found.items():
        lines.append(f"{name}: {'passed' if part['passed'] else 'FAILED'} in {part['seconds']:g} s")
        lines += [f"    tried {count:>8}  {what}" for what, count in sorted(part["tried"].items())]
        lines += [f"    {what}: {number}" for what, number in part["numbers"].items()]
        lines += [f"    NOT TRIED  {what}: {why}" for what, why in part["not tried"].items()]
        lines += [f"    proved less than it should: {why}" for why in part["proved nothing because"]]
        lines += [
            f"    FAULT  {fault['what']}\n           again: {fault['repeat']}" for fault in part["faults"]
        ]
        lines += [] if part["tried"] else ["    nothing was tried"]
    return "\n".join(lines)


def arguments() -> argparse.Namespace:
    least = ", ".join(f"{name} {minutes:g}" for name, minutes in parts.LEAST_MINUTES.items())
    parser = argparse.ArgumentParser(
        prog="scripts/torture", description=__doc__,
        epilog=f"The least minutes in which each part tries each kind of thing once: {least}; "
        f"all parts {sum(parts.LEAST_MINUTES.values()):g}.",
    )  # fmt: skip
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--hours", type=float, help="of all parts together")
    length.add_argument("--minutes", type=float, help=f"the same in minutes (default: {DEFAULT_MINUTES:g})")
    parser.add_argument("--only", metavar="PART[,PART]", help=f"of {', '.join(parts.WEIGHTS)}")
    parser.add_argument(
        "--seed", type=int, help="of every random choice (default: a fresh one, which is told)"
    )
    parser.add_argument(
        "--folder", type=Path, help="on the file system to try (default: a new one in TMPDIR)"
    )
    parser.add_argument("--report", type=Path, metavar="FILE.json", help="write the report there too")
    parsed = parser.parse_args()
    unknown = set(parsed.only.split(",") if parsed.only else ()) - set(parts.WEIGHTS)
    if unknown:
        parser.error(f"no part {', '.join(sorted(unknown))}: there are {', '.join(parts.WEIGHTS)}")
    return parsed


def main() -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))  # and nothing is left behind
    asked = arguments()
    names = [name for name in parts.WEIGHTS if asked.only is None or name in asked.only.split(",")]
    minutes = asked.hours * 60 if asked.hours is not None else asked.minutes or DEFAULT_MINUTES
    seed = random.SystemRandom().randrange(2**31) if asked.seed is None else asked.seed
    if asked.folder is not None:
        asked.folder.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="ckptd-torture-", dir=asked.folder))
    say(f"seed {seed}, {minutes:g} minutes, in {folder}")
    least = sum(parts.LEAST_MINUTES[name] for name in names)
    if minutes < least:
        say(
            f"{minutes:g} minutes are too few for {', '.join(names)}: give them {least:g}, or name fewer parts"
        )
    trials = Trials(names, minutes, seed, folder)
    try:
        trials.run()
    except BaseException:
        print(summary(trials.found))
        say(f"broken off; what it left is in {folder}")
        raise
    passed = all(part["passed"] for part in trials.found.values())
    print(summary(trials.found))
    print(f"{'passed' if passed else 'FAILED'}  seed {seed}")
    if asked.report is not None:
        asked.report.write_text(json.dumps({"passed": passed, "seed": seed, "parts": trials.found}, indent=2))
    if passed:
        shutil.rmtree(folder)
    else:
        say(f"what it left is in {folder}")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
