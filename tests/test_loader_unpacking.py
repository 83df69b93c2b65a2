"""What samplers keep is read from a disk: nothing hostile is taken, and nothing changed then."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest

import keeping_samplers as samplers
from ckptd.errors import StateMismatch
from loader_trace import SAMPLES, loader

HOSTILE: dict[str, Any] = {
    "no list": "in",
    "an unknown word": ["set", [1]],
    "too short": ["in"],
    "too long": ["gone", 1],
    "a number of a tuple": ["in", (1, 2)],
    "an unknown kind": ["in", ["eval", "1"]],
    "no kind": ["in", []],
    "a kind that is a list": ["in", [["list"], "each", []]],
    "bytes not a multiple": ["in", ["list", "int", "<i8", b"1234567"]],
    "a dtype of objects": ["in", ["ndarray", "|O", [1], b"12345678"]],
    "a structured dtype": ["in", ["ndarray", "i4,i4", [1], b"12345678"]],
    "a list of numbers in another dtype": ["in", ["list", "int", "<f8", b"12345678"]],
    "a negative shape": ["in", ["ndarray", "<i8", [-1], b"12345678"]],
    "two negative lengths": ["in", ["tensor", "int64", [-1, -1], b"12345678"]],
    "a shape of others": ["in", ["ndarray", "<i8", [2], b"12345678"]],
    "a huge shape": ["in", ["tensor", "int64", [1 << 62, 4], b""]],
    "a shape of floats": ["in", ["ndarray", "<i8", [1.0], b"12345678"]],
    "a shape of text": ["in", ["tensor", "int64", ["a", 1 << 60], b"12345678"]],
    "an unknown tensor": ["in", ["tensor", "quint8", [1], b"1"]],
    "a tensor's bytes not a multiple": ["in", ["tensor", "int64", [1], b"1"]],
    "a tensor of text": ["in", ["tensor", "int64", [1], "12345678"]],
    "a typecode of objects": ["in", ["array", "O", b"12345678"]],
    "an array's bytes not a multiple": ["in", ["array", "d", b"1"]],
    "a bytearray of a size": ["in", ["bytearray", 1 << 40]],
    "lengths that don't add up": ["in", ["list", "nested", "list", b"\x02\0\0\0", ["each", [1]]]],
    "texts that don't add up": ["in", ["list", "text", b"\xff\xff\xff\xff", b"a"]],
    "no text": ["in", ["list", "text", b"\x01\0\0\0", b"\xff"]],
    "members that are equal": ["in", ["set", "each", [1, 1]]],
    "members that have no hash": ["in", ["set", "each", [["list", "each", []]]]],
    "more than a deque takes": ["in", ["deque", 1, "each", [1, 2]]],
    "a deque of text": ["in", ["deque", "1", "each", []]],
    "keys without values": ["in", ["mapping", "dict", None, ["each", [1]], ["each", []]]],
    "an unknown mapping": ["in", ["mapping", "UserDict", None, ["each", []], ["each", []]]],
    "an unknown factory": ["in", ["mapping", "defaultdict", "exec", ["each", []], ["each", []]]],
    "too deep": ["in", functools.reduce(lambda inner, _: ["list", "each", [inner]], range(30), 1)],
}


def test_no_hostile_entry_is_taken_and_nothing_changed() -> None:
    of = loader(sampler=samplers.ShuffledList())
    list(of)
    state = of.state_dict()
    for name, entry in HOSTILE.items():
        for where in ("now", "start"):
            made = loader(sampler=samplers.ShuffledList())
            hostile = copy.deepcopy(state)
            if where == "start":
                next(iter(of))
                hostile = copy.deepcopy(of.state_dict())
            (hostile["now"] if where == "now" else hostile["pass"]["start"])["contents"]["sampler.order"] = (
                entry
            )
            with pytest.raises(StateMismatch):
                made.load_state_dict(hostile)
            assert made.sampler.order == list(range(SAMPLES)), name


@pytest.mark.parametrize(
    "path",
    ["sampler.__class__", "sampler.__iter__", "sampler.none.x", "dataset.seen", "sampler.learn", "", 3],
)
def test_an_entry_that_has_no_place_is_refused(path: Any) -> None:
    of = loader(sampler=samplers.Weighted())
    state = of.state_dict()
    state["now"]["contents"][path] = ["other", 1]
    with pytest.raises(StateMismatch, match=r"has no place|no dict of names"):
        of.load_state_dict(state)
    state["now"]["contents"] = [1]
    with pytest.raises(StateMismatch, match="no dict"):
        of.load_state_dict(state)
