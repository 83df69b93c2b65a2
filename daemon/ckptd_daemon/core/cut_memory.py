"""A slot that its client makes shorter while the daemon has it mapped: an error of that snapshot, not the daemon's end.

Whoever touches a part of a map that its file no longer has gets SIGBUS, which ends a process. Here zeros are put in
place of what is gone and the map is marked as cut, so that nothing read from it is believed. That happens in Python,
inside the signal's handler: it comes at a plain load or store (a hash, a copy), in a thread of ours, where nothing is
half done that this could disturb. A SIGBUS at any other address still ends the process.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import signal
from collections.abc import Iterator
from typing import Final

from ckptd.limits import PAGE_ALIGNMENT
from ckptd.memory_calls import FIXED, map_at
from ckptd.snapshot.mapped_memory import holding

__all__ = ["surviving_cuts"]

_SA_SIGINFO: Final = 4
_ADDRESS_AT: Final = 16  # of si_addr in siginfo_t, where a pointer has 8 bytes

_Handler = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)


class _Action(ctypes.Structure):
    """struct sigaction of Linux's libcs."""

    _fields_ = (
        ("handler", ctypes.c_void_p), ("mask", ctypes.c_ubyte * 128), ("flags", ctypes.c_int),
        ("restorer", ctypes.c_void_p),
    )  # fmt: skip


@contextlib.contextmanager
def surviving_cuts() -> Iterator[None]:
    """Within this, a watched map whose file becomes shorter reads as zeros there. For the whole process."""
    if ctypes.sizeof(ctypes.c_void_p) != 8:
        yield  # another layout: a cut slot ends the process, as everywhere
        return
    libc, before = ctypes.CDLL(None, use_errno=True), _Action()

    def caught(_number: int, info: int, _context: int) -> None:
        address = ctypes.c_void_p.from_address(info + _ADDRESS_AT).value or 0
        if not _fill(address):
            libc.sigaction(signal.SIGBUS, ctypes.byref(_Action()), None)  # and at the same place again

    handler = _Handler(caught)  # lives as long as it may be called
    action = _Action(handler=ctypes.cast(handler, ctypes.c_void_p).value, flags=_SA_SIGINFO)
    libc.sigaction(signal.SIGBUS, ctypes.byref(action), ctypes.byref(before))
    try:
        yield
    finally:
        libc.sigaction(signal.SIGBUS, ctypes.byref(before), None)


def _fill(address: int) -> bool:
    """Put zeros from this page on to the end of the map that has it; False when none has."""
    found = holding(address)
    if found is None:
        return False
    memory, start = found
    memory.cut = True
    page = address - address % PAGE_ALIGNMENT
    how = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | FIXED
    rest = start + len(memory) - page
    return map_at(page, rest, mmap.PROT_READ | mmap.PROT_WRITE, how) is not None
