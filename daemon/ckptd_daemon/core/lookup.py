"""What became of a snapshot: from memory, else from the disk."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ckptd_daemon.core.disk import Disk
from ckptd_daemon.core.pipeline import Pipeline
from ckptd_daemon.core.snapshots import Snapshot

Answer = Callable[[Snapshot | None], None]


class Lookup:
    """Answers come later, in the loop. None means: never heard of."""

    def __init__(self, disk: Disk, pipeline: Pipeline) -> None:
        self._disk, self._pipeline = disk, pipeline

    def resolve(self, runs: Sequence[str], client_id: str, number: int, then: Answer) -> None:
        """Find a snapshot in the first of these runs that knows it."""
        known = [s for run in runs if (s := self._pipeline.find(run, client_id, number)) is not None]
        if known and known[0].word != "unknown":
            then(known[0])
        else:
            self._in_turn(list(runs), client_id, number, known[0] if known else None, then)

    def ask(self, run: str, client_id: str, number: int, then: Answer) -> None:
        """Ask the disk whether this snapshot was committed in this run, and remember it if so."""

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
        self.ask(
            run,
            client_id,
            number,
            lambda found: (
                then(found) if found is not None else self._in_turn(others, client_id, number, known, then)
            ),
        )
