"""For tests: all that a job holds, told bit by bit without ckptd, so that two runs can be compared by name."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from ckptd import ResumableLoader

GENERATORS = (random.Random, np.random.Generator, np.random.RandomState, torch.Generator)


def told(state: Mapping[str, Any]) -> dict[str, str]:
    """Path → value in its exact bits, for every part of the state and the three global generators."""
    found = {path: text for name, value in state.items() for path, text in _told(value, name)}
    found["rng.python"] = _digest(repr(random.getstate()).encode())
    found["rng.numpy"] = _digest(repr(_plain(np.random.get_state(legacy=False))).encode())
    found["rng.torch"] = _digest(torch.get_rng_state().numpy().tobytes())
    return found


def _told(value: Any, path: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, torch.Tensor):
        yield path, _tensor(value)
    elif isinstance(value, torch.optim.Optimizer):
        yield from _optimizer(value, path)
    elif isinstance(value, ResumableLoader):
        yield path, f"epoch {value.epoch} batch {value.batch_in_epoch}"
    elif isinstance(value, GENERATORS):
        yield path, _digest(repr(_plain(_generator(value))).encode())
    elif callable(getattr(value, "state_dict", None)):
        yield from _told(value.state_dict(), path)
    elif isinstance(value, Mapping):
        yield path, f"{type(value).__name__} of {len(value)}"
        for key, item in value.items():
            yield from _told(item, f"{path}.{key!r}")
    elif isinstance(value, (list, tuple)) and not all(type(item) in (int, float) for item in value):
        yield path, f"{type(value).__name__} of {len(value)}"
        for index, item in enumerate(value):
            yield from _told(item, f"{path}.{index}")
    else:
        yield path, f"{type(value).__name__} {_plain(value)!r}"  # repr of a float is exact


def _optimizer(optimizer: torch.optim.Optimizer, path: str) -> Iterator[tuple[str, str]]:
    """By position, so that a moment which found the wrong parameter shows."""
    for number, group in enumerate(optimizer.param_groups):
        yield from _told({key: value for key, value in group.items() if key != "params"}, f"{path}.{number}")
        for position, parameter in enumerate(group["params"]):
            yield f"{path}.{number}.{position}", _tensor(parameter)
            yield from _told(optimizer.state.get(parameter, {}), f"{path}.{number}.{position}.state")


def _tensor(value: torch.Tensor) -> str:
    if value.layout is not torch.strided:
        value = value.to_dense()
    bits = value.detach().cpu().contiguous().flatten().view(torch.uint8) if value.numel() else torch.empty(0)
    return f"{value.dtype} {list(value.shape)} {value.requires_grad} {_digest(bits.numpy().tobytes())}"


def _generator(value: Any) -> Any:
    if isinstance(value, torch.Generator):
        return value.get_state().numpy().tobytes()
    if isinstance(value, np.random.Generator):
        return value.bit_generator.state
    return value.get_state(legacy=False) if isinstance(value, np.random.RandomState) else value.getstate()


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return (value.dtype.str, value.tobytes()) if isinstance(value, np.ndarray) else value


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=12).hexdigest()


def differences(seen: Mapping[str, str], wanted: Mapping[str, str]) -> list[str]:
    """The paths at which two tellings differ, the first twenty."""
    paths = [path for path in {**wanted, **seen} if seen.get(path) != wanted.get(path)]
    return [f"{path}: {seen.get(path)}, uninterrupted {wanted.get(path)}" for path in paths[:20]]
