"""Pipes in the place of files: whoever opens one waits for its other end, unless it says that it won't."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from pathlib import Path

from ckptd.errors import CkptdError


def waits_for_the_pipe(pipe: Path, ask: Callable[[], object]) -> bool:
    """Whether `ask`, which may refuse the pipe, waits for it; then it is let go on."""

    def asked() -> None:
        with contextlib.suppress(CkptdError):
            ask()

    asking = threading.Thread(target=asked)
    asking.start()
    asking.join(30.0)
    waits = asking.is_alive()
    os.close(os.open(pipe, os.O_RDWR))
    asking.join()
    return waits
