"""A fingerprint tells batches apart by their content, reads little, and calls nothing of the user's."""

from __future__ import annotations

import collections
import gc
import random
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from ckptd.loop.loader_fingerprint import fingerprint


class Bag:
    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)


class Slotted:
    __slots__ = ("missing", "x")

    def __init__(self, x: Any) -> None:
        self.x = x


def _big(last: float) -> torch.Tensor:
    values = torch.arange(4 * 3 * 64 * 64, dtype=torch.float32).reshape(4, 3, 64, 64)
    values[-1] += last
    return values


MAKE: dict[str, Callable[[int], Any]] = {
    "int": lambda x: x,
    "big int": lambda x: (1 << 20000) + x,
    "float": lambda x: float(x),
    "text": lambda x: f"{x}\udc80",
    "bytes": lambda x: bytes([x]),
    "list": lambda x: [1, x],
    "many": lambda x: [x] * 100,
    "very many": lambda x: [x] * 10000,
    "mixed": lambda x: [*range(50), "a", x],
    "tuple in a dict": lambda x: {"a": (1, {2: x})},
    "deque": lambda x: collections.deque([x]),
    "object": lambda x: Bag(data={"_x": [x]}),
    "mapping": lambda x: collections.UserDict(a=x),
    "slots": lambda x: Slotted([x]),
    "NumPy number": lambda x: np.float32(x),
    "array": lambda x: np.full((3, 4), x),
    "texts": lambda x: np.array(["a", str(x)]),
    "dates": lambda x: np.array([x], dtype="M8[D]"),
    "objects": lambda x: np.array([[x], "a", None], dtype=object),
    "sizes": lambda x: torch.zeros(x),
    "float32": lambda x: torch.full((2, 2), float(x)),
    "no dimension": lambda x: torch.tensor(x),
    "bfloat16": lambda x: torch.full((2, 2), float(x)).bfloat16(),
    "float8": lambda x: torch.full((2, 2), float(x)).to(torch.float8_e4m3fn),
    "conjugate": lambda x: torch.full((2,), complex(x, 1)).conj(),
    "grad": lambda x: torch.full((2,), float(x), requires_grad=True),
    "parameter": lambda x: torch.nn.Parameter(torch.full((2,), float(x))),
    "large": _big,
    "channels last": lambda x: _big(x).to(memory_format=torch.channels_last),
    "strided": lambda x: _big(x)[:, :, ::2, ::3],
    "expanded": lambda x: torch.tensor([float(x)]).expand(5, 4),
    "backwards": lambda x: np.arange(x, x + 9)[::-1],
}


@pytest.mark.parametrize("kind", MAKE)
def test_it_tells_contents_apart_and_equal_ones_not(kind: str) -> None:
    make = MAKE[kind]
    assert fingerprint(make(1)) == fingerprint(make(1))
    assert fingerprint(make(1)) != fingerprint(make(2))
    assert isinstance(fingerprint(make(1)), int)


def test_every_sample_of_a_large_batch_counts() -> None:
    batch = torch.rand(32, 3, 64, 64)
    whole = fingerprint(batch)
    for sample in range(32):
        changed = batch.clone()
        changed[sample] += 1
        assert fingerprint(changed) != whole
    images = list(batch)
    listed = fingerprint(images)
    for sample in range(32):
        assert fingerprint([*images[:sample], images[sample] + 1, *images[sample + 1 :]]) != listed


@pytest.mark.parametrize(
    "batch",
    [
        object(),
        {1, 2},
        Bag(_id=7),
        torch.empty(2, device="meta"),
        torch.eye(2).to_sparse(),
        iter([1]),
        [],
        int,
    ],
)
def test_what_has_no_content_to_be_read_has_none(batch: Any) -> None:
    assert fingerprint(batch) is None


def test_the_order_of_names_and_of_sets_does_not_count() -> None:
    assert fingerprint({"a": 1, "b": 2}) == fingerprint({"b": 2, "a": 1})
    assert fingerprint([1, {"x", "y", "z"}]) == fingerprint([1, {"z", "y", "x"}])


def test_what_may_be_an_address_and_bytes_between_values_do_not_count() -> None:
    assert fingerprint(Bag(x=1, _handle=1)) == fingerprint(Bag(x=1, _handle=2))
    padded = np.dtype({"names": ["a", "b"], "formats": ["u1", "f8"], "offsets": [0, 8], "itemsize": 16})
    assert fingerprint([1, np.zeros(2, padded)]) == fingerprint([1, np.ones(2, padded)])


class Calls(dict[str, Any]):
    """Whatever is called of it draws."""

    def __getitem__(self, key: str) -> Any:
        return random.random()

    def items(self) -> Any:
        return [("x", random.random())]

    def __iter__(self) -> Iterator[str]:
        random.random()
        return super().__iter__()

    def __getattr__(self, name: str) -> Any:
        return random.random()


def test_it_calls_nothing_of_the_users_and_draws_nothing() -> None:
    class Sub(torch.Tensor):
        @classmethod
        def __torch_function__(cls, *args: Any, **kwargs: Any) -> Any:
            random.random()
            return super().__torch_function__(*args, **kwargs)  # type: ignore[no-untyped-call]

    samples = (item for item in [1])
    batch = [Calls(x=1), torch.ones(2).as_subclass(Sub), samples]
    before = random.getstate(), torch.get_rng_state().tolist()
    assert fingerprint(batch) is not None
    assert (random.getstate(), torch.get_rng_state().tolist()) == before
    assert next(samples) == 1


def test_it_ends_with_what_holds_itself_and_holds_nothing() -> None:
    batch = Bag(x=torch.ones(3))
    vars(batch)["me"] = [batch, types.SimpleNamespace(of=batch)]
    assert fingerprint(batch) is not None
    gone = weakref.ref(batch)
    del batch
    gc.collect()
    assert gone() is None
