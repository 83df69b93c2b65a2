"""Memory: what only the C library can be asked for."""

from __future__ import annotations

import subprocess
import sys

HEAPS = """
import ctypes, sys, threading
from ckptd.memory_calls import allocate_from_one_heap
if sys.argv[1] == "one":
    allocate_from_one_heap()
kept, wait = [], threading.Barrier(3)
def take():
    kept.append(bytearray(5_000))
    wait.wait()
threads = [threading.Thread(target=take) for _ in range(3)]
for thread in threads: thread.start()
for thread in threads: thread.join()
libc = ctypes.CDLL(None)
libc.fdopen.restype = ctypes.c_void_p
out = ctypes.c_void_p(libc.fdopen(1, b"w"))
libc.malloc_info(0, out)
libc.fflush(out)
"""


def heaps(how: str) -> int:
    done = subprocess.run([sys.executable, "-c", HEAPS, how], capture_output=True, text=True, check=True)
    return done.stdout.count("<heap nr=")


def test_threads_allocate_from_one_heap_where_a_process_asked_for_that() -> None:
    assert heaps("one") == 1
    assert heaps("many") > 1
