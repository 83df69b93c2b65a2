"""`ckptd status`: the daemon and its runs; without a daemon, what the disk says and exit code 5."""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Sequence
from typing import Any, Final

from ckptd.disk.rootdir import Root
from ckptd.errors import CkptdError, NoDaemon
from ckptd.link import wire
from ckptd.link.connection import connect
from ckptd.snapshot.sizes import show_slots
from ckptd_daemon.cli import arguments, output, units
from ckptd_daemon.cli.output import Cell

_ANSWER_S: Final = 5.0
_HEADERS: Final = ("RUN", "CLIENT", "QUEUE", "COMMITTED", "VERIFIED", "FAILED", "NOTE")


def run(args: argparse.Namespace) -> int:
    """Print it; NoDaemon after what the disk says."""
    root = arguments.root_with_daemon(args)
    try:
        data, absent = _ask(root), None
    except NoDaemon as error:
        data, absent = from_disk(root), error
    if args.json:
        output.emit_json("ckpt.v2-status", {key: value for key, value in data.items() if key != "schema"})
    else:
        output.emit(
            _daemon_line(data.get("daemon"))
            + _slots_line(data.get("daemon"))
            + _memory_line(data.get("memory"), data["runs"])
            + _verifier_line(data.get("verifier"))
            + _scrub_line((data.get("verifier") or {}).get("scrub"))
            + _writing_line(data.get("writing"))
        )
        output.emit(output.table(_HEADERS, [_row(shown) for shown in data["runs"]]))
    if absent is not None:
        raise absent
    return 0


def _ask(root: Root) -> dict[str, Any]:
    connection = connect(root, timeout_s=_ANSWER_S)
    try:
        return connection.ask(wire.Status(id=0), wire.StatusReply, _ANSWER_S).data
    finally:
        connection.close()


def from_disk(root: Root) -> dict[str, Any]:
    """The same, as far as it can be read without a daemon."""
    from ckptd.disk.in_quarantine import count_quarantined
    from ckptd.disk.series import read_series, runs

    shown, staged = [], _staged_by_run(root)
    for name in sorted({*runs(root), *staged}):
        try:
            entries = [entry for entry in read_series(root, name).entries if entry.status == "committed"]
        except CkptdError as error:
            output.note(str(error))
            continue
        committed = [entry.name for entry in entries if entry.on_line]
        verified = [entry.name for entry in entries if entry.on_line and entry.verified]
        newest = {"last_committed": _last(committed), "last_verified": _last(verified)}
        held = {"quarantined": count_quarantined(root.run_dir(name))}
        left = {"staged": staged.get(name, [])}
        shown.append({"run": name, "client": None, **left, **newest, "series": held})
    return {"daemon": None, "runs": shown, "verifier": None, "writing": None}


def _staged_by_run(root: Root) -> dict[str, list[dict[str, Any]]]:
    """What waits in slots for the next daemon."""
    from ckptd.snapshot.sealed_slot import sealed_slots
    from ckptd.snapshot.staged import facts_of_slot

    staged: dict[str, list[dict[str, Any]]] = {}
    for slot in sealed_slots(root.slot_path) if root.id else ():  # a copy that nobody has used has none
        with slot, contextlib.suppress(OSError, CkptdError):  # damaged: the daemon says so when it writes it
            staged.setdefault(slot.header.run, []).append(facts_of_slot(slot))
    return staged


def _last(names: list[str]) -> str | None:
    return names[-1] if names else None


def _daemon_line(daemon: dict[str, Any] | None) -> str:
    if daemon is None:
        return "daemon\tnone\n"
    up = units.show_seconds(max(0.0, time.time() - float(daemon["started_at"])))
    facts = [f"pid {daemon['pid']}", f"{daemon.get('state')} for {up}", f"ckptd {daemon['version']}"]
    return _line("daemon", [*facts, str(daemon["endpoint"])])


def _slots_line(daemon: dict[str, Any] | None) -> str:
    """Slots that may hold a snapshot and can't be read; nothing when there are none."""
    unread = (daemon or {}).get("slots_unread") or []
    facts = [f"{slot.get('name')} can't be read, kept: {slot.get('reason')}" for slot in unread]
    return _line("slots", facts) if facts else ""


def _memory_line(memory: dict[str, Any] | None, runs: Sequence[dict[str, Any]]) -> str:
    """What snapshots have of it, what they may have at most, the tightest bound on more, and each run's slots."""
    if not memory:
        return ""
    bounds = [(memory.get("max_staged_bytes"), "at most {}"), (memory.get("max_client_bytes"), "{} a client")]
    said = ", ".join(text.format(units.show_bytes(int(most))) for most, text in bounds if most is not None)
    facts = [f"{units.show_bytes(int(memory['staged_bytes']))} staged" + (f" ({said})" if said else "")]
    if free := memory.get("free"):
        least = min(free, key=lambda room: int(room["bytes"]))
        facts.append(f"{units.show_bytes(int(least['bytes']))} free: {least['where']}")
    for run in runs:
        if slots := run.get("slots"):
            facts.append(f"{run['run']}: {show_slots(len(slots), max(int(slot['bytes']) for slot in slots))}")
            if gone := sum(slot.get("state") == "removed" for slot in slots):
                facts.append(
                    f"{run['run']}: the files of {gone} were removed, others come with the next snapshot"
                )
    return _line("memory", facts)


