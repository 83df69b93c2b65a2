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
