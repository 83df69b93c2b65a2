"""What a daemon does to a root, told with marks of what it has promised when."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Final

from ckptd.disk import durable
from ckptd.disk.write_mode import WriteMode
from ckptd.disk.writing import Writing
from ckptd.names import DECISIONS_DIR, QUARANTINE_DIR, SERVICE_DIR
from ckptd.snapshot.slots import Slot, needed_bytes
from ckptd_daemon.series.policy import RetentionPolicy
from ckptd_daemon.series.settings_file import SETTINGS_FILE, Settings, settings_to_toml, write_settings
from crash_daemon import CLIENT, OTHER, RUN, Daemon, root_in
from crash_recorder import Killed, Recorder


def first_save(recorder: Recorder, folder: Path) -> None:
    with Daemon(recorder, folder) as daemon:
        daemon.save(1)


def three_saves_in_shards(recorder: Recorder, folder: Path) -> None:
    with Daemon(recorder, folder) as daemon:
        for step in (10, 20, 30):
            daemon.save(step, shards=2)


def saves_in_the_mode_of_large_files(recorder: Recorder, folder: Path) -> None:
    """As large states are written: the mode is found out, then whole pages and a cut."""
    with Daemon(recorder, folder) as daemon:
        for shards, mode in ((2, WriteMode()), (0, WriteMode("direct"))):
            daemon.save(10 + shards, shards=shards, writing=Writing(mode=mode, large_from_bytes=0))


def the_same_step_again(recorder: Recorder, folder: Path) -> None:
    with Daemon(recorder, folder) as daemon:
        daemon.save(10)
        daemon.save(10)


def retention(recorder: Recorder, folder: Path) -> None:
    with Daemon(recorder, folder) as daemon:
        for step in (10, 20, 30):
            daemon.save(step, verify=True)
        daemon.prune(1, {1, 2})
        daemon.save(40, verify=True)
        daemon.prune(1, {3})


def a_rewind(recorder: Recorder, folder: Path) -> None:
    """Steps 10, 20, 30, back to 10, save 15: the new line's head is the latest, whatever is cut off."""
    with Daemon(recorder, folder) as daemon:
        for step in (10, 20, 30):
            daemon.save(step, verify=True)
        daemon.save(15, base=1, client=OTHER, verify=True)
        daemon.prune(2, {2, 3})


def quarantine(recorder: Recorder, folder: Path) -> None:
    with Daemon(recorder, folder) as daemon:
        daemon.save(10, verify=True)
        bad = daemon.save(20)
        recorder.mark("condemned", bad.index.sequence)
        damage(bad.path / "ckpt.pt")
        assert daemon.verify(bad.name) == "corrupt"
        assert (daemon.run_dir / QUARANTINE_DIR).is_dir()
        daemon.save(30)


def damage(file: Path) -> None:
    """A bit flips on the medium; through the recorder, which has to know of it."""
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    fd = os.open(file, os.O_WRONLY)
    os.write(fd, data)
    os.fsync(fd)
    os.close(fd)


def a_lost_index(recorder: Recorder, folder: Path) -> None:
    """The run's index goes between two starts: nothing is deleted, and the next one lists all."""
    with Daemon(recorder, folder) as daemon:
        for step in (10, 20):
            daemon.save(step, verify=True)
    (root_in(folder) / RUN / "index.json").unlink()
    with Daemon(recorder, folder) as daemon:
        for name in daemon.catalogue.unverified():
            daemon.verify(name)
        daemon.save(30, verify=True)
        daemon.prune(1, {1, 2})


def killed_before(recorder: Recorder, folder: Path, ops: int) -> None:
    """A first save whose process is killed after so many operations, and one by the next process."""
    recorder.dies_at = ops
    _two_processes(recorder, folder)


def killed_with_its_first_folder(recorder: Recorder, folder: Path) -> None:
    """The next process finds folders above the root that nobody synced."""
    recorder.dies_after = "fresh"
    _two_processes(recorder, folder)


