"""The plain values a captured state is made of: what travels in a slot and what the archive can spell.

A captured state is ordinary Python data of exactly these types, nothing else:

    None, bool, int, float, complex, str, bytes, list, tuple, dict, OrderedDict, set
    TensorRef, SizeValue, DtypeValue, DeviceValue, PackedNumbers (below)

An OrderedDict may carry a plain-valued `_metadata` attribute (a module's state_dict() does). Types the
weights_only loader refuses were already turned into a tagged dict by `ckptd.tensors.tags`. Nothing here imports torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import msgspec

#: Kinds of values that are leaves, and can't change.
SCALARS: Final = frozenset({type(None), bool, int, float, complex, str, bytes})


class TensorRef(msgspec.Struct, frozen=True, gc=False):
    """Stands for a tensor: row `index` of the descriptor's tensor list (several refs to one row are one tensor)."""

    index: int


@dataclass(frozen=True, slots=True)
class SizeValue:
    """A torch.Size."""

    dims: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class DtypeValue:
    """A torch.dtype by its name without the prefix, such as "bfloat16"."""

    name: str


@dataclass(frozen=True, slots=True)
class DeviceValue:
    """A torch.device as str(device), such as "cuda:0"."""

    name: str


@dataclass(frozen=True, slots=True)
class PackedNumbers:
    """A list of only floats ("d") or only ints of 64 bits ("q"), packed little-endian, 8 bytes each.

    It is a packing in transit only: in every file it is a plain list again.
    """

    typecode: str
    data: bytes
