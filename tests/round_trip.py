"""For tests: a state written to disk and read back, and equality that sees types, bits and order."""

from __future__ import annotations

import random
import struct
from collections import OrderedDict, defaultdict, deque
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ckptd.snapshot.descriptor import Sharding
from ckptd.tensors.loading import load
from ckptd.tensors.saving import save
from ckptd.tensors.torch_support import BITS_BY_ITEMSIZE

LAYOUTS = [Sharding(), Sharding(shards=2)]
LAYOUT_IDS = ["single", "sharded"]


def through_disk(
    folder: Path, state: dict[Any, Any], sharding: Sharding | None = None, **options: Any
) -> dict[str, Any]:
    number = sum(1 for _ in folder.glob("checkpoint-*"))
    path = save(folder / f"checkpoint-{number}", state, step=1, sharding=sharding or Sharding(), **options)
    return load(path)


def same(a: Any, b: Any) -> bool:
    """Equal in type, value, bits, and the order of keys."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return same_tensor(a, b)
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, np.generic):
        return a.dtype == b.dtype and a.tobytes() == b.tobytes()
    if isinstance(a, float):
        return struct.pack("d", a) == struct.pack("d", b)
    if isinstance(a, complex):
        return same(a.real, b.real) and same(a.imag, b.imag)
    if isinstance(a, dict):
        return _same_dict(a, b)
    if isinstance(a, (set, frozenset)):
        return sorted(map(repr, a)) == sorted(map(repr, b))
    if isinstance(a, deque):
        return a.maxlen == b.maxlen and same(list(a), list(b))
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)):
        return repr(_generator_state(a)) == repr(_generator_state(b))
    if isinstance(a, Enum):
        return a is b
    if is_dataclass(a):
        return all(same(getattr(a, one.name), getattr(b, one.name)) for one in fields(a))
    return bool(a == b)


def _generator_state(value: Any) -> Any:
    if isinstance(value, torch.Generator):
        return value.get_state().tolist()
    if isinstance(value, np.random.Generator):
        return value.bit_generator.state
    return value.getstate() if isinstance(value, random.Random) else value.get_state(legacy=False)


def _same_dict(a: Any, b: Any) -> bool:
    if isinstance(a, defaultdict) and a.default_factory is not b.default_factory:
        return False
    if isinstance(a, OrderedDict) and not same(vars(a).get("_metadata"), vars(b).get("_metadata")):
        return False
    return same(list(a), list(b)) and all(map(same, a.values(), b.values()))


def same_tensor(a: torch.Tensor, b: torch.Tensor) -> bool:
    if (a.dtype, a.shape, a.requires_grad) != (b.dtype, b.shape, b.requires_grad):
        return False
    bits = BITS_BY_ITEMSIZE[a.itemsize]
    a, b = (_resolved(each.detach()) for each in (a, b))
    return a.contiguous().view(bits).tolist() == b.contiguous().view(bits).tolist() if a.numel() else True


def _resolved(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_conj() and str(tensor.dtype) == "torch.bcomplex32":  # torch 2.15 can't resolve it
        parts = torch.stack((tensor.real, tensor.imag.resolve_neg()), -1)
        return parts.view(tensor.dtype).squeeze(-1)
    return tensor.resolve_conj().resolve_neg()
