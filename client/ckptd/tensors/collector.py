"""Python's garbage collector held back while a state is walked or restored.

A walk makes some objects for each tensor and drops hardly any, which is what sets the collector off, up to a pass over
every object of the process: tens of milliseconds, and the trainer waits. Nothing a walk makes is a cycle.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_held() -> Iterator[None]:
    """No collection begins in this process meanwhile, unless one is asked for; what is due comes after.

    A collector that is off stays off.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
