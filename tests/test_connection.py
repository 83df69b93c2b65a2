"""The connection to a daemon: replies find their requests, and no wait is without a bound."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckptd.disk.rootdir import DaemonRecord, Root
from ckptd.errors import NoDaemon, ProtocolError, RunTaken, TimedOut
from ckptd.link import connection as connection_module
from ckptd.link import wire
from ckptd.link.connection import Connection, connect
from ckptd_places import places
from fake_daemon import FakeDaemon, wait_until

__all__ = ["places"]

CLIENT = "c1" * 16


@pytest.fixture
def root(places: Path) -> Root:
    return Root.open(places, create=True)


@pytest.fixture
def fake(root: Root) -> Iterator[FakeDaemon]:
    with FakeDaemon(root) as fake:
        yield fake


@pytest.fixture
def connection(root: Root, fake: FakeDaemon) -> Iterator[Connection]:
    connection = connect(root, timeout_s=60)
    yield connection
    connection.close()


def notice(snapshot: int) -> wire.Notice:
    return wire.Notice(
        id=0, client_id=CLIENT, snapshot=snapshot, step=7, state="committed", name="step-000000007"
    )


def test_a_request_gets_its_own_reply_and_what_came_before_it_is_kept_for_poll(
    connection: Connection, fake: FakeDaemon
) -> None:
    connection.ask(wire.Status(id=0), wire.StatusReply, 60)
    fake.say(notice(1))
    fake.say(notice(2))
    assert connection.ask(wire.Status(id=0), wire.StatusReply, 60).data["schema"] == "ckpt.v2-status"
    assert [one.snapshot for one in connection.poll(60) if isinstance(one, wire.Notice)] == [1, 2]
    assert connection.poll(0) == []


def test_poll_returns_as_soon_as_something_comes(connection: Connection, fake: FakeDaemon) -> None:
    connection.ask(wire.Status(id=0), wire.StatusReply, 60)
    fake.say(notice(1))
    began = time.monotonic()
    assert len(connection.poll(90)) == 1
    assert time.monotonic() - began < 60


def test_a_refusal_is_raised_as_the_error_it_names(connection: Connection, fake: FakeDaemon) -> None:
    fake.refuse = RunTaken("the run already has a live client", seen="pid 4711")
    with pytest.raises(RunTaken, match="4711"):
        connection.request(wire.Reserve(id=0, client_id=CLIENT, slot_bytes=8192, slots=1), 60)


def test_a_reply_that_comes_too_late_is_not_taken_for_the_next_one(
    connection: Connection, fake: FakeDaemon
) -> None:
    fake.deaf_to = {"Status"}
    with pytest.raises(TimedOut):
        connection.request(wire.Status(id=0), 0.1)
    wait_until(lambda: bool(fake.named(wire.Status)))
    number = fake.named(wire.Status)[0].id
    fake.say(wire.StatusReply(id=number, data={"late": True}))
    fake.deaf_to = set()
    assert connection.ask(wire.Status(id=0), wire.StatusReply, 60).data == {"schema": "ckpt.v2-status"}


def test_a_reply_of_the_wrong_kind_is_a_protocol_error(connection: Connection) -> None:
    with pytest.raises(ProtocolError, match="Done"):
        connection.ask(wire.Detach(id=0, client_id=CLIENT), wire.StatusReply, 60)


def test_garbage_is_a_protocol_error_to_who_waits_and_nothing_to_who_does_not(
    connection: Connection, fake: FakeDaemon
) -> None:
    connection.ask(wire.Status(id=0), wire.StatusReply, 60)
    fake.say(b"\xc1garbage")
    fake.say(notice(3))
    assert [type(one) for one in connection.poll(60)] in ([wire.Notice], [])  # the two may come apart
    fake.deaf_to = {"Status"}
    fake.say(b"")
    with pytest.raises(ProtocolError):
        connection.request(wire.Status(id=0), 60)


def test_no_daemon_says_how_to_start_one(root: Root) -> None:
    with pytest.raises(NoDaemon, match="ckptd start --root"):
        connect(root, timeout_s=60)


def test_a_daemon_that_dies_under_a_request_is_noticed_long_before_the_bound(
    connection: Connection, fake: FakeDaemon
) -> None:
    fake.silent = True
    fake.die()
    began = time.monotonic()
    with pytest.raises(NoDaemon, match="gone"):
        connection.request(wire.Status(id=0), 90)
    assert time.monotonic() - began < 60


def test_a_dead_daemons_last_words_are_heard_before_its_death(
    connection: Connection, fake: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    connection.ask(wire.Status(id=0), wire.StatusReply, 60)

    def dies() -> bool:
        fake.say(notice(1))  # just before: the look at the socket came too early for it
        wait_until(lambda: bool(connection._socket.poll(0)))
        fake.die()
        return False

    with monkeypatch.context() as patched:
        patched.setattr(connection, "alive", dies)
        assert len(connection.poll(60)) == 1
    with pytest.raises(NoDaemon):
        connection.poll(60)


def test_a_connection_that_a_living_daemon_has_ended_is_lost_after_a_while_and_another_one_serves(
    root: Root, connection: Connection, fake: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    connection.ask(wire.Status(id=0), wire.StatusReply, 60)
    monkeypatch.setattr(connection_module, "_CUT_FOR_S", 0.3)
    for fd in map(int, os.listdir("/proc/self/fd")):  # the fake is of this process: what it has accepted
        with contextlib.suppress(OSError):  # the listing's own is closed
            if not stat.S_ISSOCK(os.fstat(fd).st_mode):
                continue
            with socket.socket(fileno=os.dup(fd)) as one:
                named = str(one.getsockname()) == fake.record.endpoint.removeprefix("ipc://")
                if named and not one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    one.shutdown(socket.SHUT_RDWR)
    with pytest.raises(NoDaemon, match="ended the connection"):
        connection.poll(60)
    assert not connection.alive() and fake.record.alive()
    again = connect(root, timeout_s=60)
    again.ask(wire.Status(id=0), wire.StatusReply, 60)
    again.close()


def test_a_stopped_daemon_costs_the_bound_and_the_error_says_that_it_is_stopped(
    connection: Connection, fake: FakeDaemon
) -> None:
    fake.stop()
    began = time.monotonic()
    with pytest.raises(TimedOut, match=r"stopped.*kill -CONT"):
        connection.request(wire.Status(id=0), 0.3)
    assert 0.3 <= time.monotonic() - began < 30


def test_an_endpoint_that_is_a_regular_file_is_refused_and_left_alone(root: Root, tmp_path: Path) -> None:
    path = tmp_path / "not-a.sock"
    path.write_text("precious")
    with FakeDaemon(root) as fake:
        record = fake.record
        DaemonRecord(
            endpoint=f"ipc://{path}", pid=record.pid, pid_started=record.pid_started,
            daemon_id=record.daemon_id, started_at=0.0, version="", log="",
        ).write(root)  # fmt: skip
        with pytest.raises(NoDaemon, match="not a socket"):
            connect(root, timeout_s=1)
    assert path.read_text() == "precious"


def test_a_socket_that_vanished_is_no_daemon(root: Root, fake: FakeDaemon) -> None:
    Path(fake.record.endpoint.removeprefix("ipc://")).unlink()
    with pytest.raises(NoDaemon, match="No such file"):
        connect(root, timeout_s=1)


def test_a_closed_connection_can_be_closed_again(connection: Connection, fake: FakeDaemon) -> None:
    connection.close()
    connection.close()
    assert "closed" in repr(connection)
