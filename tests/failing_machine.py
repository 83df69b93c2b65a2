"""A root and what serves it, in this process, on a disk whose calls fail."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from ckptd.disk.lock import RootLock
from ckptd.disk.rootdir import Root
from ckptd.disk.slot_folder import record_root, remove_slot_folder
from ckptd.disk.verification import check
from ckptd.disk.write_mode import Mode, WriteMode
from ckptd.errors import CkptdError
from ckptd.snapshot.slots import Slot
from ckptd_daemon.core import recovery
from ckptd_daemon.core.disk import Disk, Written
from ckptd_daemon.core.faults import as_ours
from ckptd_daemon.series.policy import RetentionPolicy
from ckptd_daemon.series.settings_file import Settings
from daemon_parts import fill_slot, slot_size
from kept_promises import KEEP, RUN, Promised
from nth_call import Orders
from snapshots import CLIENT, data_for, descriptor

_SLOT_BYTES: Final = slot_size(512) + 8192


class Machine:
    """A daemon's disk and one client's slot.

    Args:
        folder: Where the root is made, two folders down: a first start makes those durable too.
        orders: What fails; not while the machine itself looks.
        mode: Every file is written as a large one in this mode; None for small ones.

    Attributes:
        promised: What was said to the outside.
        errors: What calls ended with, since it was last looked at.
        serves: Whether it was started.
        client: The id of the client whose snapshots it writes.
    """

    def __init__(self, folder: Path, orders: Orders, mode: Mode | None = None) -> None:
        self.path, self.promised = folder / "fresh" / "root", Promised()
        self.errors = list[Exception]()
        self.serves = False
        self._orders, self._mode = orders, mode
        self.client = CLIENT
        self._base: int | None = None
        self.step = self._sequence = self._snapshot = 0
        self._up = contextlib.ExitStack()

    def start(self) -> None:
        """As core/process.py begins; raises what that raises, and nothing is left open then."""
        self.stop()
        with contextlib.ExitStack() as up:
            root = Root.open(self.path, create=True)
            up.enter_context(RootLock(root))
            disk = Disk(root, Settings(policy=RetentionPolicy(keep_last=KEEP)))
            up.callback(disk.close)
            up.callback(disk.worker.stop)
            slots = root.slot_dir()
            with contextlib.suppress(OSError):
                record_root(slots, root.path)
            recovery.open_runs(disk, recovery.runs_on_disk(root))
            recovery.remove_stale_sockets(root)
            recovery.sweep(root)
            if self._mode is not None:
                object.__setattr__(disk.writing, "mode", WriteMode(self._mode))
                object.__setattr__(disk.writing, "large_from_bytes", 0)
            disk.writing.mode.find_out(root.service_dir)
            self.disk, self.run_dir, self._slots = disk, root.run_dir(RUN), slots
            self._up, self.serves = up.pop_all(), True

    def stop(self) -> None:
        self._up.close()
        if self.serves:
            with contextlib.suppress(OSError):
                remove_slot_folder(self._slots)
        self.serves = False

    def write(self, make: Any = descriptor, **changes: Any) -> Written | None:
        """One snapshot, from its slot to the disk; None when it was said not to be there."""
        self.step, self._snapshot = self.step + 1, self._snapshot + 1
        taken = make(
            self.step, snapshot=self._snapshot, client_id=self.client, base_sequence=self._base, **changes
        )
        with self._orders.looking():
            path = self._slots / f"slot-{taken.client_id}-0-{os.urandom(4).hex()}"
            slot = Slot.create(path, _SLOT_BYTES, client_id=taken.client_id, run=RUN)
            fill_slot(slot, taken, bytes(data_for(self.step)))
        try:
            return self._written(slot)
        finally:
            with self._orders.looking():
                slot.close()
                slot.path.unlink()

    def _written(self, slot: Slot) -> Written | None:
        try:
            facts = self.disk.open_run(RUN)
            self._sequence = 1 + max(self._sequence, facts.highest_sequence)
            slot.accept(self._sequence)
            done = self.disk.write(slot, self._sequence, lambda step: None)
        except (CkptdError, OSError) as error:
            self.errors.append(as_ours(error))
            key = (self.client, self._snapshot)
            self.promised.not_saved(key, self._sequence, as_ours(error), self._base)
            return None
        if not isinstance(done, Written):
            raise AssertionError(done)
        with self._orders.looking():
            self.promised.saved(self._sequence, self.run_dir / done.name, self._base)
        self._base = None
        return done

    def sum_up(self) -> None:
        """The run's index, after a commit."""
        with self._loop():
            self.disk.sum_up(RUN)

    def judge(self, written: Written | None) -> str:
        """As the verifier reads it and the disk's thread acts on it and prunes; the verdict, "" when there is none."""
        if written is not None:
            with self._loop():
                report = check(self.run_dir / written.name, uncached=True)
                if report.ok:
                    self.promised.verified.add(report.sequence or 0)
                verdict = self.disk.judge(RUN, report).verdict
                self.disk.sum_up(RUN, at_once=True)
                return verdict
        return ""

    def damage(self, written: Written | None) -> None:
        """A bit flips on the medium."""
        if written is None:
            return
        with self._orders.looking():
            file = self.run_dir / written.name / "ckpt.pt"
            data = bytearray(file.read_bytes())
            data[len(data) // 2] ^= 1
            file.write_bytes(data)
            self.promised.condemn(written.name)

    @contextlib.contextmanager
    def _loop(self) -> Iterator[None]:
        """What the loop says in its log, and lives on."""
        try:
            yield
        except (CkptdError, OSError) as error:
            self.errors.append(error)

    def rewind(self) -> None:
        """A new client takes the run over, and goes on from the checkpoint before the newest."""
        there = sorted(self.promised.acked.keys() - self.promised.abandoned - self.promised.condemned)
        self.client, self._base = f"{self.step:032x}", there[-2]
