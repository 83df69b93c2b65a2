"""The answer to `ckptd status`: what the daemon knows, as plain JSON values.

{"schema": "ckpt.v2-status",
 "daemon": {"pid", "started_at", "version", "root", "endpoint", "log", "daemon_id",
            "state": "serving" | "leaving",
            "slots_unread": [{"name", "reason"}]},  they couldn't be opened, are kept and tried again
 "runs": [{"run", "run_id",
           "client": null | {"client_id", "pid", "version", "attached",
                             "transport": "slots" | "stream",
                             "stream": null | {"snapshot", "have", "bytes"}},  being received now
           "queue": [SNAPSHOT…],               staged or being written, oldest first
           "staged": [{"snapshot", "client_id", "sequence", "step", "bytes", "since", "state": "staged" | "writing",
                       "proven"}],             the same by what their slots say; `proven`: may be restored from there
           "last_committed": null | SNAPSHOT,  by this daemon process
           "last_verified": "" | folder name,  the newest verified one on the line
           "failed": count, "last_failed": null | SNAPSHOT,
           "superseded": count, "last_superseded": null | SNAPSHOT,  gave way to newer ones
           "skipped": count, "last_skipped": null | step,            never taken, as clients say
           "slots": [{"name", "bytes", "state"}],  memory to receive streams in too; "removed": its file is gone
           "series": the run as its catalogue sums it up}],
 "memory": {"staged_bytes", "max_staged_bytes": null | bytes, "max_client_bytes": null | bytes,
            "free": [{"where", "bytes"}]},     every bound on more of it
 "verifier": {"pid", "watching", "reason", "pending", "restarts",
              "scrub": {"every_s",             0 for never
                        "gives_way": whether it waits, since checkpoints are written; the rest once it has begun:
                        "checkpoints", "due", "late": counts (verify.rota.Standing),
                        "oldest_s": null | age,  everything was read in full within so many seconds
                        "next_s": null | until one is due,
                        "reading": "" | run/name, "read_bytes",
                        "passed", "found", "last_found",  since the verifier started: read, corrupt, which and why
                        "unread", "last_unread"}},        can't be read now: how many, and why the last one can't
 "writing": {"mode": "direct" | "early" | "plain",     how large files get to the medium (ckptd.disk.write_mode)
             "reason": why it is no better one,
             "max_bytes_per_s": null | number,
             "urgent": whether somebody waits, so that it isn't done at the lowest priority},
 "truncated": true}                            only when there were too many runs for one message

SNAPSHOT: {"snapshot", "step", "sequence", "state", "name", "bytes", "seconds", "error"}
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, Final

import msgspec

from ckptd.disk.rootdir import DaemonRecord, Root
from ckptd.limits import MAX_MESSAGE_BYTES
from ckptd.snapshot.slot_layout import page_up
from ckptd.snapshot.slots import Slot
from ckptd.snapshot.staged import facts_of
from ckptd_daemon.core.book import Book
from ckptd_daemon.core.clients import Clients
from ckptd_daemon.core.sessions import Session
from ckptd_daemon.core.slotpool import SlotPool, header_of
from ckptd_daemon.core.snapshots import Snapshot

SCHEMA: Final = "ckpt.v2-status"
_MOST_BYTES: Final = MAX_MESSAGE_BYTES * 9 // 10
_MOST_SNAPSHOTS: Final = 100


def describe(
    root: Root, record: DaemonRecord, clients: Clients, pool: SlotPool, verifier: Mapping[str, Any],
    writing: Mapping[str, Any],
) -> dict[str, Any]:  # fmt: skip
    """The data of a StatusReply; see the module's text. Never more than one message holds."""
    daemon = {
        "pid": record.pid, "started_at": record.started_at, "version": record.version,
        "root": str(root.path), "endpoint": record.endpoint, "log": record.log,
        "daemon_id": record.daemon_id, "state": "leaving" if clients.leaving else "serving",
        "slots_unread": [{"name": n, "reason": why[:200]} for n, why in list(pool.unread.items())[:_MOST_SNAPSHOTS]],
    }  # fmt: skip
    data: dict[str, Any] = {
        "schema": SCHEMA, "daemon": daemon, "runs": [], "memory": _memory(clients, pool),
        "verifier": dict(verifier), "writing": dict(writing),
    }  # fmt: skip
    length = 4096 + len(msgspec.json.encode((daemon, data["memory"])))
    for run, book in sorted(clients.pipeline.books.items()):
        described = _run(run, book, clients, pool)
        length += len(msgspec.json.encode(described))
        if length > _MOST_BYTES:
            data["truncated"] = True
            break
        data["runs"].append(described)
    return data


def _run(run: str, book: Book, clients: Clients, pool: SlotPool) -> dict[str, Any]:
    session = clients.sessions.of_run(run)
    return {
        "run": run,
        "run_id": book.run_id,
        "client": None if session is None else _client(session, clients),
        "queue": [_snapshot(snapshot) for snapshot in book.ledger.unwritten()[:_MOST_SNAPSHOTS]],
        "staged": [_staged(slot) for slot in _unwritten_slots(book)[:_MOST_SNAPSHOTS]],
        "last_committed": _snapshot(book.last_committed),
        "last_verified": (book.summary.get("last_verified") or {}).get("name", ""),
        "failed": book.failed,
        "last_failed": _snapshot(book.last_failed),
        "superseded": book.superseded,
        "last_superseded": _snapshot(book.last_superseded),
        "skipped": book.skipped,
        "last_skipped": book.last_skipped,
        "slots": [] if session is None else _slots(pool, clients, session.client_id),
        "series": dict(book.summary),
    }


def _client(session: Session, clients: Clients) -> dict[str, Any]:
    return {
        "transport": "stream" if session.streams else "slots",
        "stream": clients.streams.describe(session.client_id),
        "client_id": session.client_id, "pid": session.process.pid, "version": session.version,
        "attached": session.identity is not None,
    }  # fmt: skip


def _slots(pool: SlotPool, clients: Clients, client_id: str) -> list[dict[str, Any]]:
    slots = []
    for slot in [*pool.of(client_id), *clients.streams.buffers.of(client_id)]:
        header = header_of(slot)
        word = header.state.name.lower() if header is not None else "damaged"
        word = word if slot.in_place() else "removed"
        slots.append({"name": slot.name, "bytes": slot.capacity, "state": word})
    return slots


def _unwritten_slots(book: Book) -> list[Slot]:
    return [
        one.slot
        for one in book.ledger.unwritten()
        if one.slot is not None and header_of(one.slot) is not None
    ]


def _staged(slot: Slot) -> dict[str, Any]:
    header, start = slot.header(), page_up(slot.header().data_bytes)
    with slot.data[start : start + header.descriptor_bytes] as descriptor:
        return facts_of(header, descriptor, proven=slot.proof() is not None)


def _memory(clients: Clients, pool: SlotPool) -> dict[str, Any]:
    rooms = [{"where": room.where[:500], "bytes": max(0, room.free_bytes)} for room in pool.rooms()]
    return {"staged_bytes": clients.staged.of(), **asdict(clients.staged.budget), "free": rooms}


def _snapshot(snapshot: Snapshot | None) -> dict[str, Any] | None:
    if snapshot is None:
        return None
    return {
        "snapshot": snapshot.number, "step": snapshot.step, "sequence": snapshot.sequence,
        "state": snapshot.state.value, "name": snapshot.name, "bytes": snapshot.nbytes,
        "seconds": snapshot.seconds, "error": "" if snapshot.error is None else str(snapshot.error)[:1000],
    }  # fmt: skip
