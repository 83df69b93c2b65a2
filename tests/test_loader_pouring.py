"""After skipping, what samplers keep is put back so that the running iterator goes on: in its objects or beside them."""

from __future__ import annotations

import copy
import heapq
import random
from collections import namedtuple
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from torch.utils.data import Sampler

from ckptd import ResumableLoader
from loader_trace import EPOCH, SAMPLES, Augmented, loader, plain

Loop = Callable[[ResumableLoader], None]
Entry = namedtuple("Entry", "index")


class Kept(Sampler[int]):
    def __init__(self) -> None:
        self.rng = random.Random(1)
        self.pool: list[Any] = []
        self.order = list(range(SAMPLES))

    def __len__(self) -> int:
        return SAMPLES


class Pool(Kept):
    """Objects in a list that was empty."""

    def __iter__(self) -> Iterator[int]:
        for index in self.rng.sample(range(SAMPLES), SAMPLES):
            self.pool.append(Entry(index) if index % 2 else [Entry(index)])
            if len(self.pool) == 4:
                yield self._next()
        while self.pool:
            yield self._next()

    def _next(self) -> int:
        one = self.pool.pop(0)
        return int((one[0] if isinstance(one, list) else one).index)


class Heap(Kept):
    def __iter__(self) -> Iterator[int]:
        for index in range(SAMPLES):
            heapq.heappush(self.pool, (self.rng.random(), Entry(index)))
            if len(self.pool) == 3:
                yield heapq.heappop(self.pool)[1].index
        while self.pool:
            yield heapq.heappop(self.pool)[1].index


class Streams(Kept):
    """Generators in a dict that was empty."""

    def __init__(self) -> None:
        super().__init__()
        self.streams: dict[int, random.Random] = {}

    def __iter__(self) -> Iterator[int]:
        for index in range(SAMPLES):
            self.streams.setdefault(index % 3, random.Random(index))
            yield self.streams[index % 3].randrange(SAMPLES)


class MadeLate(Kept):
    """A list of objects, an object and a generator that weren't there, and are held by its iterator too."""

    def __iter__(self) -> Iterator[int]:
        if not hasattr(self, "late"):
            self.late, self.own = [Entry(3)], Pool()
            self.second = random.Random(2)
        second = self.second
        for index in range(SAMPLES):
            self.late.append(Entry(index))
            first = self.late.pop(0).index + len(self.own.pool) + self.second.randrange(SAMPLES)
            yield (first + second.randrange(SAMPLES)) % SAMPLES


class Iterated(Kept):
    """Its iterator runs over the list that it holds."""

    def __iter__(self) -> Iterator[int]:
        return iter(self.order)


class Rebinding(Kept):
    """Another list each epoch."""

    def __iter__(self) -> Iterator[int]:
        self.order = self.rng.sample(self.order, SAMPLES)
        return iter(self.order)


class RebindingLate(Kept):
    """And another one on the way."""

    def __iter__(self) -> Iterator[int]:
        order = self.order
        for at in range(SAMPLES):
            if at % 5 == 4:
                order = self.order = self.rng.sample(self.order, SAMPLES)
            yield order[at]


def leave(_of: ResumableLoader) -> None:
    return None


def mine(of: ResumableLoader) -> None:
    """Give the sampler another list, for the epochs to come."""
    if of.batch_in_epoch == 2:
        of.sampler.order = [(3 * index + 1) % SAMPLES for index in of.sampler.order]


def mine_then_change(of: ResumableLoader) -> None:
    """Another list that is equal at first."""
    if of.batch_in_epoch == 1:
        of.sampler.order = list(of.sampler.order)
    if of.batch_in_epoch == 3:
        of.sampler.order.reverse()


def change(of: ResumableLoader) -> None:
    """What the running iterator goes over too."""
    if of.batch_in_epoch == 2:
        of.sampler.order[-3:] = [0, 0, 0]


