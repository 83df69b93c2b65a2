"""A bound that ends when a daemon has said that its root is locked: however long a busy machine takes to start it."""

from __future__ import annotations

import time
from types import ModuleType, SimpleNamespace

import pytest

from ckptd.link.autostart import DaemonStart


def over_once_locked_out(monkeypatch: pytest.MonkeyPatch, module: ModuleType) -> None:
    """For `module`, which waits for a daemon, an hour passes as soon as the first that it started has left."""
    left: list[int] = []
    ended = DaemonStart._ended

    def noted(start: DaemonStart, code: int) -> None:
        ended(start, code)
        left.append(code)

    def monotonic() -> float:
        return time.monotonic() + (3600.0 if left else 0.0)

    monkeypatch.setattr(DaemonStart, "_ended", noted)
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=monotonic, sleep=time.sleep))
