"""What the daemon is found by is put back when somebody removes it while the daemon runs."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ckptd.disk.lock import RootLock
from ckptd.disk.lock import holder as named_holder
from ckptd.disk.rootdir import DaemonRecord, Root, own_start
from ckptd.errors import NoDaemon, RootMoved
from ckptd.link.connection import connect
from ckptd_daemon.core.publication import LOOK_EVERY_S, Publication
from daemon_parts import BareClient, DaemonProcess, Places, eventually, places_in


class Socket:
    """Stands for the bound endpoint."""

    def __init__(self, path: Path) -> None:
        self.address, self.path = f"ipc://{path}", path
        self.path.touch()

    def in_place(self) -> bool:
        return self.path.exists()

    def bind(self, path: Path) -> None:
        self.__init__(path)  # type: ignore[misc]


class Desk:
    """A publication whose disk thread is the caller and whose clock is a number."""

    def __init__(self, lock: RootLock) -> None:
        self.root, self.time, self.lost = lock.root, 0.0, 0
        self.socket = Socket(self.root.new_socket_path())
        pid, started = own_start()
        record = DaemonRecord(
            endpoint=self.socket.address, pid=pid, pid_started=started, daemon_id="d", started_at=0.5,
            version="0",
        )  # fmt: skip
        self.publication = Publication(lock, record, self.socket, self.submit, self.lose, lambda: self.time)
        self.publication.publish()

    def submit(self, work: Callable[[], Any], done: Callable[[Any], None], *, urgent: bool = False) -> None:
        try:
            result = work()
        except Exception as error:
            result = error
        done(result)

    def lose(self, error: RootMoved) -> None:
        self.lost += 1

    def look(self) -> None:
        self.time += LOOK_EVERY_S
        self.publication.look()

    def published(self) -> bool:
        return DaemonRecord.read(self.root) == self.publication.record


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Desk]:
    monkeypatch.setenv("CKPTD_RUNTIME_DIR", str(tmp_path / "rt"))
    with RootLock(Root.open(tmp_path / "root", create=True)) as lock:
        yield Desk(lock)


def test_a_removed_or_foreign_record_is_published_again(desk: Desk) -> None:
    path = desk.root.service_dir / "daemon.json"
    own = path.read_bytes()
    for damage in (path.unlink, lambda: path.write_bytes(own.replace(b'"d"', b'"x"'))):
        damage()
        desk.look()
        assert desk.published()


def test_a_removed_service_folder_is_made_again_with_lock_id_and_record(desk: Desk) -> None:
    shutil.rmtree(desk.root.service_dir)
    desk.look()
    assert desk.published() and desk.root.service_dir.stat().st_mode & 0o077 == 0
    assert named_holder(desk.root) == os.getpid()
    assert Root.open(desk.root.path, create=False).id == desk.root.id


def test_nothing_is_put_where_a_link_in_place_of_the_service_folder_leads(desk: Desk, tmp_path: Path) -> None:
    desk.root.service_dir.rename(tmp_path / "before")
    (tmp_path / "elsewhere").mkdir()
    desk.root.service_dir.symlink_to(tmp_path / "elsewhere")
    desk.look()
    assert list((tmp_path / "elsewhere").iterdir()) == []
    desk.root.service_dir.unlink()
    desk.look()
    assert desk.published()


def test_an_id_that_somebody_made_while_the_real_one_was_gone_is_replaced(desk: Desk) -> None:
    (desk.root.service_dir / "root.json").unlink()
    assert Root.open(desk.root.path, create=False).id != desk.root.id
    desk.look()
    assert Root.open(desk.root.path, create=False).id == desk.root.id


def test_a_removed_socket_is_bound_again_elsewhere_and_told(desk: Desk) -> None:
    before = desk.socket.path
    before.unlink()
    desk.look()
    assert desk.socket.path.exists() and desk.socket.path != before
    assert desk.published() and desk.publication.record.endpoint == f"ipc://{desk.socket.path}"


def test_what_is_in_place_is_not_written_again(desk: Desk) -> None:
    path = desk.root.service_dir / "daemon.json"
    before = path.stat().st_ino
    desk.look()
    assert path.stat().st_ino == before


def test_nothing_is_published_again_once_it_was_withdrawn(desk: Desk) -> None:
    desk.publication.withdraw()
    desk.look()
    assert DaemonRecord.read(desk.root) is None


def test_nothing_is_written_into_another_folder_at_the_roots_path(desk: Desk) -> None:
    desk.root.path.rename(desk.root.path.with_name("moved"))
    desk.look()
    assert desk.lost == 1 and not desk.root.path.exists()
    desk.root.path.mkdir()
    desk.look()
    assert desk.lost == 2 and not list(desk.root.path.iterdir())


def test_a_problem_is_said_once_and_looked_at_again(desk: Desk, caplog: pytest.LogCaptureFixture) -> None:
    path = desk.root.service_dir / "daemon.json"
    path.unlink()
    path.mkdir()
    desk.look()
    desk.look()
    assert len([r for r in caplog.records if r.getMessage().startswith("daemon.not_published")]) == 1
    path.rmdir()
    desk.look()
    assert desk.published()


def test_who_finds_no_record_is_told_who_holds_the_lock(desk: Desk) -> None:
    desk.publication.withdraw()
    with pytest.raises(NoDaemon, match=rf"pid {os.getpid()} holds the root's lock.*kill {os.getpid()}"):
        connect(desk.root)


# --- a real daemon --------------------------------------------------------------------------------


@pytest.fixture
def places(tmp_path: Path) -> Iterator[Places]:
    with places_in(tmp_path) as made:
        yield made


@pytest.fixture
def daemon(places: Places) -> Iterator[DaemonProcess]:
    process = DaemonProcess(places).ready()
    yield process
    process.kill()


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["daemon.json", "socket", "runtime", ".ckptd"])
def test_a_daemon_whose_traces_were_removed_serves_old_and_new_clients_and_can_be_stopped(
    places: Places, daemon: DaemonProcess, victim: str
) -> None:
    old = BareClient(places.root, "old")
    old.attach()
    old.reserve(10)
    service = places.root / ".ckptd"
    match victim:
        case "socket":
            for path in places.sockets():
                path.unlink()
        case "runtime":
            folder = places.sockets()[0].parent
            shutil.rmtree(folder.rename(folder.with_name(folder.name + "-taken")))
        case ".ckptd":
            # Taken away at once: the daemon puts files back while a tree is removed one by one.
            shutil.rmtree(service.rename(service.parent.with_name("taken-away")))
        case name:
            (service / name).unlink()

    def published_again() -> bool:
        log = service / "daemon.log"
        return log.exists() and "published_again" in log.read_text()

    eventually(published_again)
    new = BareClient(places.root, "new")
    new.attach()
    new.reserve(10)
    for client in (old, new):
        client.save(1, b"a" * 10)
        client.wait_for(1, "committed")
        client.detach()
        client.close()
    command = [sys.executable, "-m", "ckptd_daemon.cli.main", "stop", "--root", str(places.root)]
    subprocess.run(command, env=os.environ | places.env, check=True, capture_output=True)
    assert daemon.wait() == 0
    assert not places.sockets()


@pytest.mark.slow
def test_a_daemon_whose_root_was_moved_leaves_and_says_so_in_the_log_there(
    places: Places, daemon: DaemonProcess
) -> None:
    moved = places.root.with_name("moved")
    places.root.rename(moved)
    assert daemon.wait() == 1
    assert "root.lost" in (moved / ".ckptd" / "daemon.log").read_text()
    assert not places.root.exists()
