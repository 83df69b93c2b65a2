# ruff: noqa: TID253
"""Coming back to a position inside a pass: by skipping where that is exact, else by fetching again."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch.utils.data import DataLoader

from ckptd.loop.loader_ahead import as_run, differs
from ckptd.loop.loader_batches import Batches
from ckptd.loop.loader_memory import Memory, Record
from ckptd.loop.loader_order import Beginning
from ckptd.loop.loader_pass import Pass
from ckptd.loop.loader_position import Position
from ckptd.loop.loader_proof import Proof, can_be_proven, differ, proofs_of, say_other_data
from ckptd.loop.loader_streams import Streams
from ckptd.loop.loader_view import View
from ckptd.loop.loader_watch import Watch
from ckptd.loop.loader_way import Way, way_of
from ckptd.warning import warn

_log = logging.getLogger(__name__)

MakeBatches = Callable[[Pass, Iterator[Any], View], Batches]


def way_to(position: Position, loader: DataLoader[Any], memory: Memory) -> Way:
    """How to come to the position: as the loader's kind allows, and as what fetching changes demands."""
    way, changed = way_of(loader, too_many=memory.too_many), position["pass"]["changed"]
    same_workers = position["kind"].get("workers") == loader.num_workers
    if way.how == "skip" and changed and same_workers:
        return Way(
            "refetch", f"fetching changes {changed}, which is neither a generator nor a plain attribute"
        )
    return way


