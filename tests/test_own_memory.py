"""An endless message is cut off before it has all of the machine's memory, and what had come of it is given back."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from ckptd.limits import MIB
from ckptd_daemon.core.endpoint import Endpoint
from ckptd_daemon.core.own_memory import OwnMemory, give_back, own_bytes
from daemon_parts import eventually

TRIALS = Path(__file__).parent.parent / "scripts" / "trials"


class Machine:
    """Memory and a clock of a process that nobody runs."""

    def __init__(self, freed: int) -> None:
        self.own, self.time, self.cuts, self._freed = 100, 0.0, 0, freed
        self.memory = OwnMemory(
            self.cut, most_growth_bytes=1000, own_bytes=lambda: self.own, give_back=lambda: None, now=self.now
        )

    def now(self) -> float:
        self.time += 0.3
        return self.time

    def cut(self) -> int:
        self.cuts, self.own = self.cuts + 1, self.own - self._freed
        return 1

    def look(self, own: int) -> int:
        self.own = own
        self.memory.look()
        return self.cuts


def test_connections_are_cut_each_time_that_it_grows_by_what_they_sent() -> None:
    machine = Machine(freed=2000)
    assert [machine.look(own) for own in (100, 1100, 2100, 1100, 2100)] == [0, 0, 1, 1, 2]


def test_memory_that_is_needed_for_something_else_is_allowed_from_then_on() -> None:
    machine = Machine(freed=0)
    assert [machine.look(own) for own in (100, 2000, 2900, 3100)] == [0, 1, 1, 2]


@pytest.mark.slow
def test_an_endless_message_is_cut_off_and_its_memory_given_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(TRIALS))
    import raw_peer

    endpoint, ended, cut = Endpoint(tmp_path / "socket"), threading.Event(), list[OSError]()
    give_back()
    before, memory = own_bytes(), OwnMemory(endpoint.cut_off, most_growth_bytes=64 * MIB)
    assert before > 0
    memory.look()
    parts = raw_peer.frame(bytes(60_000), more=True) * 10

    def send() -> None:
        with raw_peer.shaken(endpoint.address) as peer:
            try:
                for _ in range(1000):  # 570 MiB
                    peer.sendall(parts)
                peer.settimeout(60)  # all of it was sent before anybody looked: it waits for the cut
                while peer.recv(4096):
                    pass
                cut.append(ConnectionAbortedError())
            except OSError as error:
                cut.append(error)
        ended.set()

    sender = threading.Thread(target=send)
    sender.start()

    def given_back() -> bool:
        memory.look()
        return own_bytes() < before + 64 * MIB

    try:
        while not ended.wait(0.05):
            memory.look()
            assert not endpoint.take(lambda *_: pytest.fail("it never ends"))
        assert cut
        eventually(given_back)
    finally:
        endpoint.close()
        sender.join()
