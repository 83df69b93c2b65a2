"""A sampler that keeps its order, a queue or weights in containers goes on exactly, in a new process and in the same one."""

from __future__ import annotations

import collections
import copy
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler

import ckptd
import keeping_samplers as samplers
from ckptd import ResumableLoader
from ckptd.errors import CheckpointWarning
from ckptd.loop import loader_contents, loader_kept, loader_pouring
from ckptd.loop.loader_memory import Memory
from ckptd.loop.loader_watch import Watch
from loader_trace import BATCH, EPOCH, SAMPLES, Augmented, loader, plain, position

slow = pytest.mark.slow
EPOCHS = 3
Make = Any


def run(of: ResumableLoader, epochs: int = EPOCHS, cuts: list[Any] | None = None) -> list[Any]:
    """The batches' indices; a position after each, and between two epochs, if wanted."""
    seen = []
    while of.epoch < epochs:
        for indices, *_ in of:
            seen.append(plain(indices))
            if hasattr(of.sampler, "learn"):
                of.sampler.learn(seen[-1])
            if cuts is not None:
                cuts.append((len(seen), position(of)[0]))
        if cuts is not None:
            cuts.append((len(seen), position(of)[0]))
    return seen


def whole(make: Make) -> tuple[list[Any], list[tuple[int, Any]]]:
    running = make()
    cuts = [(0, position(running)[0])]
    return run(running, cuts=cuts), cuts


def remembers(state: Any) -> Any:
    """What of a position the samplers' containers decide."""
    inside = state["pass"]
    return (
        state["now"],
        inside and inside["start"]["contents"],
        inside and inside["check"],
        state["unrecorded"],
    )


def assert_goes_on(make: Make, resumed: ResumableLoader, seen: list[Any], cuts: Any, at: int) -> None:
    done, state = cuts[at]
    resumed.load_state_dict(copy.deepcopy(state))
    assert remembers(resumed.state_dict()) == remembers(state)
    stood: list[Any] = []
    assert run(resumed, cuts=stood) == seen[done:], f"cut at {at}"
    for (_, one), (_, other) in zip(stood, cuts[at + 1 :] if state["epoch"] < EPOCHS else [], strict=False):
        assert remembers(one) == remembers(other)


kinds = pytest.mark.parametrize("kind", samplers.KEEPING)


@kinds
def test_it_goes_on_at_every_batch_of_three_epochs_and_between_them(kind: Any) -> None:
    def make() -> ResumableLoader:
        return loader(sampler=kind())

    seen, cuts = whole(make)
    assert len(cuts) == EPOCHS * (EPOCH + 1) + 1
    for at in range(len(cuts)):
        assert_goes_on(make, make(), seen, cuts, at)


@kinds
def test_it_goes_back_and_forth_in_the_same_process(kind: Any) -> None:
    def make() -> ResumableLoader:
        return loader(sampler=kind())

    seen, cuts = whole(make)
    used = make()
    for at in (7, 0, 9, 3, 4, 12, 5, 1, 0):
        assert_goes_on(make, used, seen, cuts, at)


@kinds
def test_it_goes_on_after_two_interruptions(kind: Any) -> None:
    def make() -> ResumableLoader:
        return loader(sampler=kind())

    seen, cuts = whole(make)
    for first, second in ((2, 3), (3, 7), (5, 8), (10, 12)):
        once, again = make(), make()
        once.load_state_dict(cuts[first][1])
        stood: list[Any] = []
        run(once, cuts=stood)
        stood = [(cuts[first][0] + done, state) for done, state in stood]
        assert_goes_on(make, again, seen, [*cuts[: first + 1], *stood], second)


@slow
@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize(
    "kind", [samplers.IteratedList, samplers.Queue, samplers.Buckets, samplers.Permutation]
)
def test_a_sampler_ahead_of_workers_goes_on(kind: Any, persistent: bool) -> None:
    def make() -> ResumableLoader:
        return loader(sampler=kind(), num_workers=2, persistent_workers=persistent)

    seen, cuts = whole(make)
    for at in (1, 2, 4, 5, 7, 9):
        assert_goes_on(make, make(), seen, cuts, at)


