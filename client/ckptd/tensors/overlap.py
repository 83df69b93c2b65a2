"""One client's overlap: what of each snapshot is copied beside the training, and what is said of what isn't."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeAlias

from ckptd.tensors.background_copy import BackgroundCopy, CopyThread
from ckptd.tensors.capture import Captured
from ckptd.tensors.copy_threads import CopyThreads
from ckptd.tensors.deferring import deferred
from ckptd.tensors.device_copy import has_side_stream
from ckptd.tensors.state_copy import copy_beside
from ckptd.tensors.step_gate import gate

__all__ = ["Overlap"]

#: What is no more than this is copied at once: it takes no longer than to start a thread.
AT_ONCE_BYTES: Final = 1024 * 1024

#: Begins a copy into the memory it is given, and calls the other thing in another thread at its end.
Beside: TypeAlias = Callable[[memoryview, Callable[[], None]], BackgroundCopy]


class Overlap:
    """While it is open, steps of all optimizers wait for its copies."""

    def __init__(self) -> None:
        gate.enter()
        self._dropped = weakref.finalize(self, gate.leave, hooks=False)
        self._thread = CopyThread()
        self._to_say: list[str] = []
        self._said: set[str] = set()

    def beside(self, state: Mapping[Any, Any], captured: Captured, threads: CopyThreads) -> Beside | None:
        """How to copy `captured` beside the training; None when all of it must be copied at once."""
        if gate.deaf:
            self._note(f"snapshots are copied before the next step begins, from now on: {gate.deaf}")
            return None
        found = deferred(state, captured.sources)
        for name in found.unheard:
            self._note(f"what {name} trains is copied at once: its step() doesn't run torch's hooks")
        sources = captured.sources
        waiting = sum(source.nbytes for source, waits in zip(sources, found.waits, strict=True) if waits)
        if waiting <= AT_ONCE_BYTES and not any(map(has_side_stream, sources)):
            return None
        thread = self._thread
        return lambda memory, ended: copy_beside(
            captured, found, memory, thread=thread, threads=threads, ended=ended
        )

    def close(self) -> None:
        """Let steps go without it. May be called twice."""
        if self._dropped.detach() is not None:
            gate.leave()
        self._thread.close()

    def take_notes(self) -> list[str]:
        """What is to be told the user, each thing once."""
        notes, self._to_say = self._to_say, []
        return notes

    def _note(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            self._to_say.append(f"overlap=True: {text}")
