# ruff: noqa: TID253
"""What spawn() of a NumPy Generator goes on from: the SeedSequence of its bit generator, and its count of children.

Setting a bit generator's state leaves both as they were, so that a resumed run would spawn other generators.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy
from numpy.random import SeedSequence

#: No more words of entropy are mixed than that; the work grows with its square. NumPy's default is 4.
MAX_POOL_SIZE: Final = 256
#: More children than that aren't spawned to catch up: it would take seconds, and a damaged file says any number.
MAX_ADVANCE: Final = 20_000

_MAX_COUNT: Final = 2**32
_LONG_BITS: Final = 2000  # longer integers have no form of their own in a file
_BATCH: Final = 1000


class UnknownSeed(SeedSequence):
    """Of a generator whose checkpoint doesn't say where it spawns from; random."""


def seed_to_plain(bits: Any) -> dict[str, Any] | None:
    """The seed sequence of a bit generator as plain values; None when it has none, or one of another class."""
    seed = bits.seed_seq
    if type(seed) is not SeedSequence or seed.pool_size > MAX_POOL_SIZE:
        return None
    return {
        "entropy": _plain(seed.entropy),
        "spawn_key": _plain(seed.spawn_key),
        "pool_size": int(seed.pool_size),
        "n_children_spawned": int(seed.n_children_spawned),
    }


def _plain(entropy: Any) -> Any:
    if isinstance(entropy, str):
        return str(entropy)
    if isinstance(entropy, (int, numpy.integer)):
        value = int(entropy)
        length = value.bit_length()
        return value if length <= _LONG_BITS else value.to_bytes(length // 8 + 1, "little")
    return [_plain(part) for part in entropy]


def seed_from_plain(plain: Mapping[str, Any] | None) -> SeedSequence:
    """The seed sequence that `seed_to_plain` was given; an UnknownSeed for None.

    Raises:
        KeyError, TypeError, ValueError: It isn't what seed_to_plain gives.
    """
    if plain is None:
        return UnknownSeed()
    size, count = plain["pool_size"], plain["n_children_spawned"]
    if type(size) is not int or type(count) is not int:
        raise TypeError("the size or count of a seed sequence is no int")
    if size > MAX_POOL_SIZE or not 0 <= count < _MAX_COUNT:
        raise ValueError(f"a seed sequence with a pool of {size} and {count} children")
    entropy, key = _entropy(plain["entropy"]), _entropy(plain["spawn_key"])
    return SeedSequence(entropy, spawn_key=key, pool_size=size, n_children_spawned=count)


def _entropy(plain: Any) -> Any:
    if isinstance(plain, bytes):
        return int.from_bytes(plain, "little")
    if isinstance(plain, (list, tuple)):
        return [_entropy(part) for part in plain]
    if type(plain) is not int and type(plain) is not str:
        raise TypeError(f"entropy that is {type(plain).__name__}")
    return plain


def continue_spawning(live: Any, then: Any) -> bool:
    """Let spawn() of a live bit generator give the children that it would have given from seed sequence `then`.

    A live seed sequence that only stands earlier is brought forward, so that whoever else holds it goes on
    too. Any other is replaced, which NumPy can since 2.0.

    Returns:
        False when they will be others. True also where nothing is known of `then`, or it had spawned none.
    """
    if type(then) is not SeedSequence:
        return True
    now = live.seed_seq
    ahead = then.n_children_spawned - now.n_children_spawned if _same_line(now, then) else None
    if ahead is not None and 0 <= ahead <= MAX_ADVANCE:
        for begin in range(0, ahead, _BATCH):
            now.spawn(min(_BATCH, ahead - begin))
        return True
    if isinstance(live.__getstate__(), tuple):  # (state, seed sequence); a dict, the state alone, before 2.0
        live.__setstate__((live.state, SeedSequence(**then.state)))
        return True
    return ahead is None and not then.n_children_spawned


def _same_line(one: Any, other: SeedSequence) -> bool:
    return (
        isinstance(one, SeedSequence)
        and one.pool_size == other.pool_size
        and _plain(one.entropy) == _plain(other.entropy)
        and _plain(one.spawn_key) == _plain(other.spawn_key)
    )
