"""More connections than a daemon has descriptors for: the surplus is cut off, and its clients save on."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from ckptd.disk.rootdir import DaemonRecord, Root
from ckptd_daemon.core import connections, endpoint
from ckptd_daemon.core.connections import Connections, allow_descriptors
from daemon_parts import BareClient, DaemonProcess, Places, eventually, places_in


@pytest.fixture
def places(tmp_path: Path) -> Iterator[Places]:
    with places_in(tmp_path) as made:
        yield made


def connected(address: str) -> socket.socket:
    """Somebody who connects and says nothing."""
    one = socket.socket(socket.AF_UNIX)
    one.connect(address.removeprefix("ipc://"))
    return one


def taken_up(one: socket.socket) -> bool:
    """Whether the other side has accepted it: it greets at once, or has cut it by now."""
    one.setblocking(False)
    try:
        one.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except ConnectionResetError:
        pass
    return True


def is_cut(one: socket.socket) -> bool:
    """Whether the other side has ended it; what it greets with is read and forgotten."""
    one.setblocking(False)
    try:
        while one.recv(1024):
            pass
    except BlockingIOError:
        return False
    except ConnectionResetError:
        pass
    return True


@pytest.mark.slow
def test_six_hundred_idle_connections_take_neither_the_daemon_nor_its_descriptors(places: Places) -> None:
    daemon = DaemonProcess(places)
    idle: list[socket.socket] = []
    try:
        daemon.ready()
        record = DaemonRecord.read(Root.for_reading(places.root))
        assert record is not None
        client = BareClient(places.root)
        stream = client.attach().stream
        client.reserve(1000)
        resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE, (256, 256))
        for number in range(1, 13):
            new = [connected(record.endpoint if number % 2 else stream) for _ in range(50)]
            idle += new
            # 50 that are accepted late and the next 50 at once would be more than libzmq survives
            eventually(lambda new=new: all(map(taken_up, new)))
            eventually(lambda: len(os.listdir(f"/proc/{daemon.pid}/fd")) < 180)  # those above 128 are cut
            client.save(number, bytes([number]) * 1000)
            assert client.wait_for(number, "committed").name == f"step-{number:09d}"
        assert sum(map(is_cut, idle)) >= 600 - 180 - 50
        client.close()
    finally:
        for one in idle:
            one.close()
        daemon.kill()


def test_who_connects_while_few_descriptors_are_left_is_cut_off_and_the_others_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        watched = Connections(router)
        router.bind(f"ipc://{tmp_path}/s")
        with connected(f"{tmp_path}/s") as early:
            assert watched.news.poll(30_000)
            watched.look()
            monkeypatch.setattr(connections, "few_left", lambda: True)
            with connected(f"{tmp_path}/s") as late:
                assert watched.news.poll(30_000)
                watched.look()
                eventually(lambda: is_cut(late))
            assert not is_cut(early)
        watched.close()


def test_who_connects_and_says_nothing_is_cut_off_after_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoint, "_HANDSHAKE_MS", 50)
    bound = endpoint.Endpoint(tmp_path / "s")
    try:
        with connected(bound.address) as silent:
            eventually(lambda: is_cut(silent))
    finally:
        bound.close()


def test_few_are_left_when_the_lowest_free_descriptor_is_within_the_reserve() -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.ExitStack() as open_files:
        resource.setrlimit(resource.RLIMIT_NOFILE, (400, limits[1]))
        open_files.callback(resource.setrlimit, resource.RLIMIT_NOFILE, limits)
        assert not connections.few_left()
        while open_files.enter_context(Path(os.devnull).open("rb")).fileno() < 199:
            pass
        assert connections.few_left()


def test_a_daemon_lets_itself_have_as_many_descriptors_as_it_may() -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limits[1] - 1, limits[1]))
        allow_descriptors()
        most = min(limits[1], 65_536) if limits[1] != resource.RLIM_INFINITY else 65_536
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] >= min(most, limits[1] - 1)
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, limits[1]))
        allow_descriptors()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (most, limits[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
