"""The globals and calls that a pickle of ours consists of, and what each call leaves: nothing is called here."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final

from ckptd.format.storage_types import DTYPE_NAMES, STORAGE_TYPES
from ckptd.snapshot.descriptor_rules import is_dense

BYTES_PER_ELEMENT: Final = {
    f"torch {kind.legacy_class}": kind.itemsize for kind in STORAGE_TYPES.values() if kind.legacy_class
} | {"torch.storage UntypedStorage": 1}
#: Of tensors that only v1 could hold.
QUANTISED_BYTES: Final = {
    "torch QInt8Storage": 1, "torch QUInt8Storage": 1, "torch QInt32Storage": 4,
    "torch QUInt4x2Storage": 1, "torch QUInt2x4Storage": 1,
}  # fmt: skip
_TENSOR_MAKERS: Final = ("torch._utils _rebuild_tensor_v2", "torch._utils _rebuild_tensor_v3")
_WITH_STATE: Final = "torch._tensor _rebuild_from_type_v2"
OUR_GLOBALS: Final = frozenset(
    {"collections OrderedDict", "_codecs encode", "__builtin__ complex", "__builtin__ set", "torch Size",
     "torch device", "torch Tensor", "torch._utils _rebuild_parameter", _WITH_STATE, *_TENSOR_MAKERS,
     *BYTES_PER_ELEMENT, *(f"torch {name}" for name in DTYPE_NAMES)}
)  # fmt: skip


class Global(str):
    """The name of a global, as "module name"."""


class Kind:
    """What stands on the stack for a value whose content doesn't matter."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        return self._name


LEAF: Final = Kind("a value")
LIST: Final = Kind("a list")
ORDERED: Final = Kind("an OrderedDict")
TENSOR: Final = Kind("a tensor")


@dataclass(frozen=True, slots=True)
class Storage:
    """The storage of a tensor; bytes_per_element is None where the tensor's dtype says it."""

    nbytes: int
    bytes_per_element: int | None


def made(function: object, arguments: object) -> Any:
    """What a call that our writer spells leaves; None for any other."""
    if type(function) is not Global or type(arguments) is not tuple:
        return None
    match function, arguments:
        case "collections OrderedDict", ():
            return ORDERED
        case "_codecs encode", (str(), "latin1"):
            return LEAF
        case ("__builtin__ complex", (_, _)) | ("torch Size", ((*_,),)):
            return LEAF
        case "__builtin__ set", (kind,) if kind is LIST:
            return LEAF
        case "torch device", (str(),) | (str(), int()):
            return LEAF
        case str(maker), (Storage(), *_) if maker in _TENSOR_MAKERS:
            return TENSOR if _shows_all(arguments) else None
        case "torch._utils _rebuild_parameter", (kind, _, _) if kind is TENSOR:
            return TENSOR
        case str(maker), (str(inner), "torch Tensor", tuple(rest), ["requires_grad", _]) if (
            maker == _WITH_STATE
        ):
            return TENSOR if made(inner, rest) is TENSOR else None
    return None


def _shows_all(arguments: tuple[Any, ...]) -> bool:
    """Whether a tensor's shape and stride fill its storage, each element once."""
    match arguments:
        case (Storage(nbytes, itemsize), 0, tuple(shape), tuple(stride), _, _):
            pass
        case (Storage(nbytes, None), 0, tuple(shape), tuple(stride), _, _, Global() as dtype):
            kind = STORAGE_TYPES.get(dtype.removeprefix("torch "))
            itemsize = None if kind is None else kind.itemsize
        case _:
            return False
    if nbytes == 0:
        return True
    if itemsize is None or {*map(type, shape), *map(type, stride)} - {int}:
        return False
    return math.prod(shape) * itemsize == nbytes and is_dense(shape, stride)
