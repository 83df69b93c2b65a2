"""What the daemon and its verifier say to each other: one JSON object a line, over its pipes.

Both ends are our own processes, one the other's child; still a line that can't be read is dropped and said,
never trusted.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from ckptd.disk.verification import Report
from ckptd.errors import ProtocolError
from ckptd.names import check_run_name, parse_step_folder

MAX_FAULTS: Final = 50  #: of one report; a checkpoint with 10,000 damaged shards is as corrupt as one with 50
MAX_FAULT_CHARS: Final = 2_000
MAX_LINE_BYTES: Final = 1024 * 1024


@dataclass(frozen=True)
class Request:
    """Re-hash this checkpoint before anything that nobody asked for."""

    run: str
    name: str


@dataclass(frozen=True)
class Hurry:
    """Whether somebody waits for checkpoints to be verified, from now on."""

    now: bool


@dataclass(frozen=True)
class Writing:
    """Whether checkpoints are being written, from now on: meanwhile the scrub waits."""

    now: bool


@dataclass(frozen=True)
class Verdict:
    """The verifier's report on one checkpoint of a run."""

    run: str
    report: Report


@dataclass(frozen=True)
class LogLine:
    """An event the daemon shall log for the verifier; it has no log of its own."""

    level: int
    text: str


@dataclass(frozen=True)
class WatchState:
    """How the verifier learns of changes: "events" or "polling", and why when it polls."""

    mode: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class ScrubState:
    """How far the scrub is; the first five are those of `rota.Standing`.

    Attributes:
        reading: "run/name", or "" between two.
        read_bytes: Of that.
        passed: How many it has read in full since it was started.
        found, last_found: How many of them failed, and the last one with what is wrong.
        unread, last_unread: How many can't be read now, and why the last one can't.
    """

    checkpoints: int
    due: int
    late: int
    oldest_s: float | None
    next_s: float | None
    reading: str = ""
    read_bytes: int = 0
    passed: int = 0
    found: int = 0
    last_found: str = ""
    unread: int = 0
    last_unread: str = ""


Line = Request | Hurry | Writing | Verdict | LogLine | WatchState | ScrubState


class Sender:
    """Writes lines to the parent, whole, from any thread."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._lock = threading.Lock()

    def __call__(self, line: Line) -> None:
        data = memoryview(to_line(line))
        with self._lock:
            while data:
                try:
                    data = data[os.write(self._fd, data) :]
                except BrokenPipeError:  # the parent is gone, and so is the reason to be here
                    os._exit(0)


def to_line(line: Line) -> bytes:
    """The line with its newline."""
    return (json.dumps({type(line).__name__: _fields(line)}, allow_nan=False) + "\n").encode("ascii")


def from_line(data: bytes) -> Line:
    """The line without or with its newline.

    Raises:
        ProtocolError: Not one of ours.
    """
    try:
        ((kind, fields),) = json.loads(data).items()
        line: Line = _BUILDERS[kind](fields)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ProtocolError("not a line of the verifier's", seen=f"{data[:200]!r} ({error})") from error
    return line


def _fields(line: Line) -> dict[str, Any]:
    if not isinstance(line, Verdict):
        return asdict(line)
    report = asdict(line.report)
    report["path"] = str(line.report.path)
    report["faults"] = [fault[:MAX_FAULT_CHARS] for fault in line.report.faults[:MAX_FAULTS]]
    return {"run": line.run, "report": report}


def _request(fields: dict[str, Any]) -> Request:
    run, name = check_run_name(fields["run"]), fields["name"]
    if parse_step_folder(name) is None:
        raise ValueError("not the name of a checkpoint")
    return Request(run, name)


def _hurry(fields: dict[str, Any]) -> Hurry:
    return Hurry(bool(fields["now"]))


def _writing(fields: dict[str, Any]) -> Writing:
    return Writing(bool(fields["now"]))


def _verdict(fields: dict[str, Any]) -> Verdict:
    report = dict(fields["report"])
    report["path"] = Path(report["path"])
    report["faults"] = tuple(report["faults"])
    return Verdict(check_run_name(fields["run"]), Report(**report))


def _log_line(fields: dict[str, Any]) -> LogLine:
    level = fields["level"]
    return LogLine(
        level if level in (logging.INFO, logging.WARNING, logging.ERROR) else logging.INFO,
        str(fields["text"]),
    )


def _watch_state(fields: dict[str, Any]) -> WatchState:
    return WatchState(str(fields["mode"]), str(fields["reason"]))


def _scrub_state(fields: dict[str, Any]) -> ScrubState:
    import msgspec  # the verifier itself reads none of these, and does without

    try:
        return msgspec.convert(fields, ScrubState)
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from error


_BUILDERS: Final[dict[str, Any]] = {
    "Request": _request, "Hurry": _hurry, "Writing": _writing, "Verdict": _verdict, "LogLine": _log_line,
    "WatchState": _watch_state, "ScrubState": _scrub_state,
}  # fmt: skip
