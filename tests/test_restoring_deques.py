"""A live deque is restored as a list is: it stays, and what it holds is restored in place, position by position."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckptd
from ckptd.errors import StateMismatch
from ckptd.tensors.restoring import apply_state
from round_trip import same, through_disk


class Meter:
    def __init__(self, total: float) -> None:
        self.total = total

    def state_dict(self) -> Any:
        return {"total": self.total}

    def load_state_dict(self, state: Any) -> None:
        self.total = state["total"]


@ckptd.register_type
@dataclass(frozen=True)
class Entry:
    at: int
    values: Any


def made(value: float) -> dict[str, Any]:
    kept = torch.full((3,), value)
    window: deque[Any] = deque([kept, [kept[1:]], (Meter(value), 7)], maxlen=3)
    return {"kept": kept, "window": window, "again": {"window": window}, "meter": window[2][0]}


def test_tensors_and_objects_in_a_deque_are_restored_in_place_and_stay_tied(tmp_path: Path) -> None:
    live = made(1.0)
    kept, window = live["kept"], live["window"]
    nested, view, meter = window[1], window[1][0], live["meter"]
    apply_state(live, through_disk(tmp_path, made(5.0)))
    assert live["kept"] is kept is window[0] and live["window"] is window is live["again"]["window"]
    assert window[1] is nested and nested[0] is view and window[2][0] is meter is live["meter"]
    assert window.maxlen == 3 and meter.total == 5.0
    kept.add_(1)
    assert same(window[0], torch.full((3,), 6.0)) and same(view, torch.full((2,), 6.0))


def test_a_module_and_its_optimizer_in_a_deque_go_on(tmp_path: Path) -> None:
    def members(seed: int) -> Any:
        torch.manual_seed(seed)
        model = nn.Linear(2, 1)
        optimizer = torch.optim.Adam(model.parameters())
        model(torch.rand(4, 2)).sum().backward()
        optimizer.step()
        return deque([model, optimizer, torch.Generator().manual_seed(seed), random.Random(seed)])

    stored, live = members(1), members(2)
    before = list(live)
    apply_state({"d": live}, through_disk(tmp_path, {"d": stored}))
    assert all(now is then for now, then in zip(live, before, strict=True))
    assert same(live[0].state_dict(), stored[0].state_dict())
    assert same(live[1].state_dict(), stored[1].state_dict())
    assert torch.rand(1, generator=live[2]) == torch.rand(1, generator=stored[2])
    assert live[3].random() == stored[3].random()


@pytest.mark.parametrize("length", [0, 1, 3, 100])
def test_a_deque_of_another_length_comes_to_the_stored_one(length: int, tmp_path: Path) -> None:
    stored = deque(map(float, range(length)), maxlen=100)
    for live in (deque(maxlen=100), deque([9.0, 8.0], maxlen=100), deque([9.0] * 99, maxlen=100)):
        state = {"d": live}
        apply_state(state, through_disk(tmp_path, {"d": stored}))
        assert state["d"] is live and same(live, stored)
        live.append(1.0)
        assert live.maxlen == 100


def test_a_longer_deque_of_tensors_takes_the_stored_ones_for_those_it_lacks(tmp_path: Path) -> None:
    live = deque([first := torch.zeros(2)])
    apply_state({"d": live}, through_disk(tmp_path, {"d": deque([torch.ones(2), torch.ones(3)])}))
    assert live[0] is first and same(list(live), [torch.ones(2), torch.ones(3)])


def test_what_a_shorter_stored_deque_lacks_is_gone_unless_there_are_objects_in_it(tmp_path: Path) -> None:
    live = deque([first := torch.zeros(2), torch.zeros(2)])
    apply_state({"d": live}, through_disk(tmp_path, {"d": deque([torch.ones(2)])}))
    assert len(live) == 1 and live[0] is first and same(first, torch.ones(2))
    meters = deque([Meter(1.0), Meter(2.0)])
    loaded = through_disk(tmp_path, {"d": deque([Meter(3.0)])})
    with pytest.raises(StateMismatch, match=r"state\['d'\]\[1\] is not in the checkpoint"):
        apply_state({"d": meters}, loaded)
    assert [meter.total for meter in meters] == [1.0, 2.0]
    report = apply_state({"d": meters}, loaded, strict=False)
    assert report.missing == ["state['d'][1]"]
    assert [meter.total for meter in meters] == [3.0, 2.0]


def test_another_maxlen_is_the_stored_one_and_the_items_are_in_place_still(tmp_path: Path) -> None:
    first = torch.zeros(2)
    state: dict[str, Any] = {"d": deque([first], maxlen=5), "first": first}
    apply_state(state, through_disk(tmp_path, {"d": deque([tied := torch.ones(2)], maxlen=2), "first": tied}))
    assert state["d"].maxlen == 2
    assert state["d"][0] is first is state["first"] and same(first, torch.ones(2))


@pytest.mark.parametrize("stored", [[torch.ones(2)], {0: torch.ones(2)}, (torch.ones(2),)])
def test_what_was_no_deque_is_refused(stored: Any, tmp_path: Path) -> None:
    live = deque([torch.zeros(2)])
    with pytest.raises(StateMismatch, match=r"state\['d'\]"):
        apply_state({"d": live}, through_disk(tmp_path, {"d": stored}))
    assert same(live[0], torch.zeros(2))


def test_a_deque_in_a_tuple_or_a_frozen_dataclass_keeps_its_tensors(tmp_path: Path) -> None:
    one, other = torch.zeros(2), torch.zeros(2)
    state: dict[str, Any] = {"a": (deque([one]), 1), "b": Entry(1, deque([other]))}
    pair = state["a"]
    apply_state(
        state, through_disk(tmp_path, {"a": (deque([one + 1]), 2), "b": Entry(2, deque([other + 2]))})
    )
    assert state["a"] is not pair and state["a"][0] is pair[0] and state["a"][1] == 2
    assert pair[0][0] is one and same(one, torch.ones(2))
    assert state["b"].at == 2 and state["b"].values[0] is other
    assert same(other, torch.full((2,), 2.0))
