"""A state as values with hashes, and what lies beside it."""

from __future__ import annotations

import random
from collections import OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from ckptd.proof.beside import look_beside
from ckptd.proof.leaves import LeafReader, exact_number, kinds_of, plain_leaf
from ckptd.proof.trace import Leaf, show_key, show_scoped

Point = namedtuple("Point", "x y")


def read(state: dict[Any, Any]) -> dict[str, Leaf]:
    found, _ = LeafReader().read(state, rng=False)
    return {show_key(key).removeprefix("state"): leaf for key, leaf in found.items()}


def texts(value: Any) -> dict[str, str]:
    return {key.removeprefix("['v']"): leaf.text for key, leaf in read({"v": value}).items()}


def test_containers_come_with_their_type_and_length_before_what_they_hold() -> None:
    assert texts({"a": [1, 2.0], "b": ()}) == {
        "": "dict of 2", "['a']": "list of 2", "['a'][0]": "1", "['a'][1]": "2.0", "['b']": "tuple of 0",
    }  # fmt: skip
    assert texts(OrderedDict(a=None)) == {"": "OrderedDict of 1", "['a']": "None"}
    assert texts(defaultdict(list, k=[True])) == {
        "": "defaultdict of 1",
        "['k']": "list of 1",
        "['k'][0]": "True",
    }
    assert texts(deque(["x"], 3)) == {"": "deque of 1", "[0]": "'x'"}
    assert texts(Point(1, "y")) == {"": "namedtuple of 2", "[0]": "1", "[1]": "'y'"}


def test_tensors_show_dtype_and_shape_and_small_numbers_their_value() -> None:
    assert texts(torch.zeros(2, 3)) == {"": "float32[2, 3]"}
    assert texts(torch.tensor(1.5, dtype=torch.bfloat16)) == {"": "bfloat16 1.5"}
    assert texts(np.arange(3, dtype=np.int16)) == {"": "ndarray <i2[3]"}
    tied = torch.zeros(2)
    assert read({"a": tied, "b": tied})["['b']"].text == "float32[2], tied to state['a']"


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.tensor([0.0]), torch.tensor([-0.0])),
        (torch.tensor([1, 2]), torch.tensor([1, 2], dtype=torch.int32)),
        (torch.zeros(2, 3), torch.zeros(3, 2)),
        (np.zeros(3), np.zeros(3, np.float32)),
        ([0.1] * 100, [0.1] * 99 + [0.2]),
        ([1] * 20, [1] * 19 + [True]),
        ("x" * 500, "x" * 499 + "y"),
        ({1, 2}, {1, 3}),
        (1, 1.0),
        (True, 1),
        (np.float32(1), np.float64(1)),
        (torch.Generator().manual_seed(1), torch.Generator().manual_seed(2)),
        (np.random.default_rng(1), np.random.default_rng(2)),
        (random.Random(1), random.Random(2)),
        (torch.float32, torch.float64),
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_values_that_differ_in_one_bit_or_in_type_differ(one: Any, other: Any) -> None:
    a, b = read({"v": one}), read({"v": other})
    assert any(not leaf.same(b.get(key)) for key, leaf in a.items())
    again = read({"v": one})
    assert all(leaf.same(again.get(key)) for key, leaf in a.items())


def test_a_set_is_the_same_in_whatever_order_a_process_has_it() -> None:
    assert texts({"b", "a", "c"}) == {"": "set('a', 'b', 'c')"}


def test_components_are_told_by_what_they_are() -> None:
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = {
        "m": model, "o": optimizer, "s": torch.optim.lr_scheduler.StepLR(optimizer, 1),
        "g": torch.Generator(), "n": np.random.default_rng(), "d": {"x": 1},
    }  # fmt: skip
    assert list(kinds_of(state).values()) == [
        "module", "optimizer", "scheduler", "generator", "generator", "data", "rng",
    ]  # fmt: skip


def test_losses_are_exact_numbers() -> None:
    assert exact_number(torch.tensor(0.1)) == repr(torch.tensor(0.1).item())
    assert exact_number(np.float32(0.1)) == repr(float(np.float32(0.1)))
    assert exact_number(torch.tensor([3], requires_grad=False)) == "3"
    assert exact_number(float("nan")) == "nan"
    for wrong in ("1", True, None, torch.zeros(2), [1.0]):
        with pytest.raises((TypeError, ValueError, RuntimeError)):
            exact_number(wrong)


# --- beside the state -----------------------------------------------------------------------------


class Rude:
    """Attribute access runs the user's code; looking beside mustn't."""

    def __init__(self) -> None:
        self.count = 3

    @property
    def expensive(self) -> Any:
        raise AssertionError("a property was run")

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"__getattr__ was run for {name}")


def looked(state: dict[str, Any], losses: Iterator[Any]) -> dict[str, str]:
    return {show_scoped(name): leaf.text for name, leaf in look_beside(state, losses)[0].items()}


def test_looking_beside_runs_no_code_of_the_users_and_ends_where_objects_hold_each_other() -> None:
    rude, ring = Rude(), {"n": 1}
    ring["self"] = ring  # type: ignore[assignment]

    def losses() -> Iterator[Any]:
        yield rude, ring

    found = looked({}, losses())
    assert found["rude.count in losses()"] == "3" and found["ring['n'] in losses()"] == "1"


def test_looking_beside_ends_where_an_object_holds_nothing_but_itself() -> None:
    ring: list[Any] = []
    ring.append(ring)

    def losses() -> Iterator[Any]:
        yield ring

    assert looked({}, losses()) == {}


def test_a_generator_that_no_file_could_hold_ends_no_look() -> None:
    odd = random.Random(1)
    odd.note = 1  # type: ignore[attr-defined]

    def losses() -> Iterator[Any]:
        yield odd, {"n": 2}

    assert "odd in losses()" not in looked({}, losses())


def test_a_huge_object_is_looked_at_within_bounds() -> None:
    huge = [[{"k": [number]} for number in range(300)] for _ in range(300)]

    def losses() -> Iterator[Any]:
        yield huge

    assert len(look_beside({}, losses())[0]) <= 5_200


def test_an_object_of_the_state_keeps_its_name_whatever_variable_holds_it() -> None:
    model = torch.nn.Linear(1, 1)
    model.calls = 5  # type: ignore[assignment]

    def losses(net: torch.nn.Module) -> Iterator[Any]:
        yield net

    found = looked({"model": model}, losses(model))
    assert found["state['model'].calls"] == "5"
    assert "net in losses()" not in "".join(found)


def test_variables_of_a_loop_that_runs_are_named_with_their_function() -> None:
    def inner() -> Iterator[int]:
        for position in range(5):
            done = position == 4
            yield position if not done else -1

    def losses() -> Iterator[int]:
        total = 0
        for one in inner():
            total += one
            yield from inner()

    loop = losses()
    assert looked({}, loop) == {}
    next(loop)
    next(loop)
    found = looked({}, loop)
    assert (found["total in losses()"], found["position in inner()"]) == ("0", "1")


def test_bytes_that_nobody_reads_are_counted_and_told_apart_by_their_hash() -> None:
    one, other = plain_leaf(b"\0" * 2500), plain_leaf(b"\0" * 2499 + b"\1")
    assert one.text == other.text == "2500 bytes" and not one.same(other)
    assert plain_leaf(b"short") == Leaf("b'short'")
