"""The kernel's OOM killer: a process is moved into a memory cgroup with nothing left, and ended where it next needs some."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

_NUMBERS: Final = itertools.count(1)
_LOOK_EVERY_S: Final = 0.01
_GONE_S: Final = 10.0
_ASKS_FOR_SOME_S: Final = 5.0
#: Where cgroups with a bound of their memory are made, and what the file with it is called: version 1, version 2.
_KINDS: Final = (
    (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes", "memory.oom_control"),
    (Path("/sys/fs/cgroup"), "memory.max", "memory.events"),
)


@contextmanager
def _cgroup(limit_bytes: int) -> Iterator[tuple[Path, Path]]:
    """A new one, and the file that counts its kills. Raises OSError where none can be made."""
    failed = FileNotFoundError("no memory cgroup can be made")
    for folder, limit, events in _KINDS:
        made = folder / f"ckptd-torture-{os.getpid()}-{next(_NUMBERS)}"
        try:
            made.mkdir()
        except OSError as error:
            failed.__cause__ = error
            continue
        try:
            if (made / limit).exists():
                (made / limit).write_text(str(limit_bytes))
                yield made, made / events
                return
        finally:
            _remove(made)
    raise failed


def _remove(made: Path) -> None:
    """Who was killed in it may still be on the way out."""
    until = time.monotonic() + _GONE_S
    while True:
        try:
            return made.rmdir()
        except OSError:
            if time.monotonic() > until:
                raise
            time.sleep(_LOOK_EVERY_S)


@functools.cache
def why_not() -> str:
    """Why none can be made here; "" when one can."""
    try:
        with _cgroup(0):
            return ""
    except OSError as error:
        return f"{error}: {error.__cause__ or error.strerror}"


def starve(pid: int, limit_bytes: int) -> bool:
    """Leave a process so much more memory and return once it is gone: whether the kernel has killed it for want of some.

    One that asks for none for some seconds is killed all the same.
    """
    with _cgroup(limit_bytes) as (made, events):
        with contextlib.suppress(ProcessLookupError):
            (made / "cgroup.procs").write_text(str(pid))
        until = time.monotonic() + _ASKS_FOR_SOME_S
        while (made / "cgroup.procs").read_text().split():
            if time.monotonic() > until:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(_LOOK_EVERY_S)
        counted = dict(line.split() for line in events.read_text().splitlines())
        return counted["oom_kill"] != "0"
