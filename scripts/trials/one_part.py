"""Run one part in this process, and write what it found as JSON. scripts/trials/run.py starts it, and ends it by SIGTERM.

Usage: one_part.py NAME MINUTES SEED FOLDER FINDINGS_FILE
"""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import NoReturn

sys.path.insert(1, str(Path(__file__).resolve().parent.parent.parent / "tests"))

import parts
from evidence import left_over
from part import Findings


class Ended(BaseException):
    """It was told to end. Not an Exception: a part that lives through those must not live through this."""


def run(name: str, minutes: float, seed: int, folder: Path, findings: Findings) -> None:
    """Run the part; that it broke off, or left something in shared memory, is a fault of its own."""
    try:
        parts.load(name).run(minutes, seed, folder, findings)
    except (Exception, Ended):  # noqa: BLE001 - whatever ended it: said in the report, and the next part runs
        findings.fault(f"the part broke off: {traceback.format_exc()}")
    for path in left_over(Path(os.environ["CKPTD_SHM_DIR"])):
        findings.fault(f"shared memory left at the end: {path}")


def report(findings: Findings, path: Path, again: str) -> None:
    """Write down what was tried and found until now; `again`: how a fault that doesn't say so is seen again."""
    found = findings.as_json()
    for fault in found["faults"]:
        fault["repeat"] = fault["repeat"] or again
    path.write_text(json.dumps(found))


def main() -> None:
    name, minutes, seed, folder, path = sys.argv[1:]
    findings, me = Findings(), os.getpid()
    again = f"scripts/torture --only {name} --seed {seed} --minutes {minutes}"

    def end(*_: object) -> NoReturn:
        if os.getpid() == me:
            report(findings, Path(path), again)  # should what it does to end never come to its end
        raise Ended("told to end")

    signal.signal(signal.SIGTERM, end)
    run(name, float(minutes), int(seed), Path(folder), findings)
    report(findings, Path(path), again)


if __name__ == "__main__":
    main()
