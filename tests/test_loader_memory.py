"""What is found around a DataLoader, and that putting it back makes the objects go on as they did."""

from __future__ import annotations

import collections
import logging
import random
from decimal import Decimal
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from ckptd.errors import StateMismatch
from ckptd.loop.loader_attributes import MAX_HOLDERS, walk
from ckptd.loop.loader_memory import MAX_GENERATORS, Memory
from ckptd.loop.loader_rng import (
    is_generator,
    kind_of,
    new_generator,
    read_generator,
    read_globals,
    set_generator,
    set_globals,
)
from ckptd.loop.loader_watch import Watch


class Thing:
    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)


def memory(of: Any) -> Memory:
    return Memory({"dataset": of})


GENERATORS = {
    "python": lambda: random.Random(1),
    "torch": lambda: torch.Generator().manual_seed(1),
    "legacy": lambda: np.random.RandomState(1),
    **{
        name: lambda name=name: np.random.Generator(getattr(np.random, name)(1))  # type: ignore[misc]
        for name in ("PCG64", "PCG64DXSM", "MT19937", "Philox", "SFC64")
    },
}


def draw(generator: Any) -> float:
    if isinstance(generator, torch.Generator):
        return float(torch.rand((), generator=generator))
    return float(generator.random())


@pytest.mark.parametrize("kind", GENERATORS)
def test_a_generator_is_read_without_drawing_and_set_to_what_it_was(kind: str) -> None:
    generator = GENERATORS[kind]()
    draw(generator)
    state = read_generator(generator)
    assert state == read_generator(generator)
    wanted = [draw(generator) for _ in range(3)]
    set_generator(generator, state)
    assert [draw(generator) for _ in range(3)] == wanted
    made = new_generator(state)
    assert ([draw(made) for _ in range(3)], type(made)) == (wanted, type(generator))


def test_a_gauss_that_waits_to_be_drawn_is_part_of_the_state() -> None:
    for seed in (random.seed, np.random.seed):
        seed(3)
    random.gauss(0, 1), np.random.normal()
    states = read_globals()
    wanted = random.gauss(0, 1), np.random.normal()
    set_globals(states)
    assert (random.gauss(0, 1), np.random.normal()) == wanted


def test_one_without_a_state_is_no_generator() -> None:
    assert not is_generator(random.SystemRandom())
    assert kind_of(read_generator(np.random.default_rng())) == "numpy PCG64"


def test_generators_are_found_wherever_a_dataset_may_keep_them() -> None:
    rng, enclosed = [random.Random(number) for number in range(5)], random.Random(5)
    module = nn.Sequential(nn.Identity())
    module[0].rng = rng[0]
    of = Thing(
        mine=rng[1],
        listed=[rng[2], 1],
        named={"a": (rng[3],)},
        inner=Thing(deep=Thing(rng=rng[4])),
        function=lambda: enclosed.random(),
        module=module,
        again=rng[1],
    )
    found = set(memory(of).own()["generators"])
    assert {"dataset.mine", "dataset.listed[0]", "dataset.named['a'][0]", "dataset.inner.deep.rng"} <= found
    assert {"dataset.module._modules['0'].rng", "dataset.function.enclosed"} <= found
    assert "dataset.again" not in found


class Sharing(Thing):
    shared = random.Random(1)
    calls: ClassVar[list[int]] = [0]


def defaults(x: int, n: int = 2, rng: Any = random.Random(6), *, more: Any = random.Random(7)) -> float:  # noqa: B008
    return x + n + float(rng.random()) + float(more.random())


def test_generators_are_found_in_methods_defaults_deques_and_classes_too() -> None:
    of = Sharing(
        uniform=random.Random(2).uniform,
        normal=np.random.default_rng(3).normal,
        queue=collections.deque([random.Random(4)]),
        bits=np.random.PCG64(5),
        function=defaults,
    )
    wanted = {
        "dataset.Sharing.shared", "dataset.uniform.__self__", "dataset.normal.__self__", "dataset.queue[0]",
        "dataset.bits", "dataset.function.rng", "dataset.function.more",
    }  # fmt: skip
    record = memory(of).own()
    assert set(record["generators"]) == wanted

    def draws() -> list[Any]:
        own = [of.uniform(0, 1), of.normal(), of.queue[0].random(), of.bits.random_raw(), defaults(1)]
        return [*own, Sharing.shared.random()]

    drawn = draws()
    memory(of).put(record)
    assert draws() == drawn
    watch = Watch(memory(of))
    Sharing.calls.append(1)
    assert watch.look() == ["dataset.Sharing.calls"]


@pytest.mark.parametrize(
    ("of", "said"),
    [
        (Thing(of=[random.Random() for _ in range(MAX_GENERATORS + 1)]), f"{MAX_GENERATORS} generators"),
        (Thing(of=[random.Random() for _ in range(5000)]), f"{MAX_HOLDERS} objects"),
    ],
)
def test_more_generators_than_are_read_are_said(of: Any, said: str) -> None:
    assert memory(of).too_many == said
    assert len(memory(of).own()["generators"]) <= MAX_GENERATORS