def killed_with_its_birth(recorder: Recorder, folder: Path) -> None:
    """The next process finds the run's birth, which nobody synced."""
    recorder.dies_after = "-birth-"
    _two_processes(recorder, folder)


def _two_processes(recorder: Recorder, folder: Path) -> None:
    with contextlib.suppress(Killed):
        first_save(recorder, folder)
    recorder.bury()
    first_save(recorder, folder)


def adoption(recorder: Recorder, folder: Path) -> None:
    """A daemon dies beside two sealed slots of clients that die too; the next start writes both, then goes on."""
    with Daemon(recorder, folder) as daemon:
        daemon.save(10, verify=True)
        daemon.seal(20)
        daemon.seal(30, client=OTHER)
    with Daemon(recorder, folder) as daemon:
        for name in daemon.catalogue.unverified():
            daemon.verify(name)
        daemon.prune(1, {1, 2})


def a_slot(recorder: Recorder, folder: Path) -> None:
    """As the daemon writes a snapshot: its slot is free before the acknowledgement, and can be filled again."""
    with Daemon(recorder, folder) as daemon:
        slot = daemon.slot()
        for step in (10, 20):
            daemon.write(slot, step)
        for name in daemon.catalogue.unverified():
            daemon.verify(name)
        daemon.prune(1, {1})
        slot.close()


def a_stream(recorder: Recorder, folder: Path) -> None:
    """What was streamed lies in the daemon's own memory: a kill takes it, unless it was acknowledged."""
    with Daemon(recorder, folder) as daemon:
        slot = Slot.anonymous("stream", needed_bytes(128, 8192), client_id=CLIENT, run=RUN)
        for step in (10, 20):
            daemon.write(slot, step, survives=False)
        slot.close()


def a_warm_start(recorder: Recorder, folder: Path) -> None:
    """A client that restored from elsewhere begins a line from nothing: no fall-back leads to what was before."""
    with Daemon(recorder, folder) as daemon:
        daemon.save(10, verify=True)
        daemon.save(5, client=OTHER, begins_line=True, verify=True)
        daemon.save(6, client=OTHER, verify=True)
        daemon.prune(2, {1})


def policies(recorder: Recorder, folder: Path) -> None:
    """What a user has set stays set; the file is never half there."""
    with Daemon(recorder, folder) as daemon:
        for keep in (3, 7):
            settings = Settings(policy=RetentionPolicy(keep_last=keep))
            told = (f"fresh/root/{SERVICE_DIR}/{SETTINGS_FILE}", settings_to_toml(settings))
            recorder.mark("file begun", told)
            write_settings(daemon.root.path, settings)
            recorder.mark("file", told)
        daemon.save(10)


def a_decision_of_a_later_version(recorder: Recorder, folder: Path) -> None:
    """A pin, say, that this version can't read: it stays, and nothing is removed."""
    with Daemon(recorder, folder) as daemon:
        for step in (10, 20):
            daemon.save(step, verify=True)
        path = daemon.run_dir / DECISIONS_DIR / "000000000002-pin-0123abcd.json"
        durable.replace_file(path, [b'{"kind": "pin"}'])
        recorder.mark("file", (str(path.relative_to(folder)), b'{"kind": "pin"}'))
        daemon.prune(1, set())
        daemon.save(30, verify=True)
        daemon.prune(1, set())


STORIES: Final[dict[str, Callable[[Recorder, Path], None]]] = {
    story.__name__: story
    for story in (
        first_save, three_saves_in_shards, saves_in_the_mode_of_large_files, the_same_step_again, retention,
        a_rewind, a_warm_start, quarantine, a_lost_index, policies, a_decision_of_a_later_version, a_slot, a_stream,
        adoption, killed_with_its_first_folder, killed_with_its_birth,
    )
}  # fmt: skip