def test_a_batch_sampler_with_lists_and_one_that_is_a_list_go_on() -> None:
    class Batches(BatchSampler):
        def __init__(self) -> None:
            super().__init__(samplers.Rotated(), BATCH, False)
            self.given: list[list[int]] = []

        def __iter__(self) -> Any:
            for batch in super().__iter__():
                self.given.append(batch)
                yield list(self.given[len(self.given) // 2])

    def make() -> ResumableLoader:
        return loader(batch=1, batch_sampler=Batches())

    seen, cuts = whole(make)
    for at in range(len(cuts)):
        assert_goes_on(make, make(), seen, cuts, at)


@pytest.mark.parametrize("small", [0, 1 << 20])
def test_a_list_given_as_sampler_and_torchs_own_go_on_as_the_training_loop_changed_them(
    small: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader_kept, "_SMALL", small)

    def first() -> Any:
        return [
            list(range(SAMPLES)),
            SubsetRandomSampler(list(range(SAMPLES))),
            WeightedRandomSampler([1.0] * SAMPLES, 9),
        ]

    for number in range(3):
        given = first()[number]
        of, new = loader(sampler=given), loader(sampler=first()[number])
        assert of.state_dict()["now"]["contents"] == {}
        if number == 2:
            given.weights[2:] = 0
        else:
            (given if number == 0 else given.indices).reverse()
        state = of.state_dict()
        new.load_state_dict(state)
        assert new.state_dict()["now"]["contents"] == state["now"]["contents"] != {}
        assert number != 0 or new.sampler == given
        new.load_state_dict(loader(sampler=first()[number]).state_dict())
        assert new.state_dict()["now"]["contents"] == {}


def test_through_a_file_it_goes_on(tmp_path: Path) -> None:
    def make() -> ResumableLoader:
        return loader(sampler=samplers.Buckets())

    seen, cuts = whole(make)
    for at in (2, 5, 8):
        resumed, done = make(), cuts[at][0]
        stopped = make()
        stopped.load_state_dict(cuts[at][1])
        ckptd.save(tmp_path / f"{at}", {"loader": stopped}, step=at)
        resumed.load_state_dict(ckptd.load(tmp_path / f"{at}")["loader"])
        assert run(resumed) == seen[done:]


class Thing:
    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)


def memory(of: Any) -> Memory:
    return Memory({"dataset": [], "sampler": of})


def test_what_was_not_changed_is_not_recorded_and_left_to_the_script() -> None:
    of = Thing(order=[1, 2], table={"a": torch.ones(2)}, epoch=0)
    assert memory(of).own()["contents"] == {}
    of.order.append(3)
    other = Thing(order=[1, 2, 3], table={"a": torch.zeros(2)}, epoch=0)
    memory(other).put(memory(of).own())
    assert other.table["a"].tolist() == [0, 0]


def test_containers_are_filled_in_place_so_that_others_who_hold_them_see_it() -> None:
    def make() -> Thing:
        return Thing(
            order=[1, 2], inner={"a": [1], "b": [2]}, ring=collections.deque([1, 2], 4), left={1, 2},
            array=np.arange(3), tensor=torch.arange(3), raw=bytearray(b"ab"), nested=([1], [2]),
        )  # fmt: skip

    def change(of: Thing) -> None:
        of.order.append(3), of.inner["b"].append(5), of.ring.append(7), of.left.add(9), of.raw.append(3)
        of.array[1] = 8
        of.tensor[1] = 8
        of.nested[1].append(4)

    of, other = make(), make()
    record, live = memory(of), memory(other)
    first, held = record.own(), dict(vars(other), b=other.inner["b"], one=other.nested[1])
    change(of)
    live.put(record.own())
    assert repr(vars(other)) == repr(vars(of))
    assert all(held[name] is value for name, value in vars(other).items())
    assert (held["b"], held["one"]) == ([2, 5], [2, 4])
    live.put(first)
    assert repr(vars(other)) == repr(vars(make()))
    assert all(held[name] is value for name, value in vars(other).items())


def test_one_list_in_two_places_does_not_take_two_values() -> None:
    shared = [0]
    of, other = Thing(a=[0], b=[0]), Thing(a=shared, b=shared)
    record, live = memory(of), memory(other)
    of.a.append(1), of.b.append(2)
    live.put(record.own())
    assert (other.a, other.b) == ([0, 1], [0, 2])


def shrunk() -> set[int]:
    """One whose order is that of the table which it had when it was larger."""
    left = set(range(44))
    for index in range(44):
        if index not in (33, 40):
            left.discard(index)
    assert list(left) != list(set(list(left)))  # noqa: C414
    return left


def test_a_set_comes_back_in_its_order() -> None:
    of, other = Thing(left=set()), Thing(left=set())
    record, live = memory(of), memory(other)
    of.left = shrunk()
    live.put(record.own())
    assert list(other.left) == list(of.left)
    assert record.own()["contents"] == live.own()["contents"]


def test_a_set_that_comes_back_in_another_order_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader_pouring, "arrange", lambda live, order: live.update(sorted(order)))
    of, other = Thing(left=set()), Thing(left=set())
    record, live = memory(of), memory(other)
    of.left |= shrunk()
    of.left = shrunk()
    entry = record.own()["contents"]["sampler.left"]
    with pytest.warns(CheckpointWarning, match=r"sampler\.left .* another order"):
        live.put({"contents": {"sampler.left": ["in", entry[1]]}})


def test_what_cannot_be_recorded_stays_as_it_is_and_is_said() -> None:
    of = Thing(things=[object()], long=[1])
    live = memory(of)
    before = of.things
    of.things.append(object())
    of.long = [0] * (5 << 20)
    record = live.own()
    assert record["contents"] == {"sampler.things": ["unknown"], "sampler.long": ["unknown"]}
    live.put(record)
    assert of.things is before and len(of.long) == 5 << 20


