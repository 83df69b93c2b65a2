"""How deep a state may be: whatever the snapshot takes loads, and one deeper is refused by a path one can read."""

from __future__ import annotations

import random
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from any_state import Data, Frozen, Pair, Way
from ckptd.errors import UnstorableState
from ckptd.limits import MAX_TREE_DEPTH
from ckptd.tensors.capture import capture
from ckptd.tensors.restoring import apply_state
from round_trip import Sharding, same, through_disk


class Holder:
    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> Any:
        return self.value

    def load_state_dict(self, state: Any) -> None:
        self.value = state


KINDS: dict[str, Callable[[Any], Any]] = {
    "list": lambda inner: [inner],
    "tuple": lambda inner: (inner,),
    "dict": lambda inner: {"a": inner},
    "odict": lambda inner: OrderedDict(a=inner),
    "deque": lambda inner: deque([inner]),
    "defaultdict": lambda inner: defaultdict(list, a=inner),
    "counter": lambda inner: Counter({"a": inner}),
    "marked": lambda inner: {"__ckptd__": inner},
    "marked odict": lambda inner: OrderedDict({"__ckptd__": inner}),
    "namedtuple": lambda inner: Pair(1, inner),
    "dataclass": lambda inner: Data(1, inner),
    "frozen": Frozen,
}
LEAVES: dict[str, Callable[[], Any]] = {
    "number": lambda: 1,
    "tensor": lambda: torch.ones(2),
    "array": lambda: np.ones(2),
    "set": lambda: {1},
    "frozenset": lambda: frozenset([1]),
    "enum": lambda: Way.OUT,
    "size": lambda: torch.Size([1]),
    "range": lambda: range(2),
    "packed": lambda: [0.5] * 70,
    "random": lambda: random.Random(1),
    "generator": lambda: torch.Generator().manual_seed(1),
    "numpy generator": lambda: np.random.default_rng(1),
    "legacy generator": lambda: np.random.Generator(np.random.MT19937(1)),
    "numpy state": lambda: np.random.RandomState(1),
}


def deepest(kind: str, leaf: str) -> tuple[Any, UnstorableState]:
    """The deepest of a kind around a leaf that is taken, and how one level more is refused."""
    value = LEAVES[leaf]()
    for _ in range(MAX_TREE_DEPTH + 1):
        more = KINDS[kind](value)
        try:
            capture({"v": more}, rng=False)
        except UnstorableState as refusal:
            return value, refusal
        value = more
    raise AssertionError("no limit")


#: Each kind around two leaves, and each leaf in three kinds.
PAIRS = sorted(
    {(kind, leaf) for kind in KINDS for leaf in ("number", "numpy generator")}
    | {(kind, leaf) for kind in ("list", "defaultdict", "namedtuple") for leaf in LEAVES}
)


@pytest.mark.parametrize(("kind", "leaf"), PAIRS)
def test_the_deepest_that_is_taken_loads_and_one_deeper_is_refused_by_its_own_path(
    kind: str, leaf: str, tmp_path: Path
) -> None:
    value, refusal = deepest(kind, leaf)
    for sharding in (Sharding(), Sharding(shards=1)):
        assert same(through_disk(tmp_path, {"v": value}, sharding, rng=False), {"v": value})
    assert "'items'" not in refusal.where
    assert refusal.where.startswith("state['v']")
    assert len(str(refusal)) < 300
    assert str(refusal).index("nested deeper than 100 levels") < 200
    assert "flat" in refusal.todo


def test_the_limit_is_one_hundred_levels_of_lists_the_state_counted() -> None:
    value: Any = 1
    for _ in range(MAX_TREE_DEPTH - 1):
        value = [value]
    capture({"v": value}, rng=False)
    with pytest.raises(UnstorableState, match="100 levels"):
        capture({"v": [value]}, rng=False)


def test_the_deepest_is_restored_too(tmp_path: Path) -> None:
    value, _ = deepest("list", "tensor")
    live, _ = deepest("list", "tensor")
    loaded = through_disk(tmp_path, {"v": value}, rng=False)
    apply_state({"v": live}, loaded)
    assert same(live, value)
