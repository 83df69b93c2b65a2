from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ckptd.disk.rootdir import DaemonRecord, Root
from ckptd.errors import NoSpace
from ckptd.limits import MAX_MESSAGE_BYTES
from ckptd.link import wire
from ckptd_daemon.core.book import Book
from ckptd_daemon.core.lifecycle import State
from ckptd_daemon.core.sessions import Sessions
from ckptd_daemon.core.slotpool import SlotPool
from ckptd_daemon.core.snapshots import Snapshot
from ckptd_daemon.core.staged_bytes import StagedBytes
from ckptd_daemon.core.status import describe
from ckptd_daemon.series.budget import Budget

RECORD = DaemonRecord(
    endpoint="ipc:///x", pid=1, pid_started=2, daemon_id="d", started_at=1.0, version="0", log="l"
)


def clients(books: dict[str, Book]) -> Any:
    staged = StagedBytes(Budget(max_client_bytes=7))
    return SimpleNamespace(
        leaving="", staged=staged, sessions=Sessions(), pipeline=SimpleNamespace(books=books)
    )


def test_a_run_shows_what_is_queued_and_what_failed(tmp_path: Path) -> None:
    book = Book("r" * 32, 5, {"last_verified": {"name": "step-000000003"}})
    failed = Snapshot("gpt", "c" * 32, 1, 4, None, State.FAILED, error=NoSpace("full"))
    book.ledger.add(failed)
    book.ledger.add(Snapshot("gpt", "c" * 32, 2, 5, None))
    book.failed, book.last_failed = 1, failed
    book.skipped, book.last_skipped, book.superseded = 3, 17, 2
    writing = {"mode": "direct", "reason": "", "max_bytes_per_s": None, "urgent": False}
    known = clients({"gpt": book})
    data = describe(Root(tmp_path, ""), RECORD, known, SlotPool(tmp_path), {"pid": 7}, writing)
    (run,) = data["runs"]
    assert data["schema"] == "ckpt.v2-status" and data["verifier"] == {"pid": 7}
    assert data["writing"] == writing
    assert [(s["sequence"], s["state"]) for s in run["queue"]] == [(5, "staged")]
    assert run["last_failed"]["error"] == "full" and run["failed"] == 1
    assert (run["skipped"], run["last_skipped"], run["superseded"]) == (3, 17, 2)
    assert (data["memory"]["staged_bytes"], data["memory"]["max_client_bytes"]) == (0, 7)
    assert {"memory of this machine"} <= {room["where"] for room in data["memory"]["free"]}
    assert run["last_verified"] == "step-000000003" and run["client"] is None


def test_the_answer_always_fits_into_one_message(tmp_path: Path) -> None:
    books = {f"run-{n}": Book("r" * 32, 1, {"problems": ["x" * 1000]}) for n in range(3000)}
    data = describe(Root(tmp_path, ""), RECORD, clients(books), SlotPool(tmp_path), {}, {})
    assert data["truncated"] and data["runs"]
    encoded = wire.encode(wire.StatusReply(id=1, data=data))
    assert len(encoded) <= MAX_MESSAGE_BYTES
    wire.decode_reply(encoded)
