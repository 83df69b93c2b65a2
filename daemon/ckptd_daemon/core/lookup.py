"""What became of a snapshot: from memory, else from the disk."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final

from ckptd.errors import CkptdError
from ckptd_daemon.core.disk import Disk
from ckptd_daemon.core.pipeline import Pipeline
from ckptd_daemon.core.snapshots import Snapshot

Answer = Callable[[Snapshot | None], None]

#: Questions of one connection that may wait at the same time: the disk may be long in answering.
MAX_WAITING_QUESTIONS: Final = 256


class Lookup:
    """Answers come later, in the loop. None means: never heard of.

    Both kinds of question raise CkptdError when the connection that asks has too many of them waiting.
    """

    def __init__(self, disk: Disk, pipeline: Pipeline) -> None:
        self._disk, self._pipeline = disk, pipeline
        self._waiting: Counter[bytes] = Counter()

    def resolve(
        self, runs: Sequence[str], client_id: str, number: int, then: Answer, *, owner: bytes
    ) -> None:
        """Find a snapshot in the first of these runs that knows it."""
        known = [s for run in runs if (s := self._pipeline.find(run, client_id, number)) is not None]
        if known and known[0].word != "unknown":
            then(known[0])
        else:
            self._in_turn(
                list(runs), client_id, number, known[0] if known else None, self._counted(owner, then)
            )

    def ask(self, run: str, client_id: str, number: int, then: Answer, *, owner: bytes) -> None:
        """Ask the disk whether this snapshot was committed in this run, and remember it if so."""
        self._ask(run, client_id, number, self._counted(owner, then))

    def _counted(self, owner: bytes, then: Answer) -> Answer:
        if self._waiting[owner] >= MAX_WAITING_QUESTIONS:
            raise CkptdError("too many questions at once", wanted=f"at most {MAX_WAITING_QUESTIONS}")
        self._waiting[owner] += 1

        def answer(found: Snapshot | None) -> None:
            self._waiting[owner] -= 1
            if not self._waiting[owner]:
                del self._waiting[owner]
            then(found)

        return answer

    def _ask(self, run: str, client_id: str, number: int, then: Answer) -> None:
        def answer(found: tuple[str, int, bool] | Exception | None) -> None:
            if isinstance(found, tuple):
                name, sequence, verified = found
                then(self._pipeline.remember(run, client_id, number, name, sequence, verified=verified))
            else:
                then(None)

        self._disk.submit(lambda: self._disk.find(run, client_id, number), answer, urgent=True)

    def _in_turn(
        self, runs: list[str], client_id: str, number: int, known: Snapshot | None, then: Answer
    ) -> None:
        if not runs:
            then(known)
            return
        run, *others = runs
        self._ask(
            run,
            client_id,
            number,
            lambda found: (
                then(found) if found is not None else self._in_turn(others, client_id, number, known, then)
            ),
        )
