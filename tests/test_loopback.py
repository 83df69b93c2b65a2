"""Serving by TCP on this machine: who has the keys gets in, and nobody else."""

from __future__ import annotations

import dataclasses
import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import zmq

import ckptd
from ckptd.disk import daemon_record
from ckptd.disk.rootdir import DaemonRecord, Root
from ckptd.errors import InvalidArgument, NoDaemon
from ckptd.link import wire
from ckptd.link.connection import Connection
from ckptd.link.route import Route, find_route, stream_route
from ckptd_daemon.core.loopback import Keys, check_listen
from ckptd_places import places
from daemon_parts import DaemonProcess, Places, places_in
from live_daemon import ckptd as command

__all__ = ["places"]


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Places]:
    with places_in(tmp_path) as made:
        yield made


@pytest.mark.parametrize(
    ("asked", "bound"),
    [("tcp://127.0.0.1:0", "tcp://127.0.0.1:*"), ("tcp://127.1.2.3:4711", "tcp://127.1.2.3:4711")],
)
def test_this_machines_loopback_is_allowed(asked: str, bound: str) -> None:
    assert check_listen(asked) == bound


@pytest.mark.parametrize(
    "address",
    [
        "tcp://0.0.0.0:0", "tcp://192.168.1.7:4711", "tcp://localhost:0", "tcp://127.0.0.1", "tcp://127.0.0.1:99999",
        "tcp://127.0.0.1:*", "tcp://127.0.0.1:1;tcp://0.0.0.0:2", "ipc:///tmp/x", "tcp://*:0", "tcp://[::1]:0", "",
        "tcp://127.0.0.1.2:1", "tcp://127.0.0.999:1", "tcp://10.0.0.1;127.0.0.1:1",
    ],
)  # fmt: skip
def test_any_other_address_is_refused_with_the_reason(address: str) -> None:
    with pytest.raises(InvalidArgument, match="loopback"):
        check_listen(address)


def test_the_command_line_refuses_before_anything_is_made(tmp_path: Path) -> None:
    done = command("start", "--root", tmp_path / "root", "--listen", "tcp://0.0.0.0:0")
    assert done.returncode == 2
    assert "loopback" in done.stderr
    assert not (tmp_path / "root").exists()


@pytest.mark.slow
def test_a_client_that_sees_no_socket_saves_by_tcp_and_nobody_without_the_keys_gets_an_answer(
    here: Places, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon = DaemonProcess(here, "--listen", "tcp://127.0.0.1:0")
    try:
        daemon.ready()
        root = Root.for_reading(here.root)
        record = DaemonRecord.read(root)
        assert record is not None and record.tcp.startswith("tcp://127.0.0.1:")
        assert stat.S_IMODE((here.root / ".ckptd").stat().st_mode) == 0o700
        unseen = dataclasses.replace(record, endpoint="ipc:///not/here.sock")
        monkeypatch.setattr(daemon_record.DaemonRecord, "read", classmethod(lambda cls, root: unseen))
        state = {"weights": torch.randint(0, 255, (9_000_000,), dtype=torch.uint8)}
        with ckptd.Client(here.root, daemon="attach", transport="stream") as client:
            client.snapshot(1, state).wait(timeout_s=60)
            said = json.dumps(client.status())
            assert said.count("stream-") and record.tcp_client_secret not in said
        assert torch.equal(ckptd.load(here.root / "default" / "step-000000001")["weights"], state["weights"])
        strangers = Keys.make()
        for wrong in (
            Route(record.tcp, record.tcp_server_key, strangers.client_secret),
            Route(record.tcp, strangers.server, record.tcp_client_secret),
        ):
            assert not _is_answered(root, record, wrong)
        assert _is_answered(root, record, find_route(root, unseen), 60.0)
        assert not _answers_plainly(record.tcp)
        assert (
            record.tcp_client_secret not in repr(record) + (here.root / ".ckptd" / "daemon.log").read_text()
        )
    finally:
        daemon.kill()


def _is_answered(root: Root, record: DaemonRecord, route: Route, patience_s: float = 0.5) -> bool:
    connection = Connection(root, record, route)
    try:
        connection.wait_ready(patience_s)
        connection.ask(wire.Status(id=0), wire.StatusReply, 60.0)
    except TimeoutError:
        return False
    finally:
        connection.close()
    return True


def _answers_plainly(endpoint: str) -> bool:
    """To a socket without CurveZMQ."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(endpoint)
        socket.send(wire.encode(wire.Status(id=1)))
        return bool(socket.poll(500))


def test_a_service_folder_that_others_can_enter_is_refused_where_keys_would_lie_in_it(here: Places) -> None:
    (here.root / ".ckptd").mkdir(parents=True)
    os.chmod(here.root / ".ckptd", 0o755)
    daemon = DaemonProcess(here, "--listen", "tcp://127.0.0.1:0")
    assert daemon.wait() == 2
    assert "0755" in daemon.output()
    daemon.kill()
    assert DaemonRecord.read(Root.for_reading(here.root)) is None


def test_keys_and_addresses_of_a_damaged_record_are_never_followed_elsewhere(tmp_path: Path) -> None:
    root = Root.open(tmp_path / "root", create=True)
    keys = Keys.make()
    record = DaemonRecord(
        endpoint="ipc:///gone.sock", pid=1, pid_started=1, daemon_id="d", started_at=0.0, version="0",
        tcp="tcp://127.0.0.1:4711", tcp_server_key=keys.server, tcp_client_secret=keys.client_secret,
    )  # fmt: skip
    assert find_route(root, record).is_tcp
    for address in ("tcp://10.0.0.1:4711", "", "tcp://127.0.0.1:1;tcp://10.0.0.1:2", "ipc:///tmp/x"):
        with pytest.raises(NoDaemon, match=r"gone\.sock"):
            find_route(root, dataclasses.replace(record, tcp=address))
    attached = wire.Attached(
        id=1, daemon_id="d", run_id="r", slot_dir="/", slots=[], pending=0, stream_tcp="tcp://10.0.0.1:1"
    )
    with pytest.raises(NoDaemon, match="streams"):
        stream_route(find_route(root, record), attached)
    with pytest.raises(NoDaemon, match="keys"):
        Connection(root, record, Route(record.tcp, "short", keys.client_secret))


def test_a_record_with_tcp_reads_back_as_written_and_one_without_is_as_before(tmp_path: Path) -> None:
    root = Root.open(tmp_path / "root", create=True)
    plain = DaemonRecord(
        endpoint="ipc:///x", pid=1, pid_started=1, daemon_id="d", started_at=0.0, version="0"
    )
    plain.write(root)
    assert "tcp" not in json.loads((root.service_dir / "daemon.json").read_text())
    assert DaemonRecord.read(root) == plain
    keys = Keys.make()
    record = dataclasses.replace(
        plain, tcp="tcp://127.0.0.1:4711", tcp_server_key=keys.server, tcp_client_secret=keys.client_secret
    )
    record.write(root)
    assert DaemonRecord.read(root) == record
