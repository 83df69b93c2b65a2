"""What one failure must not lead to: what the sweeps of test_failing_calls found, one by one."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from ckptd.disk import durable, own_leftovers
from ckptd.disk.folder_files import open_file, open_folder
from ckptd.disk.verification import check
from ckptd.errors import SaveFailed
from ckptd.link.staging import SlotSet
from ckptd.link.wire import SlotInfo
from ckptd.snapshot.slots import Slot
from ckptd_daemon.series.catalogue import Catalogue
from ckptd_places import places
from failing_machine import Machine
from kept_promises import RUN
from nth_call import Orders

__all__ = ["places"]

CLIENT = "c1" * 16


def broken(*_args: Any, **_options: Any) -> Any:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def test_a_verdict_stands_when_retention_fails_and_that_is_owed_still(
    places: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(tmp_path, Orders.here())
    machine.start()
    written = machine.write()
    assert written is not None
    with monkeypatch.context() as patch:
        patch.setattr(Catalogue, "apply_retention", broken)
        report = check(machine.run_dir / written.name)
        assert machine.disk.judge(RUN, report).verdict == "verified"
    assert machine.disk._upkeep.begin(RUN)
    machine.stop()


def test_a_temporary_file_that_cant_be_removed_is_removed_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", broken)
        patch.setattr(os, "unlink", broken)
        with pytest.raises(OSError):
            durable.replace_file(tmp_path / "file", [b"data"])
    assert len(list(tmp_path.iterdir())) == 1
    own_leftovers.remove(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_cant_be_looked_at_leaves_no_descriptor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    folder = open_folder(tmp_path)
    before = len(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as patch:
        patch.setattr(os, "fstat", broken)
        with pytest.raises(OSError):
            open_file(folder, "file", "file")
    assert len(os.listdir("/proc/self/fd")) <= before
    os.close(folder)


def test_a_slot_that_cant_be_mapped_is_a_typed_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"slot-{CLIENT}-0-00000000"
    slot = Slot.create(tmp_path / name, 64 * 1024)
    slots = SlotSet(CLIENT, RUN)
    info = SlotInfo(name=name, bytes=slot.capacity)
    with monkeypatch.context() as patch:
        patch.setattr(Slot, "open", broken)
        with pytest.raises(SaveFailed, match="can't be mapped now"):
            slots.update(str(tmp_path), [info])
    slots.update(str(tmp_path), [info])
    assert len(slots) == 1
    slots.close()
    slot.close()
