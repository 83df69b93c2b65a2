"""For tests: a checkpoint's state with one generator exchanged for another of its kind, one at a time."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Iterator, Mapping
from copy import copy
from typing import Any

import numpy as np
import torch

import ckptd
from ckptd.loop.loader_rng import read_generator
from sweep_run import seed

Path = tuple[Any, ...]


def exchanged(load: Callable[[], Mapping[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Where a generator is, and the state with another one there, loaded anew; the global ones part by part."""
    seed(77)
    others: dict[Path, Any] = {("rng", part): each for part, each in ckptd.capture_rng_state().items()}
    beside = {name: value for name, value in load().items() if name != "rng"}
    others |= {path: _another(value) for path, value in _places(beside)}
    for path, other in others.items():
        yield ".".join(map(str, path)), _put(load(), path, other)


def _places(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    if isinstance(value, (np.random.Generator, torch.Generator)) or _is_state(value):
        yield path, value
    elif isinstance(value, (dict, list, tuple)):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _places(item, (*path, key))


def _is_state(value: Any) -> bool:
    """As a loader's position holds those of torch and Python, and of NumPy."""
    return (isinstance(value, bytes) and len(value) > 1000) or (
        isinstance(value, dict) and "bit_generator" in value
    )


def _another(value: Any) -> Any:
    if isinstance(value, np.random.Generator):
        return np.random.default_rng(77)
    if isinstance(value, torch.Generator):
        return torch.Generator().manual_seed(77)
    if isinstance(value, bytes):
        torchs = torch.Generator().manual_seed(77).get_state().numpy().tobytes()
        return torchs if len(value) == len(torchs) else struct.pack("<625I", *random.Random(77).getstate()[1])
    if value["bit_generator"] == "MT19937":
        return read_generator(np.random.RandomState(77))[2]
    return read_generator(np.random.default_rng(77))[2]


def _put(value: Any, path: Path, new: Any) -> Any:
    """A copy along the path; all else is shared."""
    if not path:
        return new
    if isinstance(value, tuple):
        return (*value[: path[0]], _put(value[path[0]], path[1:], new), *value[path[0] + 1 :])
    made = copy(value)
    made[path[0]] = _put(value[path[0]], path[1:], new)
    return made
