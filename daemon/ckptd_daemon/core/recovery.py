"""What a daemon does first, under the root's lock: clear away what a crash left, and adopt what it saved."""

from __future__ import annotations

import contextlib
import logging
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path

from ckptd.disk import leftovers
from ckptd.disk.rootdir import Root
from ckptd.errors import CkptdError
from ckptd.names import DECISIONS_DIR, check_run_name, parse_step_folder, parse_work_folder
from ckptd.snapshot.slots import Slot, SlotHeader
from ckptd_daemon.core.clients import Clients
from ckptd_daemon.core.disk import Disk, RunFacts
from ckptd_daemon.core.sessions import Process, Session
from ckptd_daemon.core.slotpool import SlotPool, adoption_order, holds_snapshot

log = logging.getLogger(__name__)


def remove_stale_sockets(root: Root) -> None:
    """Remove sockets of earlier daemons of this root: the lock is ours, so nobody listens there.

    Anything that isn't a socket is left alone, whatever its name.
    """
    for path in root.runtime_dir().iterdir():
        if path.name.startswith(root.socket_prefix) and path.suffix == ".sock":
            with contextlib.suppress(OSError):
                if stat.S_ISSOCK(path.lstat().st_mode):
                    path.unlink()
                    log.info("socket.removed path=%s", path)


def runs_on_disk(root: Root) -> list[str]:
    """Folders of the root that are runs: named like one, and with something of ours in it."""
    return sorted(folder.name for folder in _folders(root.path) if _is_run(folder))


def sweep(root: Root) -> None:
    """Remove what a crash left anywhere in the root.

    Called with the root's lock held, after the catalogues have seen which sequences it carries.
    """
    for folder in (root.path, root.service_dir):
        leftovers.sweep(folder)
    for run in runs_on_disk(root):
        leftovers.sweep_run(root.run_dir(run))


def open_runs(disk: Disk, runs: list[str]) -> dict[str, RunFacts]:
    """Open every run; one that can't be opened is said, and opened when it is needed."""
    facts = {}
    for run in runs:
        try:
            facts[run] = disk.open_run(run)
        except (CkptdError, OSError) as error:
            log.error("run.not_opened run=%s error=%s", run, error)
    return facts


def adopt(disk: Disk, clients: Clients, pool: SlotPool) -> int:
    """Take over the slots of earlier daemons; returns how many snapshots are to be written.

    Slots of processes that live are kept, whatever their state: the client comes back to them. Of dead ones
    only those with a sealed snapshot are. Snapshots are written in the order in which they were accepted.
    """
    taken: set[tuple[str, int]] = set()
    for slot, header in adoption_order(sort_out(clients, pool, pool.scan())):
        try:
            _adopt(disk, clients, slot, header, taken)
        except (CkptdError, OSError) as error:  # one slot must never keep the others, or the start, waiting
            log.error("snapshot.not_adopted slot=%s error=%s", slot.name, error)
    return len(clients.pipeline.unwritten())


def sort_out(
    clients: Clients, pool: SlotPool, found: Iterable[tuple[Slot, SlotHeader]]
) -> list[tuple[Slot, SlotHeader]]:
    """Of slots just opened, those with a sealed snapshot; what nobody lives to use is removed."""
    sealed = []
    for slot, header in found:
        try:
            _keep_owner(clients, header)
        except (CkptdError, OSError) as error:
            log.error("slot.owner_unknown slot=%s error=%s", slot.name, error)
        if holds_snapshot(header):
            sealed.append((slot, header))
        elif clients.sessions.get(header.client_id) is None:
            log.info("slot.freed slot=%s state=%s", slot.name, header.state.name.lower())
            pool.remove(slot)
    return sealed


def _adopt(disk: Disk, clients: Clients, slot: Slot, header: SlotHeader, taken: set[tuple[str, int]]) -> None:
    book = clients.pipeline.books.get(header.run)
    if book is None:
        facts = open_runs(disk, [header.run]).get(header.run)
        if facts is None:
            return  # the slot is kept until the run can be opened
        book = clients.pipeline.opened(header.run, facts)
    # A sequence is given once; a header that repeats one is lying.
    given = header.sequence if (header.run, header.sequence) not in taken else 0
    snapshot = clients.pipeline.accept(slot, header, sequence=given)
    taken.add((header.run, snapshot.sequence))
    log.info(
        "snapshot.adopted run=%s snapshot=%d sequence=%d slot=%s",
        header.run, snapshot.number, snapshot.sequence, slot.name,
    )  # fmt: skip


def _keep_owner(clients: Clients, header: SlotHeader) -> None:
    """A session for the process that the slot was made for, if it lives."""
    if not header.client_id or not header.owner_pid or clients.sessions.get(header.client_id) is not None:
        return
    process = Process.find(header.owner_pid, header.owner_started)
    if process is None:
        return
    if clients.sessions.of_run(header.run) is not None:  # one live client per run; the other one left
        process.close()
        return
    clients.sessions.add(Session(header.client_id, header.run, process, None))


def _is_run(folder: Path) -> bool:
    try:
        check_run_name(folder.name)
        return any(_is_ours(path.name) for path in folder.iterdir())
    except (CkptdError, OSError):
        return False


def _is_ours(name: str) -> bool:
    return name == DECISIONS_DIR or parse_step_folder(name) is not None or parse_work_folder(name) is not None


def _folders(parent: Path) -> Iterator[Path]:
    for path in leftovers.entries(parent):
        with contextlib.suppress(OSError):
            if stat.S_ISDIR(path.lstat().st_mode):
                yield path
