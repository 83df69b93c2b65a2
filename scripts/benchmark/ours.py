"""ckptd as a contestant: one root, its daemon and a client for each way of saving."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any, Final

import page_cache
from state import Saved

import ckptd
from ckptd.disk.rootdir import DaemonRecord, Root
from ckptd.link.client_options import ClientOptions

PATIENCE_S: Final = 120.0


@contextmanager
def daemon(root: Path, *, keep_last: int = 1) -> Iterator[Path]:
    """A daemon for root, stopped at the end; with keep_last=1 the disk holds one checkpoint of a run."""
    command("start", "--detach", "--root", root, "--keep-last", keep_last)
    try:
        yield root
    finally:
        command("stop", "--root", root)


def daemon_pid(root: Path) -> int:
    """Of the daemon that serves root."""
    record = DaemonRecord.read(Root.for_reading(root))
    if record is None:
        raise RuntimeError("the daemon is gone")
    return record.pid


def command(*argv: object) -> str:
    """Run `ckptd` to its end; what it printed.

    Raises:
        RuntimeError: It failed; with what it said.
    """
    call = [sys.executable, "-m", "ckptd_daemon.cli.main", *map(str, argv)]
    done = subprocess.run(call, capture_output=True, text=True, check=False, timeout=PATIENCE_S)
    if done.returncode != 0:
        raise RuntimeError(f"ckptd {argv[0]} left with {done.returncode}: {done.stderr.strip()[-500:]}")
    return done.stdout.strip()


class Ours:
    """Snapshots of one client, each waited for until it is verified and its predecessor deleted."""

    ours = True

    def __init__(self, name: str, about: str, root: Path, saved: Saved, run: str, **options: Any) -> None:
        self.name, self.about, self.saved = name, about, saved
        self.client = ckptd.Client(root=root, run=run, daemon="attach", on_error="raise", **options)
        self.client.reserve(saved.live)
        self._run_dir, self.step = root / run, 0

    def measure(self) -> dict[str, float]:
        """stall: snapshot() itself. done: until it is durable. verified: until it was read back."""
        self.step += 1
        began = time.perf_counter()
        ticket = self.client.snapshot(self.step, self.saved.live)
        stalled = time.perf_counter()
        ticket.wait("committed", timeout_s=PATIENCE_S)
        durable = time.perf_counter()
        ticket.wait("verified", timeout_s=PATIENCE_S)
        verified = time.perf_counter()
        return {"stall": stalled - began, "done": durable - began, "verified": verified - began}

    def settle(self) -> None:
        """Wait until retention is through, and change the state."""
        deadline = time.monotonic() + PATIENCE_S
        while sum(name.startswith(("step-", ".t")) for name in os.listdir(self._run_dir)) > 1:
            if time.monotonic() > deadline:
                raise RuntimeError("retention doesn't come to its end")
            time.sleep(0.002)
        page_cache.sync_file_system(self._run_dir)
        self.saved.change()

    def close(self) -> None:
        """Leave."""
        self.client.close()


def ways(root: Path, saved: Saved) -> list[Ours]:
    """Every way that this version has to save."""
    about = "copy into shared memory; another process writes, SHA-256, fsync of files, folder and run; verified after"
    found = [Ours("ckptd", about, root, saved, "plain")]
    have = {one.name for one in fields(ClientOptions)}
    if "overlap" in have:
        beside = "the copy runs beside the next step, up to its optimizer; the rest as above"
        found.append(Ours("ckptd, overlap", beside, root, saved, "overlap", overlap=True))
    if "transport" in have:
        streamed = "copy into private memory, streamed over ZeroMQ; the rest as above"
        found.append(Ours("ckptd, stream", streamed, root, saved, "stream", transport="stream"))
    return found
