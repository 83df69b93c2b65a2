# ruff: noqa: TID253
"""The random generators that decide what a DataLoader yields: read as plain values, compared, set.

The global ones are read here as well as in ckptd.tensors.rng, in another form: only those a DataLoader draws from
(no CUDA device), and as numbers and bytes only, so that a position holds no tensor, gets no shard file and is
read in some ten microseconds. A worker reads them after each batch.
"""

from __future__ import annotations

import functools
import random
from array import array
from collections.abc import Mapping
from typing import Any, Final, TypeAlias, TypeGuard

import numpy as np
import torch

from ckptd.tensors.generator_places import PLACES, check_numpy_place, check_torch_place
from ckptd.tensors.seed_sequence import continue_spawning, seed_from_plain, seed_to_plain
from ckptd.warning import warn_after

OwnGenerator: TypeAlias = (
    torch.Generator | np.random.Generator | np.random.RandomState | np.random.BitGenerator | random.Random
)
GeneratorState: TypeAlias = list[
    Any
]  #: [family, variant, …]: plain values, in an order each family has of its own
GlobalStates: TypeAlias = dict[str, GeneratorState]

_DTYPES: Final = ("<u4", "<u8")
_GAUSS: Final = (float, type(None))


def is_generator(value: object) -> TypeGuard[OwnGenerator]:
    """Whether value is a random generator whose state can be read and set."""
    return _is_kind(type(value))  # type: ignore[arg-type]


@functools.lru_cache(1024)  # asked of every attribute, after each batch
def _is_kind(kind: type) -> bool:
    if issubclass(kind, random.Random):
        return kind.getstate is random.Random.getstate  # not SystemRandom: it has no state
    return issubclass(
        kind, (torch.Generator, np.random.Generator, np.random.RandomState, np.random.BitGenerator)
    )


def read_generator(generator: OwnGenerator) -> GeneratorState:
    """Its state, drawing nothing."""
    if isinstance(generator, torch.Generator):
        return ["torch", generator.device.type, generator.get_state().numpy().tobytes()]
    if isinstance(generator, np.random.Generator):
        state = generator.bit_generator.state
        return ["numpy", state["bit_generator"], _plain(state), seed_to_plain(generator.bit_generator)]
    if isinstance(generator, np.random.BitGenerator):
        return ["bits", generator.state["bit_generator"], _plain(generator.state), seed_to_plain(generator)]
    if isinstance(generator, np.random.RandomState):
        return _legacy(generator.get_state(legacy=False))
    return _python(generator.getstate())


def set_generator(generator: OwnGenerator, state: GeneratorState) -> None:
    """Set it to what read_generator gave for one of the same kind."""
    if isinstance(generator, torch.Generator):
        generator.set_state(_tensor(state[2]))
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = _with_arrays(state[2])
        _spawn_on(generator.bit_generator, _seed_of(state))
    elif isinstance(generator, np.random.BitGenerator):
        generator.state = _with_arrays(state[2])
        _spawn_on(generator, _seed_of(state))
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(_with_arrays(state[2]))
    else:
        generator.setstate(_python_tuple(state))


def _seed_of(state: GeneratorState) -> Any:
    return state[3] if len(state) > 3 else None  # older positions end before it


def _spawn_on(bits: np.random.BitGenerator, seed: Mapping[str, Any] | None) -> None:
    if seed is not None and not continue_spawning(bits, seed_from_plain(seed)):
        warn_after(
            "a NumPy Generator of the loader's dataset or sampler will spawn other generators than in the run that "
            "was saved: only from NumPy 2.0 on can its count of children be set back"
        )


def kind_of(state: GeneratorState) -> str:
    """What it is the state of: only one of the same kind can take it."""
    return " ".join(map(str, state[:2]))


