"""The tensor dtypes an archive can hold: bytes per element, and how torch.save spells their storage.

The older dtypes have a storage class of their own (`torch.FloatStorage`) and are rebuilt by
`_rebuild_tensor_v2`; the newer ones lie in an `UntypedStorage` and are rebuilt by `_rebuild_tensor_v3`, which
is told the dtype. A dtype that isn't here (quantised, sub-byte ints) is one torch.save can't write either.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class StorageType:
    """How one dtype is stored.

    Attributes:
        itemsize: Bytes per element.
        legacy_class: Storage class in the `torch` module, or None when the storage is untyped.
    """

    itemsize: int
    legacy_class: str | None


STORAGE_TYPES: Final[dict[str, StorageType]] = {
    "float64": StorageType(8, "DoubleStorage"),
    "float32": StorageType(4, "FloatStorage"),
    "float16": StorageType(2, "HalfStorage"),
    "bfloat16": StorageType(2, "BFloat16Storage"),
    "int64": StorageType(8, "LongStorage"),
    "int32": StorageType(4, "IntStorage"),
    "int16": StorageType(2, "ShortStorage"),
    "int8": StorageType(1, "CharStorage"),
    "uint8": StorageType(1, "ByteStorage"),
    "bool": StorageType(1, "BoolStorage"),
    "complex128": StorageType(16, "ComplexDoubleStorage"),
    "complex64": StorageType(8, "ComplexFloatStorage"),
    "complex32": StorageType(4, None),
    "bcomplex32": StorageType(4, None),
    "uint16": StorageType(2, None),
    "uint32": StorageType(4, None),
    "uint64": StorageType(8, None),
    "float8_e5m2": StorageType(1, None),
    "float8_e4m3fn": StorageType(1, None),
    "float8_e5m2fnuz": StorageType(1, None),
    "float8_e4m3fnuz": StorageType(1, None),
    "float8_e8m0fnu": StorageType(1, None),
    "float4_e2m1fn_x2": StorageType(1, None),
    "bits8": StorageType(1, None),
    "bits16": StorageType(2, None),
    "bits1x8": StorageType(1, None),
    "bits2x4": StorageType(1, None),
    "bits4x2": StorageType(1, None),
}

#: Every dtype that may itself be a value in a state. torch 2.6 doesn't load the sub-byte ints (torch.int4).
DTYPE_NAMES: Final = frozenset(STORAGE_TYPES) | {"qint8", "qint32", "quint8", "quint4x2", "quint2x4"}
