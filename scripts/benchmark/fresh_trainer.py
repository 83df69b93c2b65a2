"""A trainer of its own process: its first snapshot after reserve(), warm ones, and the memory that both sides take.

Run as a script with ROOT RUN MIB SLOTS; prints one JSON object. As a module it runs such processes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, Final

FIRST, MEMORY = "first snapshot", "memory"

_WARM: Final = 3
_WATCHED: Final = 3
_LOOK_EVERY_S: Final = 0.05
_PATIENCE_S: Final = 300.0


def measure(course: Any, settings: Any, work: Path, _root: Path) -> None:
    """Fresh processes, with two slots and with one in turn; a daemon for each: its memory is measured too."""
    from rounds import say

    for number in range(settings.trainers):
        for slots in settings.slots:
            say(f"fresh trainers: {number + 1} of {settings.trainers}, {slots} slots")
            argv = [work / f"fresh-{number}-{slots}", settings.mib, slots]
            call = [sys.executable, __file__, *map(str, argv)]
            done = subprocess.run(call, stdout=subprocess.PIPE, text=True, check=True, timeout=_PATIENCE_S)
            told = json.loads(done.stdout)
            course.samples.add(FIRST, f"slots={slots}", told["first"])
            course.samples.add(MEMORY, f"slots={slots}", told["memory"])
    course.about[FIRST] = {"slots=2": "the first snapshot of a process against the median of its next three"}
    course.about[MEMORY] = {
        "slots=2": "PSS of trainer, daemon and verifier, its highest during saves, minus before"
    }


# --- in the fresh process --------------------------------------------------------------------------


def main() -> None:
    """See the module."""
    import ours
    from state import trained

    import ckptd

    root, saved, slots = Path(sys.argv[1]), trained(int(sys.argv[2])), int(sys.argv[3])
    before = pss_bytes([os.getpid()])
    with ours.daemon(root):
        pids = [os.getpid(), *_tree(ours.daemon_pid(root))]
        with ckptd.Client(root=root, run="r", daemon="attach", slots=slots) as client:
            client.reserve(saved.live)
            times = [_snapshot(client, saved, step) for step in range(1, 2 + _WARM)]
            with Watch(pids) as watch:
                for step in range(2 + _WARM, 2 + _WARM + _WATCHED):
                    _snapshot(client, saved, step)
    first = {"first": times[0], "warm": sorted(times[1:])[_WARM // 2]}
    memory = {
        "extra": watch.highest - before,
        "state": saved.nbytes,
        "trainer": watch.parts[0],
        "daemon": watch.parts[1],
    }
    sys.stdout.write(json.dumps({"first": first, "memory": memory | {"before": before}}) + "\n")


def _snapshot(client: Any, saved: Any, step: int) -> float:
    saved.change()
    began = time.perf_counter()
    ticket = client.snapshot(step, saved.live)
    stalled = time.perf_counter() - began
    ticket.wait("verified", timeout_s=_PATIENCE_S)
    return stalled


class Watch:
    """Looks at the PSS of some processes until its end.

    Attributes:
        highest: Their highest sum, in bytes.
        parts: Of the first process and of the others, at that moment.
    """

    def __init__(self, pids: list[int]) -> None:
        self._pids, self._end = pids, threading.Event()
        self.highest, self.parts = 0, (0, 0)
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def _run(self) -> None:
        while True:
            last = self._end.wait(_LOOK_EVERY_S)
            own, others = pss_bytes(self._pids[:1]), pss_bytes(self._pids[1:])
            if own + others > self.highest:
                self.highest, self.parts = own + others, (own, others)
            if last:
                return


def pss_bytes(pids: list[int]) -> int:
    """Proportional set size: memory that two processes share counts half for each."""
    total = 0
    for pid in pids:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text("ascii").splitlines():
            if line.startswith("Pss:"):
                total += int(line.split()[1]) * 1024
    return total


def _tree(pid: int) -> list[int]:
    """A process and all its descendants."""
    below = [
        int(child)
        for task in Path(f"/proc/{pid}/task").iterdir()
        for child in (task / "children").read_text("ascii").split()
    ]
    return [pid, *(one for child in below for one in _tree(child))]


if __name__ == "__main__":
    main()