def new_generator(state: GeneratorState) -> OwnGenerator:
    """A generator of that kind, in that state."""
    family, variant = state[:2]
    made: OwnGenerator
    if family == "torch":
        made = torch.Generator(variant)
    elif family == "python":
        made = random.Random()
    elif family in ("numpy", "bits"):
        bits = getattr(np.random, variant)(seed_from_plain(_seed_of(state)))
        made = np.random.Generator(bits) if family == "numpy" else bits
    else:
        made = np.random.RandomState(getattr(np.random, variant)())
    set_generator(made, state)
    return made


def try_state(state: Any) -> None:
    """Set a generator that is thrown away to a state that came from a disk; a torch one of another device aside.

    Raises:
        ValueError, TypeError, LookupError, ArithmeticError, RuntimeError: No generator takes it, or one would read
            beyond its memory with it.
    """
    family, variant, *parts = state
    if family == "torch":
        _try_torch(variant, *parts)
    elif family == "python":
        words, gauss = parts
        if variant != random.Random.VERSION or type(words) is not bytes or type(gauss) not in _GAUSS:
            raise ValueError("a state of Python's generator")
        random.Random(0).setstate(_python_tuple(state))
    elif family in ("numpy", "bits", "legacy") and variant in PLACES:
        check_numpy_place({**parts[0], "bit_generator": variant})
        _check_arrays(parts[0])
        bits = getattr(np.random, variant)(0)
        if family == "legacy":
            np.random.RandomState(bits).set_state(_with_arrays(parts[0]))
        else:
            bits.state = _with_arrays(parts[0])
            seed_from_plain(_seed_of(state))
    else:
        raise ValueError(f"the state of a {family!s} {variant!s}"[:80])


def _try_torch(device: Any, data: Any) -> None:
    if type(device) is not str or type(data) is not bytes:
        raise TypeError("a state of torch's generator")
    if device == "cpu":
        torch.Generator().set_state(_tensor(data))
        check_torch_place(data)


def _check_arrays(value: Any) -> None:
    for part in value.values() if isinstance(value, dict) else ():
        if isinstance(part, list):
            dtype, data = part
            if dtype not in _DTYPES or type(data) is not bytes:
                raise ValueError("an array of a generator's state")
        elif isinstance(part, dict):
            _check_arrays(part)
        elif type(part) not in (int, float, str):
            raise TypeError(f"a generator's state with {type(part).__name__}")


def read_globals() -> GlobalStates:
    """The global generators of Python, NumPy and torch's CPU, drawing from none."""
    return plain_globals(take_globals())


def take_globals() -> tuple[Any, ...]:
    """The same in half the time, as they give it themselves."""
    return random.getstate(), np.random.get_state(legacy=False), torch.get_rng_state()


def plain_globals(taken: tuple[Any, ...]) -> GlobalStates:
    """What read_globals gives, of what take_globals took."""
    python, numpy, torchs = taken
    return {
        "python": _python(python),
        "numpy": _legacy(numpy),
        "torch": ["torch", "cpu", torchs.numpy().tobytes()],
    }


def set_globals(states: GlobalStates) -> None:
    """Set them to what read_globals gave."""
    random.setstate(_python_tuple(states["python"]))
    np.random.set_state(_with_arrays(states["numpy"][2]))
    torch.set_rng_state(_tensor(states["torch"][2]))


def _python(state: tuple[Any, ...]) -> GeneratorState:
    version, words, gauss = state
    return ["python", version, array("I", words).tobytes(), gauss]


def _python_tuple(state: GeneratorState) -> tuple[Any, ...]:
    _, version, words, gauss = state
    return version, tuple(array("I", bytes(words))), gauss


def _legacy(state: Any) -> GeneratorState:
    return ["legacy", state["bit_generator"], _plain(state)]


def _tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _plain(value: Any) -> Any:
    """NumPy's state dicts with [dtype, bytes] for an array; the values are the same."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, np.ndarray):
        return [value.dtype.str, value.tobytes()]
    return value.item() if isinstance(value, np.generic) else value


def _with_arrays(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _with_arrays(item) for key, item in value.items()}
    if isinstance(value, list):
        return np.frombuffer(bytes(value[1]), dtype=value[0]).copy()
    return value