def peek(of: ResumableLoader) -> None:
    if of.batch_in_epoch == 2:
        next(iter(of))


def run(of: ResumableLoader, loop: Loop, epochs: int = 3) -> list[Any]:
    """The batches, each with the position before the next one is fetched."""
    seen: list[Any] = []
    while of.epoch < epochs:
        for indices, *_ in of:
            at = copy.deepcopy(of.state_dict())
            loop(of)
            seen.append((plain(indices), at if loop is peek else copy.deepcopy(of.state_dict())))
    return seen


def assert_goes_on(kind: type[Kept], loop: Loop, cuts: Any, used: ResumableLoader | None = None) -> None:
    whole = run(loader(sampler=kind()), loop)
    for cut in cuts:
        end = EPOCH * (1 + cut // EPOCH)
        resumed = used or loader(sampler=kind())
        resumed.load_state_dict(whole[cut - 1][1])
        rest = [one for one, _ in run(resumed, loop, 1 + cut // EPOCH)]
        assert rest == [one for one, _ in whole[cut:end]], f"cut at {cut}"


left = pytest.mark.parametrize("kind", [Pool, Heap, Streams, MadeLate])


@left
def test_what_cannot_be_recorded_is_left_as_skipping_made_it_again(kind: type[Kept]) -> None:
    assert_goes_on(kind, leave, (1, 2, 3))


@left
@pytest.mark.filterwarnings("ignore:fetching has changed sampler")  # it may not be made again from nothing
def test_and_is_made_again_in_the_same_process(kind: type[Kept]) -> None:
    used = loader(sampler=kind())
    run(used, leave, 1)
    assert_goes_on(kind, leave, (1, 2, 3), used)


class Reading(Augmented):
    """Reads the list that its sampler shuffles."""

    def __init__(self) -> None:
        self.order, self.other = list(range(SAMPLES)), [0]

    def __getitem__(self, index: int) -> Any:
        return (self.order[index] + self.other[0]) % SAMPLES, 0


class Shuffling(Kept):
    def __init__(self, order: list[int]) -> None:
        super().__init__()
        self.order = order

    def __iter__(self) -> Iterator[int]:
        self.rng.shuffle(self.order)
        yield from range(SAMPLES)


def test_a_list_that_dataset_and_sampler_share_is_recorded_once_and_skipping_is_exact() -> None:
    def make() -> ResumableLoader:
        data = Reading()
        return loader(data, sampler=Shuffling(data.order))

    whole = run(make(), leave)
    assert whole[5][1]["unrecorded"] == []
    for cut in IN_MID_EPOCH:
        resumed = make()
        resumed.load_state_dict(whole[cut - 1][1])
        assert resumed.resumes_by.startswith("skip")
        assert [one for one, _ in run(resumed, leave)] == [one for one, _ in whole[cut:]]


@pytest.mark.parametrize("whose", ["dataset", "sampler"])
def test_a_list_that_they_share_no_more_is_watched(whose: str) -> None:
    data = Reading()
    running = loader(data, sampler=Shuffling(data.order))
    batches = iter(running)
    next(batches)
    getattr(running, whose).order = list(data.order)
    data.order.reverse()
    next(batches)
    assert running.state_dict()["pass"]["changed"] == "dataset.order"


IN_MID_EPOCH = (1, 2, 3, 5, 6, 7, 9, 10, 11)


@pytest.mark.parametrize(
    ("loop", "cuts"),
    [pytest.param(loop, (2, 6, 10) if loop is change else IN_MID_EPOCH, id=loop.__name__)
     for loop in (leave, mine, mine_then_change, change, peek)],
)  # fmt: skip
@pytest.mark.parametrize("kind", [Iterated, Rebinding, RebindingLate])
def test_a_list_that_the_loop_replaced_is_not_poured_into_the_one_that_is_gone_over(
    kind: type[Kept], loop: Loop, cuts: Any
) -> None:
    assert_goes_on(kind, loop, cuts)
