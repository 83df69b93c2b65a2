"""The iterator that a training loop holds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any, NoReturn

from ckptd.errors import InvalidArgument, StateMismatch
from ckptd.loop.loader_fingerprint import fingerprint
from ckptd.loop.loader_memory import Memory, Record
from ckptd.loop.loader_pass import Pass
from ckptd.loop.loader_proof import Proof
from ckptd.loop.loader_worker import Shipped


class Batches(Iterator[Any]):
    """One pass. It holds the workers, unless they are persistent; so leaving the loop ends them.

    Args:
        of: Says which pass what comes next belongs to: with persistent workers torch has one iterator for all.
        source: What the DataLoader's `iter()` gave.
        memory: Of the objects around the loader.
        ordered: Whether the sampler's side notes the generators before the first batch.
        began: Called with the pass when a batch of it was yielded, and
        ended: when it is over.
    """

    def __init__(
        self, of: Callable[[], Pass], source: Iterator[Any], memory: Memory, *,
        ordered: bool, began: Callable[[Pass], None], ended: Callable[[Pass], None],
    ) -> None:  # fmt: skip
        self._of, self._source, self._memory, self._ended = of, source, memory, ended
        self._ordered, self._began = ordered, began
        self._received: int | None = None

    def __next__(self) -> Any:
        of = self._of()
        self.settle()
        if of.first is None and not self._ordered:
            of.first = self._memory.draws()
        if of.watch is not None:
            of.before_fetch(self._memory)
        batch, proof = self._take(of)
        of.yielded(proof, prefetched=self._received is not None)
        self._began(of)
        if of.watch is not None:
            of.after_fetch(self._memory)
        return batch

    def _count(self) -> int | None:
        """How many batches came from workers, errors among them; None without workers."""
        count: int | None = getattr(self._source, "_rcvd_idx", None)
        return count

    def _take(self, of: Pass) -> tuple[Any, Proof]:
        self._received = self._count()
        try:
            with of.streams() if of.streams is not None else nullcontext():
                batch = next(self._source)
        except StopIteration:
            if not of.over and not (of.pending and of.kind["dataset"] == "map"):  # else workers have died
                self._ended(of)
            raise
        except Exception:
            # A batch's own error is received as a batch is; one of waiting for it (a worker died, a signal) isn't.
            if self._received is None or self._received != self._count():
                of.failed()
            raise
        if isinstance(batch, Shipped):
            before = of.workers[batch.worker] if of.workers is not None else None
            of.hear(batch)
            if batch.error is not None:
                of.failed()
                batch.error.reraise()  # type: ignore[no-untyped-call]
            return batch.batch, Proof(batch.worker, batch.print, before)
        return batch, Proof(0, fingerprint(batch), of.before)

    def settle(self) -> None:
        """Take the workers' answers to their greetings, which come before the first batch."""
        of = self._of()
        while of.greetings:
            answer = next(self._source)
            of.greetings -= 1
            of.hear(answer)

    def drop(self, steps: int, last: Record | None) -> None:
        """Fetch what was fetched before; what failed then may fail again.

        Args:
            steps: How many batches.
            last: The generators before the last of them; None if they follow from the ones before.

        Raises:
            StateMismatch: The loader ends before.
        """
        of = self._of()
        while of.steps < steps:
            before = of.steps
            if last is not None and before == steps - 1:
                self._memory.put(last)
            try:
                next(self)
            except StopIteration:
                raise StateMismatch(
                    "the loader ends before the position", where="loader", seen=f"{of.steps} batches",
                    wanted=f"{steps} or more", todo="restore with the dataset and batch size of the checkpoint",
                ) from None  # fmt: skip
            except Exception:
                if of.steps == before:  # not a batch's own fault
                    raise


def refuse_old_iterator() -> NoReturn:
    """Its batches come after those that it has given, and not after the position that was restored.

    Raises:
        InvalidArgument: Always.
    """
    raise InvalidArgument(
        "the loader was restored since this iterator was made", where="next(iter(loader))",
        wanted="an iterator that goes on from the restored position",
        todo="leave the `for` after client.restore(state), and begin a new one over the loader",
    )  # fmt: skip
