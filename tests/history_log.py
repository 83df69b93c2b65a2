"""The log of a history in words: what was asked, answered and seen of the runs in which something is wrong."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

_LEFT_OUT = ("op", "run", "call", "ret", "checkpoints")


def in_words(events: Iterable[Mapping[str, Any]], faults: Iterable[str], root: Path) -> str:
    """The faults, then for each run that one of them names its events by their ends, and what its daemons said."""
    faults, events = list(faults), list(events)
    log = root / ".ckptd" / "daemon.log"
    said = log.read_text(errors="replace").splitlines() if log.exists() else []
    lines = [f"- {fault}" for fault in faults]
    for run in dict.fromkeys(fault.partition(":")[0].removeprefix("run ") for fault in faults):
        of_run = [event for event in events if event["run"] == run]
        if of_run:
            lines += ["", f"run {run}, seconds since its first event:", *_in_order(of_run)]
            lines += ["", f"run {run}, what its daemons said:", *(line for line in said if _is_of(line, run))]
    return "\n".join(lines)


def _in_order(events: list[Mapping[str, Any]]) -> list[str]:
    first = min(event["call"] for event in events)
    ordered = sorted(events, key=lambda event: event.get("ret", event["call"]))
    return [f"{_when(event, first)} {event['op']:8} {_fields(event)}" for event in ordered]


def _when(event: Mapping[str, Any], first: float) -> str:
    until = f"{event['ret'] - first:8.3f}" if "ret" in event else "        "
    return f"{event['call'] - first:8.3f} {until}"


def _fields(event: Mapping[str, Any]) -> str:
    said = [f"{name}={value}" for name, value in event.items() if name not in _LEFT_OUT]
    said += [f"{one['sequence']}:{one['name']}={one['identity']}" for one in event.get("checkpoints", ())]
    return " ".join(said)


def _is_of(line: str, run: str) -> bool:
    named = re.search(r"\brun=(\S+)", line)
    return named is None or named[1] == run
