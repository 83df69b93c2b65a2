# ruff: noqa: TID253
"""Setting a live random generator of the state from a stored one of the same kind."""

from __future__ import annotations

import random
from typing import Any, Final

import numpy
import torch

from ckptd.snapshot import keypath
from ckptd.snapshot.keypath import Path
from ckptd.tensors.seed_sequence import continue_spawning
from ckptd.tensors.tag_reader import GeneratorElsewhere
from ckptd.tensors.tags import type_name

GENERATORS: Final = (torch.Generator, numpy.random.Generator, numpy.random.RandomState, random.Random)


def kind_of(value: Any) -> str:
    if isinstance(value, torch.Generator):
        return f"a torch.Generator on {value.device.type}"
    if isinstance(value, numpy.random.Generator):
        return f"a numpy.random.Generator of {type(value.bit_generator).__name__}"
    if isinstance(value, numpy.random.RandomState):
        return f"a numpy.random.RandomState of {value.get_state(legacy=False)['bit_generator']}"
    return type_name(value)


def state_of(value: Any) -> Any:
    """A generator's state: equal for two that draw the same numbers from here on."""
    if isinstance(value, torch.Generator):
        return (value.device.type, value.get_state())
    if isinstance(value, numpy.random.Generator):
        return value.bit_generator.state
    return value.get_state(legacy=False) if isinstance(value, numpy.random.RandomState) else value.getstate()


def set_generator(live: Any, stored: Any, path: Path) -> list[str]:
    """Let live go on where stored stood; gives a warning where a NumPy Generator will spawn other children."""
    if isinstance(live, torch.Generator):
        live.set_state(stored.get_state())
    elif isinstance(live, numpy.random.Generator):
        live.bit_generator.state = stored.bit_generator.state
        if not continue_spawning(live.bit_generator, stored.bit_generator.seed_seq):
            return [_other_children(path)]
    elif isinstance(live, numpy.random.RandomState):
        live.set_state(stored.get_state(legacy=False))
    else:
        live.setstate(stored.getstate())
    return []


def _other_children(path: Path) -> str:
    return (
        f"{keypath.show(path)}: its draws go on, but spawn() doesn't: it will give other generators than in the run "
        "that was saved, because this one is of another seed, or has spawned more; make it with the same seed, and "
        "restore before it spawns (from NumPy 2.0 on neither is needed)"
    )


def skipped_generator(stored: GeneratorElsewhere, path: Path) -> str:
    """What is to be said of a generator that is left alone."""
    return (
        f"{keypath.show(path)}: the checkpoint holds a generator of {stored.device}, which this host "
        "doesn't have; it is skipped, so its draws don't continue where they stopped"
    )
