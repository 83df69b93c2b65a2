# ruff: noqa: TID253
"""A DataLoader that goes on in the middle of an epoch, after the batch it had yielded.

What it yields is decided by the order, which a sampler makes at the start of an epoch or on the way, and by what the
dataset draws. So the position is: everything's memory (generators, plain attributes, state_dicts) as it was just before
the epoch, how many batches were yielded since, and everything's memory now, that of worker processes too. To go
on, the sampler is run to the position and every memory is put back; or, where fetching leaves something behind
that no memory holds, the batches before the position are fetched again. Then the next batch, and the next draw of
the training loop, are those of the uninterrupted run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

from torch.utils.data import DataLoader

from ckptd.loop import loader_position as positions
from ckptd.loop.loader_batches import Batches, refuse_old_iterator
from ckptd.loop.loader_kind import Kinds
from ckptd.loop.loader_memory import Memory, Record
from ckptd.loop.loader_order import Beginning
from ckptd.loop.loader_pass import Pass
from ckptd.loop.loader_position import Position
from ckptd.loop.loader_resume import Resume, way_to
from ckptd.loop.loader_streams import Streams
from ckptd.loop.loader_view import View
from ckptd.loop.loader_watch import Watch
from ckptd.loop.loader_way import Way, draws_apart, refuse_inexact, way_of
from ckptd.tensors.torch_support import check_torch
from ckptd.warning import HeldBack

check_torch()


class ResumableLoader:
    """Wraps any DataLoader; put it into the state and loop over it in place of the loader.

    Exact with and without workers, prefetching and persistent workers, with own generators, custom samplers
    and iterable datasets, in any epoch, as often as wanted. It counts batches *yielded*, so a prefetched batch that the
    loop hasn't seen yet isn't lost. A loop left by `break` counts as paused: a resumed run goes on with the
    rest of that epoch (in the same process a new `for` starts a new one, as with any DataLoader).

    Recorded besides the global generators of Python, NumPy and torch, in the main process and in each worker: of
    dataset, collate_fn, samplers and what they hold (transforms, wrapped datasets, closures) every
    torch.Generator, NumPy Generator or RandomState and random.Random; every plain attribute (number, text,
    None) that is no longer what it was when the loader was wrapped; what `state_dict` gives; and of samplers
    containers of plain values (lists, queues, dicts, sets, arrays, CPU tensors) that changed, up to 64 MiB. Not
    recorded: generators that are globals of a module, what was put there after wrapping, numbers of the system
    (attributes named fd, pid), and what lies in other attributes (a dataset's lists and arrays). That such a one changed is
    seen, and makes a resume fetch again or warn; not seen are changes deep in large containers, in arrays over 1 KiB
    in place, through `.data` or `.numpy()`, in iterators, `array.array`, shared memory and files.

    Going on fetches nothing again ("skip"), or loads the dataset's own state ("load"), or fetches the batches before
    the position once more ("refetch"): `resumes_by` says which and why. Refetched is with an iterable dataset
    (unless it has a `state_dict` and there are no workers), when fetching changes something in the dataset that
    isn't recorded, and with a DataLoader subclass that has its own `__iter__`. Where that is known from the outset
    and there are no workers (or that `__iter__`), the fetches draw from global generators of their own, as in a
    worker: they begin each pass where the global ones decide, and no longer move those of the training loop. A
    sampler that draws on the way draws from its own from its second step on, whatever else draws from the same
    generators. Call `set_epoch` of a DistributedSampler as always, before the loop.

    Args:
        loader: The DataLoader. Everything but iteration is passed on to it (`len`, `.dataset`, …). It isn't
            changed; iterate over the ResumableLoader only.

    Warns:
        CheckpointWarning: There are more objects (2,048) or generators (64) than are looked into.

    Raises:
        InvalidArgument: Not a DataLoader; or one that can't be resumed exactly: `in_order=False` with workers; one
            that keeps its own position (torchdata's StatefulDataLoader is taken; its own state isn't used) or
            its own iterator over epochs; persistent workers with a DataPipe or a subclass that has its own `__iter__`.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        refuse_inexact(loader)
        self._loader = loader
        self._kinds = Kinds(loader)
        self._persistent = bool(loader.num_workers and loader.persistent_workers)
        self._memory = Memory(
            {
                "dataset": loader.dataset,
                "collate_fn": loader.collate_fn,
                "generator": loader.generator,
                "batch_sampler": loader.batch_sampler,
                "sampler": loader.sampler,
            }
        )
        if self._memory.too_many:
            positions.say_not_whole(self._memory.too_many)
        self._view: View | None = None
        self._epoch = 0
        self._pass: Pass | None = None  # None: between two epochs
        self._resume: Position | None = None  # where the next iterator goes on
        self._birth: Record | None = None  # memory before persistent workers were started
        self._idle: list[Any] | None = None  # memory of persistent workers between two epochs
        self._over: dict[str, Any] | None = None  # the pass that left persistent workers as they are now
        self._unrecorded: set[str] = set()  # attributes that passes before changed
        self._left_here: set[str] = set()  # those of them that are so in this process
        self._resumed_by: Way | None = None
        self._restored = 0  # how often a position was taken over

    @property
    def epoch(self) -> int:
        """Which pass over the data is under way, from 0; between two, which one comes next."""
        return self._epoch

    @property
    def batch_in_epoch(self) -> int:
        """Batches of that pass which were yielded."""
        if self._resume is not None and self._resume["pass"] is not None:
            return int(self._resume["pass"]["batches"])
        return self._pass.batches if self._pass is not None else 0

    @property
    def resumes_by(self) -> str:
        """How a resumed run comes to the present position, and why: "skip: …", "load: …" or "refetch: …"."""
        position = self.state_dict()
        inside = position["pass"] is not None
        return str(way_to(position, self._loader, self._memory) if inside else self._way())

    @property
    def resumed_by(self) -> str:
        """The same of the last resume in this process; "" if there was none inside an epoch."""
        return str(self._resumed_by or "")

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_loader":
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __getstate__(self) -> dict[str, Any]:
        """For a copy, which is as after `break`: its next `for` is a new epoch, with workers of its own."""
        state = dict(vars(self))
        if self._pass is not None:
            state["_epoch"] += 1
            state["_unrecorded"] = self._unrecorded | self._pass.left(workers=self._persistent)
        return state | dict.fromkeys(("_view", "_pass", "_birth", "_idle", "_over"))

    def __repr__(self) -> str:
        resuming = " resuming" if self._resume is not None else ""
        by = self.resumes_by.partition(":")[0]
        return f"<ResumableLoader epoch={self._epoch} batch={self.batch_in_epoch}{resuming} resumes_by={by}>"

    def __iter__(self) -> Iterator[Any]:
        position, self._resume = self._resume, None
        if position is not None and position["pass"] is not None:
            return self._go_on(position)
        if position is not None:
            self._repeat(position)
        return self._begin()

    def _begin(self) -> Batches:
        if self._pass is not None:  # It was left by break.
            self._leave(self._pass)
            self._epoch += 1
        start, view = self._memory.all(), self._present_view()
        newborn = self._persistent and not view.born
        of = Pass(start, self._kinds.now(), newborn and self._birth is None, self._epoch)
        if of.birth:
            self._birth = start
        if draws_apart(self._loader, self._way()):
            of.streams = Streams(start, self._epoch)
        self._watch(of, view)
        beginning = Beginning(of, of.greetings)
        if newborn and not of.birth:  # The workers are born as they were then; the pass begins now.
            beginning.rewind = start
            self._memory.put(self._birth or {}, leave=start)
        batches = self._batches(of, view.begin(beginning, self._idle, opened=self._all_opened()), view)
        self._pass, self._idle, self._over = of, None, None
        if self._persistent and not of.birth:
            batches.settle()  # What its workers remember of the passes before isn't known otherwise.
        return batches

    def _all_opened(self) -> list[bool] | None:
        return [True] * self._loader.num_workers if self._idle is not None else None

    def _watch(self, of: Pass, view: View) -> None:
        if view.reports:
            of.greetings = self._loader.num_workers
            of.workers = [None] * of.greetings
            of.proofs = deque(maxlen=of.greetings)
            of.workers_at_start = [None] * of.greetings if self._persistent else None
        of.watch = Watch(self._memory, samplers_only=self._loader.num_workers > 0, opened=self._epoch > 0)

    def _go_on(self, position: Position) -> Batches:
        resume = Resume(self._loader, self._memory, position, self._batches)
        view, of, batches = resume.go()
        if self._persistent and self._birth is None:  # The run before had other workers, or none.
            self._birth, of.birth = of.start, True
        self._view, self._pass, self._resumed_by = view, of, resume.way
        return batches

    def _repeat(self, position: Position) -> None:
        """Let persistent workers do a whole pass of an iterable dataset again: only that leaves them as they were."""
        batches, epoch = self._go_on({**position, "pass": position["over"]}), self._epoch
        for _ in batches:
            pass
        self._epoch, self._resumed_by = epoch, None

    def _way(self) -> Way:
        return way_of(self._loader, too_many=self._memory.too_many)

    def _present_view(self) -> View:
        if self._view is None or not self._persistent:
            self._view = View(self._loader, self._memory, self._way())
        return self._view

    def _batches(self, of: Pass, source: Iterator[Any], view: View) -> Batches:
        def current(restored: int = self._restored) -> Pass:
            if self._restored != restored:
                refuse_old_iterator()
            # torch has one iterator over persistent workers: an older one of ours goes on with the newest pass.
            return self._pass if self._persistent and self._pass is not None and self._view is view else of

        return Batches(
            current, source, self._memory, ordered=view.order is not None,
            began=self._after_a_batch, ended=self._after_the_last,
        )  # fmt: skip

    def _after_a_batch(self, of: Pass) -> None:
        # The position is that of the pass that yielded last: a loop goes on after a look at the data within it.
        self._pass, self._epoch = of, of.epoch

    def _after_the_last(self, of: Pass) -> None:
        of.over = True
        self._leave(of)
        self._epoch, self._pass = of.epoch + 1, None
        if self._persistent:
            self._idle = of.workers
            self._over = positions.of_pass(of, self._memory) if of.kind["dataset"] == "iterable" else None

    def _leave(self, of: Pass) -> None:
        self._unrecorded |= of.left(workers=self._persistent)
        self._left_here |= of.left(workers=False)

    def state_dict(self) -> dict[str, Any]:
        """The position, as plain values. Draws from no generator."""
        if self._resume is not None:
            return dict(self._resume)
        of = self._pass
        return {
            "schema": positions.SCHEMA,
            "epoch": self._epoch,
            "kind": of.kind if of is not None else self._kinds.now(),
            "now": self._memory.own(),
            "birth": self._birth,
            "workers": self._idle,
            "pass": positions.of_pass(of, self._memory) if of is not None else None,
            "over": self._over,
            "unrecorded": sorted(self._unrecorded),
        }

    def check_state_dict(self, state: Mapping[str, Any]) -> None:
        """Whether load_state_dict would take the position; changes nothing.

        Raises:
            StateMismatch: As for load_state_dict.
        """
        positions.check(state, self._kinds, self._memory)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a position, own generators and counters at once: the next iterator goes on, one of before fails.

        Warns:
            CheckpointWarning: Another number of workers, or `persistent_workers` switched: random draws
                will be others. Other prefetching in an epoch in which something changed in a sampler. Epochs before
                changed something, named, that isn't recorded; or fetching did so in this process, where it stays.

        Raises:
            StateMismatch: It isn't a position, or one of another batch size, length, sampler or kind of dataset, or
                of other own generators. Nothing was changed.
        """
        self.check_state_dict(state)
        with HeldBack():  # a warning that is an error leaves nothing half set
            self._take(positions.current(state))

    def _take(self, position: Position) -> None:
        positions.say_other_workers(position, self._kinds.now())
        positions.say_unrecorded(position)
        if self._pass is not None:
            self._leave(self._pass)
        positions.say_left_here(self._left_here)
        stay = self._persistent and position["kind"].get("workers") == self._loader.num_workers
        inside = position["pass"] is not None
        self._memory.put(position["now"], states=not inside)
        self._restored += 1
        self._view, self._pass, self._epoch = None, None, position["epoch"]
        ofs = ("birth", "workers", "over")
        self._birth, self._idle, self._over = (position[name] if stay else None for name in ofs)
        self._unrecorded = set(position["unrecorded"]) | self._left_here
        self._resume = position if inside or self._over is not None else None
        self._resumed_by = None
