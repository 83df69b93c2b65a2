"""Run one part in this process, and write what it found as JSON. scripts/trials/run.py starts it.

Usage: one_part.py NAME MINUTES SEED FOLDER FINDINGS_FILE
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path

sys.path.insert(1, str(Path(__file__).resolve().parent.parent.parent / "tests"))

import parts
from evidence import left_over
from part import Findings


def run(name: str, minutes: float, seed: int, folder: Path) -> Findings:
    """What the part found; that it broke off, or left something in shared memory, is a fault of its own."""
    try:
        findings = parts.load(name).run(minutes, seed, folder)
    except Exception:  # noqa: BLE001 - whatever ended it: said in the report, and the next part runs
        findings = Findings()
        findings.fault(f"the part broke off: {traceback.format_exc()}")
    for path in left_over(Path(os.environ["CKPTD_SHM_DIR"])):
        findings.fault(f"shared memory left at the end: {path}")
    return findings


def main() -> None:
    name, minutes, seed, folder, report = sys.argv[1:]
    findings = run(name, float(minutes), int(seed), Path(folder))
    again = f"scripts/torture --only {name} --seed {seed} --minutes {minutes}"
    found = findings.as_json()
    for fault in found["faults"]:
        fault["repeat"] = fault["repeat"] or again
    Path(report).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
