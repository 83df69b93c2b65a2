"""A plain tree (ckptd.snapshot.values) as a protocol-2 pickle that torch's weights_only loader accepts.

This only writes; nothing in ckptd ever reads one. Opcodes and globals are those of torch.save, except that
empty bytes are spelled like all others (the loader refuses torch.save's form) and that containers aren't
memoised (a captured state shares none). A tensor row that is met twice is one tensor; rows that are aliases
share a storage.
"""

from __future__ import annotations

import re
import struct
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from ckptd.errors import UnstorableState
from ckptd.format.pickled_numbers import packed_items
from ckptd.format.storage_types import DTYPE_NAMES, STORAGE_TYPES
from ckptd.format.strides import contiguous_stride
from ckptd.snapshot.descriptor import TensorSpec
from ckptd.snapshot.tree_columns import MAX_INT_BYTES, signed_bytes
from ckptd.snapshot.values import DeviceValue, DtypeValue, PackedNumbers, SizeValue, TensorRef

_DEVICE: Final = re.compile(r"([a-z_]{1,32})(?::([0-9]{1,4}))?", re.ASCII)
_NO_SUBSTITUTES: Final[Mapping[int, Any]] = {}

_float = struct.Struct(">cd").pack
_uint32 = struct.Struct("<cI").pack


@dataclass(frozen=True, kw_only=True, slots=True)
class Emitted:
    """One pickle and the tensor storages it refers to.

    Attributes:
        data: The pickle.
        storages: Rows whose bytes are the storages "0", "1", … in that order; never an alias.
        tensors: Every row that the pickle holds → the row whose bytes it shows (itself, or its owner).
    """

    data: bytes
    storages: tuple[int, ...]
    tensors: dict[int, int]


def emit(value: Any, rows: Sequence[TensorSpec], substitutes: Mapping[int, Any] = _NO_SUBSTITUTES) -> Emitted:
    """Spell value as a pickle.

    Args:
        value: A plain tree.
        rows: What TensorRef.index points to.
        substitutes: Tensor row → the plain tree to put in its place.

    Raises:
        UnstorableState: value holds something else than plain values; `descriptor_codec` refuses those first.
    """
    emitter = _Emitter(rows, substitutes)
    emitter.value(value)
    return Emitted(data=bytes(emitter.out + b"."), storages=tuple(emitter.storages), tensors=emitter.tensors)