def test_what_a_new_loader_has_no_place_for_is_watched_and_refuses_nothing() -> None:
    of, new = (Thing(parts={"rng": random.Random(1)}) for _ in range(2))
    live = memory(of)
    watch = Watch(live)
    of.parts["seen"] = [1]
    record = live.own()
    memory(new).check_contents(record)
    assert watch.look() == ["sampler.parts", "sampler.parts['seen']"]


def test_what_is_too_large_to_be_kept_twice_cannot_go_back_in_one_process_and_is_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(loader_contents, "_MAX_AT_FIRST", 8)
    of, other = Thing(order=list(range(100))), Thing(order=list(range(100)))
    live, new = memory(of), memory(other)
    first = live.own()
    of.order.reverse()
    new.put(live.own())  # In a new process it is kept before it is changed.
    new.put(first)
    assert other.order == list(range(100))
    with pytest.warns(CheckpointWarning, match=r"sampler\.order of the loader is too large to go back"):
        live.put(first)


def test_a_long_list_is_compared_by_its_copy_and_packed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    of = Thing(order=list(range(100_000)), nested=[list(range(9)) for _ in range(9000)])
    live = memory(of)
    of.order.reverse(), of.nested[7].reverse()
    first = live.own()["contents"]
    monkeypatch.setattr(loader_kept, "check_of", None)
    assert live.own()["contents"] == first
    monkeypatch.undo()
    of.order[50_000], of.nested[8][3] = -1, 77
    again = live.own()["contents"]
    assert all(again[path] != first[path] for path in ("sampler.order", "sampler.nested"))


def test_large_ones_of_torchs_samplers_are_not_packed_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader_kept, "check_of", None)
    for sampler in (
        SubsetRandomSampler(list(range(200_000))), WeightedRandomSampler(torch.ones(200_000), 4), RandomSampler(range(9)),
    ):  # fmt: skip
        of = loader([0] * 200_000, sampler=sampler)
        next(iter(of))
        assert of.state_dict()["now"]["contents"] == {}


def test_weights_of_torchs_sampler_go_back_in_the_same_process() -> None:
    given = WeightedRandomSampler([1.0] * SAMPLES, SAMPLES)
    of = loader(sampler=given)
    batches = iter(of)
    next(batches)
    state, weights = copy.deepcopy(of.state_dict()), given.weights
    given.weights[3], given.weights[4] = 50, 0
    of.load_state_dict(state)
    assert given.weights is weights and weights.tolist() == [1.0] * SAMPLES


def test_an_equal_value_of_another_kind_or_sign_is_recorded() -> None:
    def make() -> Thing:
        return Thing(
            scale=1, zero=0.0, both=complex(1, 0.0), long=[1] * 5000, lists=[[1, 0.0] for _ in range(5000)]
        )

    of, new = make(), make()
    live = memory(of)
    of.long[0], of.lists[0][0] = 2, 2
    live.own()
    of.scale, of.zero, of.both = True, -0.0, complex(1, -0.0)
    of.long[3], of.lists[4][1] = True, -0.0
    memory(new).put(live.own())
    assert repr(vars(new)) == repr(vars(of))


def test_a_generator_made_at_its_first_use_is_there_no_more_after_going_back_to_before() -> None:
    class Late(samplers.Keeping):
        def __init__(self) -> None:
            self.none = None

        def __iter__(self) -> Any:
            if self.none is None:
                self.none, self.new = random.Random(1), random.Random(2)
            return iter([self.none.randrange(4) + self.new.randrange(4) for _ in range(SAMPLES)])

    of = loader(sampler=Late())
    start = copy.deepcopy(of.state_dict())
    seen = run(of)
    of.load_state_dict(start)
    assert of.sampler.none is None and not hasattr(of.sampler, "new")
    assert run(of) == seen


def test_what_fetching_left_in_the_process_is_said_at_a_rollback() -> None:
    class Counting(Augmented):
        def __init__(self) -> None:
            self.seen: list[int] = []

        def __getitem__(self, index: Any) -> Any:
            self.seen.append(1)
            return index, len(self.seen)

    of = loader(Counting())
    start = copy.deepcopy(of.state_dict())
    of.load_state_dict(start)  # nothing yet
    list(of)
    with pytest.warns(CheckpointWarning, match=r"fetching has changed dataset\.seen in this process"):
        of.load_state_dict(start)


def test_a_position_reads_what_samplers_keep_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A million indices that were shuffled take a twentieth of a second, in the training loop."""
    running = loader(Augmented(), sampler=samplers.ShuffledList())
    batches = iter(running)
    for _ in range(2):
        next(batches)
    reads: list[None] = []
    read = loader_contents.Contents.read

    def counted(contents: loader_contents.Contents) -> dict[str, Any]:
        reads.append(None)
        return read(contents)

    monkeypatch.setattr(loader_contents.Contents, "read", counted)
    assert running.state_dict()["now"]["contents"]
    assert len(reads) == 1