def _verifier_line(verifier: dict[str, Any] | None) -> str:
    if not verifier:
        return ""
    why = f" ({verifier['reason']})" if verifier.get("reason") else ""
    how = f"{verifier.get('watching')}{why}"
    return _line("verifier", [f"pid {verifier.get('pid')}", how, f"{verifier.get('pending')} to check"])


def _scrub_line(scrub: dict[str, Any] | None) -> str:
    """How often everything is read again, since when all of it was, what is read now or next, and what was found."""
    if not scrub:
        return ""
    if not scrub.get("every_s"):
        return _line("scrub", ["never"])
    facts = [f"every {units.show_seconds(float(scrub['every_s']))}"]
    if (count := scrub.get("checkpoints")) is not None:
        oldest_s, next_s = scrub.get("oldest_s"), scrub.get("next_s")
        since = (
            "" if oldest_s is None else f", all read since {units.show_utc(time.time() - float(oldest_s))}"
        )
        facts.append(f"{count} checkpoints{since}")
        late = f", {scrub['late']} of them late" if scrub.get("late") else ""
        facts += [f"{scrub['due']} due{late}"] if scrub.get("due") else []
        if scrub.get("reading"):
            waits = ", waits for writes" if scrub.get("gives_way") else ""
            facts.append(
                f"reading {scrub['reading']}, {units.show_bytes(int(scrub['read_bytes']))} so far{waits}"
            )
        elif next_s is not None:
            facts.append(f"next in {units.show_seconds(float(next_s))}")
        facts += [f"{scrub['found']} found corrupt, last {scrub['last_found']}"] if scrub.get("found") else []
        facts += [f"{scrub['unread']} can't be read: {scrub['last_unread']}"] if scrub.get("unread") else []
    return _line("scrub", facts)


def _writing_line(writing: dict[str, Any] | None) -> str:
    """How large files get to the medium, why not better, and how fast they may."""
    if not writing:
        return ""
    rate = writing.get("max_bytes_per_s")
    facts = [str(writing.get("mode")) + (f" ({writing['reason']})" if writing.get("reason") else "")]
    facts += [f"at most {units.show_bytes(rate)}/s"] if rate else []
    return _line("writing", [*facts, *(["somebody waits"] if writing.get("urgent") else [])])


def _line(name: str, facts: list[str]) -> str:
    return "\t".join([name, *map(output.printable, facts)]) + "\n"


def _row(shown: dict[str, Any]) -> list[Cell]:
    client = shown.get("client")
    return [
        Cell(str(shown["run"])),
        Cell("-" if not client else _client(client)),
        Cell(str(len(shown.get("queue", ())))),
        Cell(_newest(shown, "last_committed")),
        Cell(_newest(shown, "last_verified")),
        Cell(str(shown.get("failed", 0)), colour="red" if shown.get("failed") else ""),
        Cell(_note(shown)),
    ]


def _client(client: dict[str, Any]) -> str:
    """Its process, and that it streams: then nothing of a snapshot outlives it that isn't streamed yet."""
    streams = " (stream)" if client.get("transport") == "stream" else ""
    return f"pid {client.get('pid')}{streams}"


def _note(shown: dict[str, Any]) -> str:
    """What went wrong: the newest failure, what was left out, what lies in quarantine, what the start found."""
    failed = shown.get("last_failed")
    notes = [_waits(staged) for staged in shown.get("staged", ())]
    notes += [f"step {failed['step']}: {failed['error']}"] if failed else []
    if count := shown.get("superseded"):
        last = shown.get("last_superseded") or {}
        notes.append(f"{count} superseded, the last one step {last.get('step')}")
    if count := shown.get("skipped"):
        notes.append(f"{count} skipped, the last one step {shown.get('last_skipped')}")
    series = shown.get("series", {})
    notes += [f"{held} in quarantine, see ckptd list"] if (held := series.get("quarantined")) else []
    return "; ".join(notes + [str(text) for text in series.get("problems", ())])


def _waits(staged: dict[str, Any]) -> str:
    since, step = staged.get("since"), staged.get("step")
    age = "" if since is None else f", taken {units.show_seconds(max(0.0, time.time() - float(since)))} ago"
    step = "a snapshot" if step is None else f"step {step}"
    return f"{step} {staged.get('state')}{age}, {units.show_bytes(int(staged['bytes']))}"


def _newest(shown: dict[str, Any], what: str) -> str:
    """The newest one by this daemon process, else by the ones before it."""
    value = shown.get(what) or shown.get("series", {}).get(what) or "-"
    return str(value.get("name") or "-") if isinstance(value, dict) else str(value)
