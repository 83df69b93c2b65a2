from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

from ckptd_daemon.core import server
from ckptd_daemon.core.server import Server


def test_whoever_keeps_the_loop_busy_with_messages_gets_a_turn_and_no_more() -> None:
    waiting, handled = [(b"c", b"one"), (b"c", b"two"), (b"c", b"three")], []

    def handle(_: bytes, data: bytes) -> None:
        handled.append(data)
        time.sleep(server._MESSAGES_A_TURN_S)

    def polled(**more: Any) -> Any:
        return SimpleNamespace(socket=object(), connections=SimpleNamespace(news=object()), **more)

    service: Any = SimpleNamespace(handle=handle, clients=SimpleNamespace(closed=False, leaving=""))
    endpoint = polled(take=lambda take: bool(waiting) and (take(*waiting.pop(0)), True)[1])
    nobody: Any = None
    loop = Server(endpoint, polled(), service, [], nobody, nobody, grace_s=0.0, idle_exit_s=None)
    loop.finish()
    assert handled == [b"one"]
    loop.finish()
    assert handled == [b"one", b"two"]


class _Poller:
    """Gives these events, one after the other, and keeps how long it was to wait for them."""

    def __init__(self, *events: list[tuple[object, int]]) -> None:
        self._events, self.waits_ms = list(events), list[float]()

    def register(self, *_: object) -> None: ...

    def poll(self, timeout_ms: float) -> list[tuple[object, int]]:
        self.waits_ms.append(timeout_ms)
        return self._events.pop(0)


def test_chores_wait_until_what_came_in_is_on_its_way_and_no_longer() -> None:
    clock, done = [10.0], list[float]()
    quiet = SimpleNamespace(socket="s", connections=SimpleNamespace(news="n"), fileno=lambda: -1, pending=0)
    service: Any = SimpleNamespace(
        clients=SimpleNamespace(sessions=()), pipeline=SimpleNamespace(retry=lambda: done.append(clock[0]))
    )
    nobody: Any = SimpleNamespace(fileno=lambda: -1, read_reports=list)
    loop = Server(
        quiet, quiet, service, [], nobody, nobody, grace_s=0.0, idle_exit_s=None, now=lambda: clock[0]
    )  # type: ignore[arg-type]
    loop._poller = poller = _Poller([("x", 1)], [], [], [("x", 1)], [("x", 1)])  # type: ignore[assignment]
    loop._turn()
    assert done == []
    loop._turn()
    assert done == [10.0]
    loop._turn()
    loop._turn()
    assert done == [10.0, 10.0]
    clock[0] += server._CHORES_AFTER_S
    loop._turn()  # somebody comes again and again
    assert done == [10.0, 10.0, clock[0]]
    assert [round(wait) for wait in poller.waits_ms] == [1000, 2, 1000, 1000, 2]