def test_the_walk_keeps_out_of_what_is_no_state_and_is_bounded() -> None:
    of = Thing(
        logger=logging.getLogger("any"),
        kind=Thing,
        tensor=torch.zeros(3),
        big=[Thing() for _ in range(1000)],
        loop=None,
    )
    of.loop = of
    assert memory(of).own() == {"generators": {}, "values": {}, "contents": {}, "states": {}}
    assert not memory(of).too_many
    assert (
        memory([[Thing() for _ in range(60)] for _ in range(MAX_HOLDERS // 60 + 1)]).too_many
        == "2048 objects"
    )


@pytest.mark.slow
def test_the_walk_keeps_out_of_models_and_optimizers_that_a_dataset_leads_to() -> None:
    """Else a position would hold the training's own state a second time."""
    model = nn.Linear(2, 2)
    model.rng = random.Random(1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    of = Thing(trainer=Thing(model=model, optimizer=optimizer, loader=DataLoader([1])))
    assert memory(of).own() == {"generators": {}, "values": {}, "contents": {}, "states": {}}


def test_plain_attributes_that_changed_are_put_back_and_others_left() -> None:
    of = Thing(calls=0, ratio=0.5, name="a", path="/here", fd=None, done=False)
    mine = memory(of)
    of.calls, of.ratio, of.name, of.fd, of.done = 3, 1, "b", 7, True
    record = mine.own()
    assert record["values"] == {
        "dataset.calls": 3,
        "dataset.ratio": 1,
        "dataset.name": "b",
        "dataset.done": True,
    }
    other = Thing(calls=0, ratio=0.5, name="a", path="/there", fd=9, done=False)
    memory(other).put(record)
    assert vars(other) == {**vars(of), "path": "/there", "fd": 9}


def test_a_number_that_was_none_and_none_that_was_a_number_are_put_back() -> None:
    of = Thing(seed=None, last=3, worker_pid=None)
    mine = memory(of)
    of.seed, of.last, of.worker_pid = 7, None, 99
    record = mine.own()
    assert record["values"] == {"dataset.seed": 7, "dataset.last": None}
    other = Thing(seed=None, last=3, worker_pid=None)
    memory(other).put(record)
    assert vars(other) == {"seed": 7, "last": None, "worker_pid": None}


def test_what_is_not_recorded_goes_back_to_what_it_was_at_first() -> None:
    of = Thing(calls=0)
    mine = memory(of)
    record = mine.own()
    of.calls = 5
    mine.put(record)
    assert of.calls == 0


def test_a_generator_made_at_first_use_is_made_in_its_place() -> None:
    of = Thing(rng=random.Random(4), inner=Thing(calls=0))
    record = memory(of).own()
    other = Thing(rng=None, inner=Thing(calls=0))
    memory(other).check(record)
    memory(other).put(record)
    assert other.rng.random() == of.rng.random()


@pytest.mark.parametrize(
    "other", [Thing(), Thing(rng=np.random.default_rng()), Thing(rng=5), Thing(more=random.Random())]
)
def test_generators_that_do_not_fit_are_refused(other: Any) -> None:
    record = memory(Thing(inner=Thing(rng=random.Random(4)))).own()
    with pytest.raises(StateMismatch, match="other generators"):
        memory(other).check(record)


def test_a_state_dict_is_taken_as_it_is_now() -> None:
    class Stateful(Thing):
        def state_dict(self) -> dict[str, Any]:
            return {"seen": self.seen}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.seen = state["seen"]

    of = Stateful(seen=[1])
    mine = memory(of)
    record = mine.own()
    of.seen.append(2)
    mine.put(record)
    assert of.seen == [1]
    of.seen.append(3)
    assert record["states"] == {"dataset": {"seen": [1]}}


@pytest.mark.parametrize(
    "change",
    [
        lambda of: of.items.append(2),
        lambda of: of.names.add("b"),
        lambda of: of.table["x"].append(1),
        lambda of: setattr(of, "new", [1]),
        lambda of: delattr(of, "items"),
        lambda of: setattr(of, "other", Thing()),
    ],
)
def test_a_change_that_is_not_recorded_is_seen(change: Any) -> None:
    of = Thing(
        items=collections.deque([1]),
        names={"a"},
        table={"x": []},
        other=Thing(),
        calls=0,
        rng=random.Random(),
    )
    watch = Watch(memory(of))
    of.calls += 1
    of.rng.random()
    assert watch.look() == []
    change(of)
    assert watch.look()[0].startswith("dataset.")


def test_samplers_are_watched_and_where_the_dataset_works_elsewhere_they_alone() -> None:
    dataset, sampler = Thing(seen=[1]), Thing(order=[Decimal(1)], recorded=[1])
    of = Memory({"dataset": dataset, "sampler": sampler})
    watch, alone = Watch(of), Watch(of, samplers_only=True)
    dataset.seen.append(2), sampler.order.append(Decimal(2)), sampler.recorded.append(2)
    assert (watch.look(), alone.look()) == (["dataset.seen", "sampler.order"], ["sampler.order"])


def test_large_data_is_not_looked_through_after_each_batch() -> None:
    """Only small data is compared by value; what changes deep in large data is seen by no watch."""
    of = Thing(
        docs=[[[1] * 20 for _ in range(20)] for _ in range(20)],
        small=[[1], [2]],
    )
    assert [holder.path for holder in walk({"dataset": of})[0]] == ["", "dataset"]
    watch = Watch(memory(of))
    of.docs[3][4][5] = 2
    assert watch.look() == []
    of.small[1][0] = 3
    assert watch.look() == ["dataset.small"]
    of.docs.append([])
    assert watch.look() == ["dataset.docs", "dataset.small"]


@pytest.mark.parametrize("make", [Thing, lambda: torch.zeros(2), lambda: np.zeros(2), lambda: [0] * 1000])
def test_one_in_the_place_of_another_is_a_change_though_it_gets_its_address(make: Any) -> None:
    of = Thing(kept=make())
    for _ in range(20):
        watch = Watch(memory(of))
        of.kept = None
        of.kept = make()
        assert watch.look() == ["dataset.kept"]