class Resume:
    """One resume.

    Args:
        loader: The user's DataLoader.
        memory: Of the objects around it.
        position: One inside a pass.
        batches: Makes the iterator of a pass.
    """

    def __init__(
        self, loader: DataLoader[Any], memory: Memory, position: Position, batches: MakeBatches
    ) -> None:
        self._loader, self._memory, self._make = loader, memory, batches
        self._position, self._of = position, position["pass"]
        self._same_workers = position["kind"].get("workers") == loader.num_workers
        self._persistent = bool(loader.num_workers and loader.persistent_workers)
        self.way = way_to(position, loader, memory)
        self._proofs = proofs_of(self._of.get("proofs", [])) if self._same_workers else []
        self._proven = False  # whether they were made again, while skipping

    def go(self) -> tuple[View, Pass, Batches]:
        """The pass, at the position; every generator is left as it was found.

        Raises:
            StateMismatch: The loader ends before the position.
        """
        found, stored = self._memory.all(), self._of
        try:
            view, of, batches = self._attempt()
            if self.way.how == "skip" and not self._loader.num_workers and of.check != stored["check"]:
                self.way = Way(
                    "refetch", "the sampler alone gives another order: it may go by what is fetched"
                )
                view, of, batches = self._attempt()
            if view.order is not None and of.check != stored["check"]:
                _say_other_order()
            elif self._say_unrecorded():
                pass
            elif self._is_proof() and differ(self._proofs, of.proofs):
                say_other_data()
            found = self._with_sampler(found, view)
        finally:
            # load_state_dict may have left the dataset a note for when it begins, which stays.
            values = self.way.how != "load" or bool(self._of["exhausted"])
            self._memory.put(
                found,
                states=False,
                values=values,
                leave=self._position["now"],
                rebound=stored.get("rebound", ()),
            )
        if self.way.how == "skip":
            self._put_states()
        of.batches, of.steps = self._of["batches"], self._of["steps"]
        if self.way.how != "refetch" or differ(self._proofs, of.proofs):
            of.proofs = deque(self._proofs, of.proofs.maxlen)
        _log.info("loader.resumed by=%s batches=%d why=%s", self.way.how, of.batches, self.way.why)
        return view, of, batches

    def _with_sampler(self, found: Record, view: View) -> Record:
        """The memory found, but for what of the sampler belongs to another number of batches read ahead."""
        live = {"workers": self._loader.num_workers, "prefetch": self._loader.prefetch_factor}
        apart = self._of.get("apart")  # older positions lack it
        if view.order is None or apart is None or not differs(self._position["kind"], live):
            return found
        return as_run(found, self._memory.own(), apart=apart, rebound=self._of.get("rebound", []))

    def _put_states(self) -> None:
        """state_dicts of the dataset's side; the sampler's side has just been run to where it was."""
        now = self._position["now"]
        states = {k: v for k, v in now["states"].items() if k.startswith(("dataset", "collate_fn"))}
        if states:
            stand = self._memory.draws()["generators"]
            self._memory.put({"states": states, "generators": stand}, values=False)

    def _attempt(self) -> tuple[View, Pass, Batches]:
        stored, how = self._of, self.way.how
        view = View(self._loader, self._memory, self.way)
        of = self._pass(view)
        again = self._proofs if how == "skip" and can_be_proven(self._proofs) else []
        skip = stored["steps"] - len(again) if how == "skip" else 0
        if view.reports:  # a full round, so that all are heard, and on to the worker whose turn it is
            of.greetings = self._loader.num_workers + skip % self._loader.num_workers
        beginning = Beginning(of, of.greetings, skip, stored["first"])
        born = self._position["birth"] if self._persistent and self._same_workers else None
        if born is not None and not stored["birth"]:
            beginning.rewind = stored["start"]
        if how == "load":  # its attributes are already those of the position
            self._memory.put(self._position["now"], values=stored["exhausted"])
        else:
            self._memory.put(born if born is not None else stored["start"])
        source = view.begin(
            beginning, self._memories(view, again), opened=self._opened(),
            after={proof.worker: stored["workers"][proof.worker] for proof in again} if view.reports else {},
            at_the_end=stored["exhausted"] and how == "load",
        )  # fmt: skip
        batches = self._make(of, source, view)
        self._come(view, of, batches)
        if again:
            if not self._loader.num_workers:
                self._memory.put(again[0].record())
            of.steps = skip
            batches.drop(stored["steps"], None)
            self._proven = True
        return view, of, batches

    def _come(self, view: View, of: Pass, batches: Batches) -> None:
        stored = self._of
        if not self._loader.num_workers:
            if view.order is not None and view.order.steps is not None and stored["first"] is not None:
                view.order.steps.ready()
            elif stored["first"] is not None:
                self._memory.put(stored["first"])
        if stored["steps"] or stored["workers"] is not None:
            batches.settle()
        if self.way.how == "refetch":
            batches.drop(stored["steps"], stored["last"])
            of.look()  # What is changed later than in the first batch is known before the next one.

    def _pass(self, view: View) -> Pass:
        stored = self._of
        of = Pass(
            stored["start"], self._position["kind"], stored["birth"], self._position["epoch"], stored["first"]
        )
        of.exhausted, of.loop_draws = stored["exhausted"], stored["loop_draws"]
        of.line = stored.get("line", False)  # older positions lack it
        if stored.get("streams", False):  # and this
            of.streams = Streams(stored["start"], self._position["epoch"])
        if view.reports:
            of.workers = [None] * self._loader.num_workers
            of.workers_at_start = self._at_start(of.workers)
            of.proofs = deque(maxlen=self._loader.num_workers)
        begun = bool(self._position["epoch"] or (stored["steps"] and self.way.how == "skip"))
        of.watch = Watch(self._memory, samplers_only=self._loader.num_workers > 0, opened=begun)
        return of

    def _at_start(self, unknown: list[Any]) -> list[Any] | None:
        """Not what they greet with, which is their memory at the position; unless they start anew."""
        if not self._persistent:
            return None
        known = self._of["workers_at_start"] if self._same_workers else None
        if known is None and self._same_workers and self._of["workers"] is not None:
            return None  # They weren't persistent then: they started anew.
        return list(known or unknown)

    def _memories(self, view: View, again: Sequence[Proof]) -> list[Any] | None:
        if not view.reports or not self._same_workers:
            return None
        memories: list[Any] | None = self._of["workers" if self.way.how == "skip" else "workers_at_start"]
        before = {proof.worker: proof.record() for proof in again}
        return [before.get(at, one) for at, one in enumerate(memories)] if memories is not None else None

    def _opened(self) -> list[bool] | None:
        """By worker, whether it had fetched before: what it opened then is there at its next first fetch."""
        if not self._same_workers:
            return None
        before = self._persistent and not self._of["birth"]
        since = self._of["steps"] if self.way.how == "skip" else 0
        return [before or worker < since for worker in range(self._loader.num_workers)]

    def _is_proof(self) -> bool:
        """Whether the batches before the position, made again, must be what they were.

        Fetched again in this process they draw from the training loop's generators too, unless they have their own;
        only where fetching changes the dataset is it known that the loop doesn't.
        """
        if self.way.how == "refetch":
            alone = self._loader.num_workers or self._of["changed"] or self._of.get("streams")
            return bool(alone and not self._position["unrecorded"])  # else it was said already
        return self._proven

    def _say_unrecorded(self) -> bool:
        """Fetching again doesn't bring everything back when it depends on more than this epoch's fetches."""
        said = bool(self.way.how == "refetch" and self._of["changed"] and self._of["loop_draws"])
        if said:
            warn(
                f"fetching changes {self._of['changed']}, which isn't recorded; the batches before the position "
                "were fetched again, but it may differ now if the training loop draws from the same generators between "
                "two batches; give the dataset state_dict and load_state_dict"
            )
        return said


def _say_other_order() -> None:
    warn(
        "the sampler gave other indices than before the checkpoint, so this epoch isn't the one that was "
        "interrupted: it keeps something that isn't recorded, draws from a "
        "generator out of sight, or goes by what the training loop does; give it a generator of its own, or "
        "state_dict and load_state_dict"
    )
