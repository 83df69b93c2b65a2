"""The records of a position are read from a disk: no hostile one is taken, at once, and nothing changed then."""

from __future__ import annotations

import copy
import random
import struct
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from ckptd import ResumableLoader, capture_rng_state
from ckptd.errors import StateMismatch
from keeping_samplers import Keeping
from loader_trace import SAMPLES, loader

Spoil = Callable[[dict[str, Any]], Any]


class Drawing(Keeping):
    def __init__(self) -> None:
        self.rng, self.legacy = random.Random(1), np.random.RandomState(1)
        self.numpy, self.philox = np.random.default_rng(1), np.random.Generator(np.random.Philox(1))
        self.torch, self.epoch = torch.Generator(), 0

    def __iter__(self) -> Any:
        self.epoch += 1
        return iter([int(self.legacy.randint(SAMPLES)) for _ in range(SAMPLES)])


def torchs(left: int, following: int) -> bytes:
    data = torch.Generator().get_state().numpy().tobytes()
    return data[:8] + struct.pack("<iiQ", left, 1, following) + data[24:]


#: What is done to the record.
RECORDS: dict[str, Spoil] = {
    "no dict": lambda _: 1,
    "an unknown part": lambda of: of.update(more={}),
    "no generators": lambda of: of.pop("generators"),
    "generators that are a number": lambda of: of.update(generators=1.5),
    "a state that is a number": lambda of: of["generators"].update({"sampler.rng": 1}),
    "a path that is a number": lambda of: of["generators"].update({3: of["generators"]["sampler.rng"]}),
    "a generator without a place": lambda of: of["generators"].update(
        {"sampler.none.rng": of["generators"]["sampler.rng"]}
    ),
    "the state of another kind": lambda of: of["generators"].update(
        {"sampler.rng": of["generators"]["sampler.legacy"]}
    ),
}
#: What is done to the states of generators.
STATES: dict[str, Spoil] = {
    "a place far beyond the words": lambda of: of["sampler.legacy"][2]["state"].update(pos=2_000_000_000),
    "a place before them": lambda of: of["sampler.legacy"][2]["state"].update(pos=-1),
    "no place": lambda of: of["sampler.legacy"][2]["state"].pop("pos"),
    "a place before the buffer": lambda of: of["sampler.philox"][2].update(buffer_pos=-(1 << 30)),
    "few words": lambda of: of["sampler.legacy"][2]["state"].update(key=["<u4", b"1234"]),
    "a count in place of bytes": lambda of: of["sampler.legacy"][2]["state"].update(key=["<u4", 1 << 50]),
    "words of objects": lambda of: of["sampler.legacy"][2]["state"].update(key=["|O", b"12345678" * 624]),
    "a function's name": lambda of: of["sampler.numpy"].__setitem__(1, "test"),
    "no seed of one": lambda of: of["sampler.numpy"].__setitem__(3, {"entropy": 1}),
    "a wide seed": lambda of: of["sampler.numpy"][3].update(pool_size=1 << 30),
    "bytes that were cut": lambda of: of["sampler.torch"].__setitem__(2, b"123"),
    "a place of torch's beyond the words": lambda of: of["sampler.torch"].__setitem__(2, torchs(600, 600)),
    "a count of Python's": lambda of: of["sampler.rng"].__setitem__(2, 1 << 50),
    "Python's words cut": lambda of: of["sampler.rng"].__setitem__(2, b"1234"),
    "a text that is drawn": lambda of: of["sampler.rng"].__setitem__(3, "text"),
}
#: What is done to the position.
POSITIONS: dict[str, Spoil] = {
    "an array for a schema": lambda of: of.update(schema=np.zeros(3)),
    "an array in the kind": lambda of: of["kind"].update(batch_size=np.zeros(3)),
    "an attribute that is no text": lambda of: of["unrecorded"].append(3),
    "an attribute of the pass that is no text": lambda of: of["pass"]["rebound"].append([]),
    "fewer than no steps": lambda of: of["pass"].update(steps=-1),
    "an epoch that is a truth value": lambda of: of.update(epoch=True),
    "a value that isn't plain": lambda of: of["now"]["values"].update({"sampler.epoch": [1]}),
    "no global generators": lambda of: of["pass"]["first"].pop("globals"),
    "no generator of Python": lambda of: of["pass"]["first"]["globals"].pop("python"),
    "Python's for NumPy": lambda of: of["pass"]["start"]["globals"].update(
        numpy=of["pass"]["start"]["globals"]["python"]
    ),
    "the place of the global one": lambda of: of["pass"]["first"]["globals"]["numpy"][2]["state"].update(pos=700),
    "workers that there aren't": lambda of: of["pass"].update(workers=[{}]),
    "a worker that is none": lambda of: of["pass"].update(workers_at_start=[None]),
    "a proof that is a number": lambda of: of["pass"]["proofs"].append(3),
    "a proof of no worker": lambda of: of["pass"]["proofs"][0].update(worker=1),
    "a proof of text": lambda of: of["pass"]["proofs"][0].update(print="1"),
    "a proof with a state cut": lambda of: of["pass"]["proofs"][0]["before"]["globals"]["torch"].__setitem__(2, b""),
}  # fmt: skip
IN_PASS = ("start", "first", "proofs")


def hostile() -> Any:
    for name, spoil in RECORDS.items():
        yield pytest.param("now", spoil, id=f"{name}, now")
        yield pytest.param("start", spoil, id=f"{name}, before the pass")
    for name, spoil in STATES.items():
        for where in ("now", *IN_PASS):
            yield pytest.param(where, lambda of, spoil=spoil: spoil(of["generators"]), id=f"{name}, {where}")
    for name, spoil in POSITIONS.items():
        yield pytest.param("", spoil, id=name)


def in_mid_epoch() -> tuple[ResumableLoader, dict[str, Any]]:
    running = loader(sampler=Drawing())
    next(iter(running))
    return running, copy.deepcopy(running.state_dict())


@pytest.mark.parametrize(("where", "spoil"), list(hostile()))
def test_no_hostile_record_is_taken_and_nothing_changed(where: str, spoil: Spoil) -> None:
    _, state = in_mid_epoch()
    of = {"": state, "now": state["now"], "proofs": state["pass"]["proofs"][0]["before"]}.get(
        where, state["pass"].get(where)
    )
    if spoil(of) == 1 and where:
        (state if where == "now" else state["pass"])[where] = 1
    fresh = loader(sampler=Drawing())
    before = repr((fresh.state_dict(), capture_rng_state()))
    with pytest.raises(StateMismatch):
        fresh.load_state_dict(state)
    assert repr((fresh.state_dict(), capture_rng_state())) == before


def test_a_damaged_count_of_children_takes_no_time() -> None:
    _, state = in_mid_epoch()
    for record in (state["now"], state["pass"]["start"], state["pass"]["first"]):
        record["generators"]["sampler.numpy"][3]["n_children_spawned"] = 300_000
    fresh, begun = loader(sampler=Drawing()), time.thread_time()
    fresh.load_state_dict(state)
    next(iter(fresh))
    assert time.thread_time() - begun < 2
