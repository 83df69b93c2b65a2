# ruff: noqa: TID253
"""The random generators that decide what a DataLoader yields: found, read as plain values, set.

The global ones are read here as well as in ckptd.tensors.rng, in another form: only those a DataLoader draws from
(no CUDA device), and as numbers and bytes only, so that a position holds no tensor and gets no shard file.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
import torch
from torch.utils.data import DataLoader

from ckptd.errors import StateMismatch
from ckptd.tensors.rng import plain_numpy

OwnGenerator: TypeAlias = torch.Generator | np.random.Generator | np.random.RandomState | random.Random
GeneratorStates: TypeAlias = dict[str, Any]  #: where it was found → its state in plain values

_MAX_NESTED_DATASETS = 8
_NO_STATE = random.SystemRandom


def own_generators(loader: DataLoader[Any]) -> dict[str, OwnGenerator]:
    """Generators that are attributes of the loader, its samplers, dataset or collate_fn; each object once."""
    owners: dict[str, Any] = {
        "loader": loader,
        "sampler": loader.sampler,
        "batch_sampler": loader.batch_sampler,
        "batch_sampler.sampler": getattr(loader.batch_sampler, "sampler", None),
        "collate_fn": loader.collate_fn,
    }
    dataset: Any = loader.dataset
    name = "dataset"
    for _ in range(_MAX_NESTED_DATASETS):
        owners[name] = dataset
        dataset, name = getattr(dataset, "dataset", None), f"{name}.dataset"
    found: dict[str, OwnGenerator] = {}
    seen: set[int] = set()
    for owner_name, owner in owners.items():
        for attribute, value in sorted(getattr(owner, "__dict__", {}).items()):
            if isinstance(value, OwnGenerator) and not isinstance(value, _NO_STATE) and id(value) not in seen:
                seen.add(id(value))
                found[f"{owner_name}.{attribute}"] = value
    return found


def read_generators(generators: Mapping[str, OwnGenerator]) -> GeneratorStates:
    """The state of each, drawing from none."""
    return {name: _read(generator) for name, generator in generators.items()}


def set_generators(generators: Mapping[str, OwnGenerator], states: GeneratorStates) -> None:
    """Set each from what read_generators gave.

    Raises:
        StateMismatch: They aren't the same ones. Nothing was changed.
    """
    if set(generators) != set(states):
        raise StateMismatch(
            "the loader has other generators than the checkpoint",
            where="loader", seen=str(sorted(generators)), wanted=str(sorted(states)),
            todo="make the DataLoader as it was made for the checkpoint",
        )  # fmt: skip
    for name, generator in generators.items():
        _set(generator, states[name])


def read_global_generators() -> GeneratorStates:
    """The global generators of Python, NumPy and torch's CPU, drawing from none."""
    return {
        "python": _to_list(random.getstate()),
        "numpy": plain_numpy(np.random.get_state(legacy=False)),
        "torch": torch.get_rng_state().numpy().tobytes(),
    }


def set_global_generators(states: GeneratorStates) -> None:
    """Set them from what read_global_generators gave."""
    random.setstate(_from_list(states["python"]))
    np.random.set_state(states["numpy"])
    torch.set_rng_state(torch.frombuffer(bytearray(states["torch"]), dtype=torch.uint8))


def _read(generator: OwnGenerator) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state().numpy().tobytes()
    if isinstance(generator, np.random.Generator):
        return plain_numpy(generator.bit_generator.state)
    if isinstance(generator, np.random.RandomState):
        return plain_numpy(generator.get_state(legacy=False))
    return _to_list(generator.getstate())


def _to_list(state: tuple[Any, ...]) -> list[Any]:
    version, internal, gauss = state
    return [version, list(internal), gauss]  # a list of numbers travels packed, a tuple doesn't


def _from_list(state: Any) -> tuple[Any, ...]:
    version, internal, gauss = state
    return version, tuple(internal), gauss


def _set(generator: OwnGenerator, state: Any) -> None:
    if isinstance(generator, torch.Generator):
        generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(state)
    else:
        generator.setstate(_from_list(state))