class _Emitter:
    def __init__(self, rows: Sequence[TensorSpec], substitutes: Mapping[int, Any]) -> None:
        self.out = bytearray(b"\x80\x02")
        self.storages: dict[int, str] = {}  # row → storage key, in the order of first use
        self.tensors: dict[int, int] = {}
        self._rows = rows
        self._substitutes = substitutes
        # String, ("global", name) or TensorRef → the opcode that fetches it.
        self._memo: dict[Any, bytes] = {}
        # What a tensor looks like → the bytes before and after its storage key.
        self._pieces: dict[Any, tuple[bytes, bytes]] = {}
        self._kinds = {
            str: self._str, TensorRef: self._ref, int: self._int, float: self._float, bool: self._bool,
            type(None): self._none, dict: self._dict, OrderedDict: self._ordered_dict, list: self._list,
            tuple: self._tuple, PackedNumbers: self._packed, set: self._set, bytes: self._bytes,
            complex: self._complex, SizeValue: self._size, DtypeValue: self._dtype, DeviceValue: self._device,
        }  # fmt: skip

    def value(self, value: Any) -> None:
        method: Any = self._kinds.get(type(value))
        if method is None:
            raise UnstorableState("this type can't be stored", seen=type(value).__qualname__)
        method(value)

    # --- the memo: what was written once is fetched by number ---

    def _fetch(self, key: Any) -> bool:
        opcode = self._memo.get(key)
        if opcode is None:
            return False
        self.out += opcode
        return True

    def _keep(self, key: Any) -> None:
        number = len(self._memo)
        if number < 256:
            self.out += bytes((0x71, number))  # BINPUT
            self._memo[key] = bytes((0x68, number))  # BINGET
        else:
            self.out += _uint32(b"r", number)  # LONG_BINPUT
            self._memo[key] = _uint32(b"j", number)  # LONG_BINGET

    def _global(self, name: str) -> None:
        if not self._fetch(("global", name)):
            self.out += b"c" + name.replace(" ", "\n").encode("ascii") + b"\n"
            self._keep(("global", name))

    # --- leaves ---

    def _none(self, _: None) -> None:
        self.out += b"N"

    def _bool(self, value: bool) -> None:
        self.out += b"\x88" if value else b"\x89"

    def _int(self, value: int) -> None:
        if 0 <= value < 256:
            self.out += bytes((0x4B, value))  # BININT1
        elif 0 <= value < 65536:
            self.out += b"M" + value.to_bytes(2, "little")  # BININT2
        elif -(2**31) <= value < 2**31:
            self.out += b"J" + value.to_bytes(4, "little", signed=True)  # BININT
        else:
            # LONG1 is the longest integer the weights_only loader knows.
            size = signed_bytes(value)
            if size > MAX_INT_BYTES:
                raise UnstorableState(
                    "integer too long", seen=f"{size} bytes", wanted=f"at most {MAX_INT_BYTES}"
                )
            self.out += bytes((0x8A, size)) + value.to_bytes(size, "little", signed=True)

    def _float(self, value: float) -> None:
        self.out += _float(b"G", value)

    def _str(self, value: str) -> None:
        if not self._fetch(value):
            data = value.encode()
            self.out += _uint32(b"X", len(data)) + data
            self._keep(value)

    def _bytes(self, value: bytes) -> None:
        self._global("_codecs encode")
        self._str(value.decode("latin1"))
        self._str("latin1")
        self.out += b"\x86R"

    def _complex(self, value: complex) -> None:
        self._global("__builtin__ complex")
        self._float(value.real)
        self._float(value.imag)
        self.out += b"\x86R"

    def _size(self, value: SizeValue) -> None:
        self._global("torch Size")
        self._tuple(value.dims)
        self.out += b"\x85R"

    def _dtype(self, value: DtypeValue) -> None:
        # The name becomes a line of the pickle: only known ones, or it could smuggle opcodes in.
        if value.name not in DTYPE_NAMES:
            raise UnstorableState("unknown dtype", seen=repr(value.name)[:200])
        self._global(f"torch {value.name}")

    def _device(self, value: DeviceValue) -> None:
        match = _DEVICE.fullmatch(value.name)
        if match is None:
            raise UnstorableState("not a device", seen=repr(value.name)[:200])
        self._global("torch device")
        self._tuple((match[1],) if match[2] is None else (match[1], int(match[2])))
        self.out += b"R"

    # --- containers ---

    def _list(self, items: Sequence[Any]) -> None:
        self.out += b"]"
        if items:
            self.out += b"("
            for item in items:
                self.value(item)
            self.out += b"e"

    def _tuple(self, items: tuple[Any, ...]) -> None:
        count = len(items)
        if count > 3:
            self.out += b"("
        for item in items:
            self.value(item)
        self.out += (b")", b"\x85", b"\x86", b"\x87", b"t")[min(count, 4)]

    def _set(self, items: set[Any]) -> None:
        self._global("__builtin__ set")
        self._list(sorted(items, key=repr))
        self.out += b"\x85R"

    def _dict(self, items: Mapping[Any, Any]) -> None:
        self.out += b"}"
        self._items(items)

    def _ordered_dict(self, items: OrderedDict[Any, Any]) -> None:
        self._empty_ordered_dict()
        self._items(items)
        metadata = vars(items).get("_metadata")
        if metadata is not None:
            self._dict({"_metadata": metadata})
            self.out += b"b"  # BUILD

    def _empty_ordered_dict(self) -> None:
        self._global("collections OrderedDict")
        self.out += b")R"

    def _items(self, items: Mapping[Any, Any]) -> None:
        if items:
            self.out += b"("
            for key, value in items.items():
                self.value(key)
                self.value(value)
            self.out += b"u"

    def _packed(self, value: PackedNumbers) -> None:
        self.out += b"]"
        if value.data:
            self.out += b"("
            self.out += packed_items(value)
            self.out += b"e"

    # --- tensors ---

    def _ref(self, ref: TensorRef) -> None:
        if ref.index in self._substitutes:
            self.value(self._substitutes[ref.index])
            return
        if self._fetch(ref):
            return
        row = self._rows[ref.index]
        if row.parameter:
            self._global("torch._utils _rebuild_parameter")
            self._tensor(ref.index, row, requires_grad=False)
            self._bool(row.requires_grad)
            self._empty_ordered_dict()
            self.out += b"\x87R"
        else:
            self._tensor(ref.index, row, requires_grad=row.requires_grad)
        self._keep(ref)

    def _tensor(self, index: int, row: TensorSpec, *, requires_grad: bool) -> None:
        owner = self.tensors[index] = index if row.alias_of is None else row.alias_of
        key = self.storages.setdefault(owner, str(len(self.storages))).encode()
        look = (row.dtype, row.shape, row.stride, requires_grad)
        pieces = self._pieces.get(look)
        if pieces is not None:
            self.out += pieces[0] + _uint32(b"X", len(key)) + key + pieces[1]
            return
        self._before_key(row, requires_grad)
        self.out += _uint32(b"X", len(key)) + key
        self._after_key(row, requires_grad)
        # The memo has all of it now: the next tensor that looks like this is the same bytes but for the key.
        written, self.out = self.out, bytearray()
        self._before_key(row, requires_grad)
        before, self.out = bytes(self.out), bytearray()
        self._after_key(row, requires_grad)
        self._pieces[look] = (before, bytes(self.out))
        self.out = written

    def _before_key(self, row: TensorSpec, requires_grad: bool) -> None:
        legacy = STORAGE_TYPES[row.dtype].legacy_class
        if legacy is None and requires_grad:
            # _rebuild_tensor_v3 fails with requires_grad (what torch.save writes of such a tensor can't be
            # loaded): it is an attribute that is set on the tensor once it is rebuilt.
            self._global("torch._tensor _rebuild_from_type_v2")
            self.out += b"("
            self._global("torch._utils _rebuild_tensor_v3")
            self._global("torch Tensor")
        else:
            self._global(f"torch._utils _rebuild_tensor_v{3 if legacy is None else 2}")
        self.out += b"(("
        self._str("storage")
        self._global("torch.storage UntypedStorage" if legacy is None else f"torch {legacy}")

    def _after_key(self, row: TensorSpec, requires_grad: bool) -> None:
        untyped = STORAGE_TYPES[row.dtype].legacy_class is None
        self._str("cpu")
        self._int(row.nbytes if untyped else row.nbytes // row.itemsize)
        self.out += b"tQ"  # BINPERSID
        self._int(0)  # storage offset
        self._tuple(row.shape)
        self._tuple(contiguous_stride(row.shape) if row.stride is None else row.stride)
        self._bool(requires_grad and not untyped)
        self._empty_ordered_dict()  # backward hooks
        if untyped:
            self._global(f"torch {row.dtype}")
        self.out += b"t"
        if untyped and requires_grad:
            self._dict({"requires_grad": True})
            self.out += b"t"
        self.out += b"R"
