"""Other users of the machine: what they make first, lock first, knock at and read."""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import ckptd
from ckptd.disk.commit import commit_snapshot
from ckptd.disk.lineage import Position
from ckptd.disk.lock import RootLock
from ckptd.disk.rootdir import DaemonRecord, Root
from ckptd.disk.slot_folder import record_root, recorded_ids
from ckptd.errors import BadRoot, NoDaemon, RootLocked
from ckptd.link import route
from ckptd.link.connection import connect
from daemon_parts import BareClient, DaemonProcess, Places, descriptor_of, new_client_id, places_in
from other_user import another_user, as_another_user, only_root

pytestmark = only_root


@pytest.fixture
def public() -> Iterator[Path]:
    """A folder as /tmp is: anybody's to make something in."""
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    folder.chmod(0o1777)
    yield folder
    shutil.rmtree(folder)


def locking(path: Path) -> Callable[[], None]:
    def lock() -> None:
        fcntl.flock(os.open(path, os.O_RDONLY), fcntl.LOCK_EX | fcntl.LOCK_NB)

    return lock


@pytest.mark.parametrize("where", ["slots", "sockets"])
@pytest.mark.parametrize("what", ["open", "closed", "link"])
def test_a_folder_that_another_user_made_first_is_refused_and_nothing_is_put_into_it(
    public: Path, monkeypatch: pytest.MonkeyPatch, where: str, what: str
) -> None:
    monkeypatch.setenv("CKPTD_SHM_DIR", str(public))
    monkeypatch.setenv("CKPTD_RUNTIME_DIR", str(public / "sockets"))
    root = Root.open(public / "root", create=True)
    ours = public / "ours"
    ours.mkdir(mode=0o700)
    target = root.slot_path if where == "slots" else public / "sockets"

    def squat() -> None:
        if what == "link":
            target.symlink_to(ours)
        else:
            target.mkdir()
            target.chmod(0o777 if what == "open" else 0o700)

    assert as_another_user(squat) == "None"
    with pytest.raises(BadRoot, match="a link" if what == "link" else "owned by uid 65534"):
        root.slot_dir() if where == "slots" else root.runtime_dir()
    assert not list(target.iterdir())


def test_a_slot_folder_that_another_user_left_leads_to_no_root(
    public: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CKPTD_SHM_DIR", str(public))
    root = Root.open(public / "root", create=True)
    folder = root.slot_dir()
    record_root(folder, root.path)
    assert recorded_ids(public, root.path) == [root.id]
    os.chown(folder, 65534, 65534)
    assert recorded_ids(public, root.path) == []


def test_a_root_that_is_writable_for_all_is_still_its_owners_alone(public: Path) -> None:
    folder = public / "root"
    folder.mkdir()
    folder.chmod(0o777)

    def open_it() -> None:
        Root.open(folder, create=True)

    assert as_another_user(open_it) == "BadRoot"
    assert not list(folder.iterdir())


def test_who_may_not_write_a_root_cant_lock_its_owner_out_of_it(public: Path) -> None:
    root = Root.open(public / "root", create=True)
    root.path.chmod(0o755)
    with another_user(locking(root.path)) as answer:
        assert answer == "None"  # it has the lock
        with RootLock(root), pytest.raises(RootLocked):
            RootLock(root).acquire()
        assert as_another_user(locking(root.service_dir / "lock")) == "PermissionError"


def test_an_owner_who_holds_the_lock_keeps_the_root_from_root_too(public: Path) -> None:
    root = Root.open(public / "root", create=True)
    root.path.chmod(0o755)
    os.chown(root.path, 65534, 65534)
    with another_user(locking(root.path)) as answer:
        assert answer == "None"
        with pytest.raises(RootLocked):
            RootLock(root).acquire()


def test_another_user_may_ask_for_the_latest_where_the_files_can_be_read(public: Path) -> None:
    root = Root.open(public / "root", create=True)
    root.path.chmod(0o755)
    data = b"abc" * 100
    position = Position.alone("ab" * 16)
    made = commit_snapshot(
        root.run_dir("r"), descriptor_of(new_client_id(), 1, data, run="r"), data, position
    )
    found = as_another_user(lambda: ckptd.latest_valid(root.path, "r"))
    assert str(made.path) in found


def test_another_user_who_asks_for_the_daemon_is_told_that_he_may_not_know(public: Path) -> None:
    root = Root.open(public / "root", create=True)
    root.path.chmod(0o755)

    def knock() -> str:
        try:
            connect(root).close()
        except NoDaemon as error:
            return str(error)
        return "connected"

    assert "none is recorded" in knock()
    assert "can't be read by this user" in as_another_user(knock)


@pytest.mark.slow
def test_another_user_can_neither_connect_nor_read_nor_write_what_is_a_daemons(public: Path) -> None:
    with places_in(public) as places:
        daemon = DaemonProcess(places)
        try:
            daemon.ready()
            check_that_nothing_is_reached(places)
        finally:
            daemon.kill()


def check_that_nothing_is_reached(places: Places) -> None:
    places.root.chmod(0o755)
    record = DaemonRecord.read(Root.for_reading(places.root))
    assert record is not None
    client = BareClient(places.root)
    attached = client.attach()
    client.reserve(1000)
    for parent in (places.runtime.parent, places.shm.parent):
        assert parent.stat().st_mode & 0o005 == 0o005  # one comes as far as our own folders

    def knock(endpoint: str) -> None:
        with socket.socket(socket.AF_UNIX) as one:
            one.connect(endpoint.removeprefix("ipc://"))

    for endpoint in (record.endpoint, attached.stream):
        assert as_another_user(lambda endpoint=endpoint: knock(endpoint)) == "PermissionError"
    paths = [*places.slots(), *(places.root / ".ckptd").iterdir(), places.runtime, places.shm]
    for path in [*paths, Path(attached.slot_dir)]:
        assert as_another_user(lambda path=path: os.open(path, os.O_RDONLY)) == "PermissionError", path
    for folder in (places.runtime, Path(attached.slot_dir), places.root / ".ckptd", places.root / "default"):
        assert as_another_user(lambda folder=folder: (folder / "x").touch()) == "PermissionError", folder
    # Each by itself, should the folder around it be opened by mistake.
    assert all(path.stat().st_mode & 0o077 == 0 for path in places.slots())
    client.save(1, b"a" * 1000)
    client.wait_for(1, "committed")
    client.close()


def test_a_socket_of_another_user_is_no_way_to_a_daemon(public: Path) -> None:
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(public / "s"))
        assert route._problem(f"ipc://{public}/s") == ""
        os.chown(public / "s", 65534, 65534)
        assert route._problem(f"ipc://{public}/s") == "owned by user 65534"
