"""A pickle of an archive, read without making anything of it, before torch's weights_only loader gets it.

weights_only runs nothing, but it trusts sizes: torch up to 2.6 at least makes a tensor of as many bytes as the
pickle says over a record that has fewer, and reading it ends the process. And what it does allow can still ask
for any amount of memory (`bytearray(10**11)`), or be a few bytes that unfold to more than a walk ever ends.

Two strictnesses. `ours`: only what `pickle_emit` spells; every global, every call and every opcode. Otherwise, for
format v1, whose files torch.save made: whatever weights_only allows, with the sizes checked.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Mapping
from typing import Any, Final

from ckptd.errors import CorruptCheckpoint
from ckptd.format.pickled_calls import (
    BYTES_PER_ELEMENT,
    LEAF,
    LIST,
    ORDERED,
    OUR_GLOBALS,
    QUANTISED_BYTES,
    TENSOR,
    Global,
    Kind,
    Storage,
    made,
)

#: Long lists of numbers, at once. Sixteen of these ints in a row are no shape but that of a tensor without elements.
_RUN: Final = re.compile(rb"(?:G.{8}){2,}|(?:J.{4}){16,}|(?:\x8a\x08.{8}){16,}", re.DOTALL)
_WIDTH: Final = {0x47: 9, 0x4A: 5, 0x8A: 10}


def check_pickle(data: bytes, records: Mapping[str, int] | None, where: str, *, ours: bool) -> None:
    """Refuse a pickle that torch shouldn't be given.

    Args:
        data: data.pkl.
        records: The bytes of each record of its archive, by name; None where its sizes will not be believed.
        where: Path of the archive, for messages.
        ours: Whether our writer is the only one that makes such files.

    Raises:
        CorruptCheckpoint: It is no pickle of such an archive; nothing of it was made or called.
    """
    checker = _Checker(data, records, ours)
    try:
        checker.run()
    except _Refused as refused:
        seen, at = str(refused), checker.at
    except (IndexError, struct.error, UnicodeDecodeError, KeyError, ValueError) as error:
        seen, at = f"{type(error).__name__} in it", checker.at
    else:
        return
    raise CorruptCheckpoint(
        "holds what a checkpoint never does, and nothing of it was run",
        where=where, seen=f"{seen} (byte {at} of data.pkl)"[:200], todo="don't load it elsewhere either",
    )  # fmt: skip


class _Refused(Exception):
    pass


class _Checker:
    """Walks the opcodes with a stack of what each would leave there: strings, ints, tuples, and kinds."""

    def __init__(self, data: bytes, records: Mapping[str, int] | None, ours: bool) -> None:
        self.at = 0
        self._data = data
        self._records = records
        self._ours = ours
        self._itemsizes = BYTES_PER_ELEMENT if ours else BYTES_PER_ELEMENT | QUANTISED_BYTES
        self._stack: list[Any] = []
        self._below: list[list[Any]] = []  # one stack per open mark
        self._memo: dict[int, Any] = {}
        self._opcodes = _OURS if ours else _ANY

    def run(self) -> None:
        data, memo = self._data, self._memo
        end = len(data)
        while self.at < end:
            opcode = data[self.at]
            if opcode == 0x68 and self.at + 1 < end:  # BINGET: every other opcode of a tensor
                self._stack.append(memo[data[self.at + 1]])
                self.at += 2
                continue
            if opcode in _WIDTH and (run := _RUN.match(data, self.at)):
                self._stack += [LEAF] * ((run.end() - self.at) // _WIDTH[opcode])
                self.at = run.end()
                continue
            if opcode == 0x2E:  # STOP
                if len(self._stack) != 1 or self._below or self.at + 1 != end:
                    raise _Refused("bytes behind its end, or no value")
                return
            method = self._opcodes.get(opcode)
            if method is None:
                raise _Refused(f"opcode {opcode:#04x}")
            self.at += 1
            method(self)
        raise _Refused("no end")

    # --- bytes ---

    def _take(self, count: int) -> bytes:
        start, self.at = self.at, self.at + count
        if self.at > len(self._data):
            raise _Refused("ended early")
        return self._data[start : self.at]

    def _line(self) -> str:
        end = self._data.index(b"\n", self.at)
        start, self.at = self.at, end + 1
        return self._data[start:end].decode("ascii")

    def _to_mark(self) -> list[Any]:
        items, self._stack = self._stack, self._below.pop()
        return items

    # --- leaves ---

    def _proto(self) -> None:
        if self.at != 1 or self._take(1) != b"\2":
            raise _Refused("a protocol other than 2")

    def _leaf(self) -> None:
        self._stack.append(LEAF)

    def _int1(self) -> None:
        self._stack.append(self._take(1)[0])

    def _int2(self) -> None:
        self._stack.append(int.from_bytes(self._take(2), "little"))

    def _int4(self) -> None:
        self._stack.append(int.from_bytes(self._take(4), "little", signed=True))

    def _long(self) -> None:
        self._stack.append(int.from_bytes(self._take(self._take(1)[0]), "little", signed=True))

    def _float(self) -> None:
        self._take(8)
        self._leaf()

    def _text(self) -> None:
        raw = self._take(int.from_bytes(self._take(4), "little"))
        self._stack.append(raw.decode("utf-8", "strict" if self._ours else "surrogatepass"))

    def _short_text(self) -> None:
        self._stack.append(self._take(self._take(1)[0]).decode("latin1"))

    def _global(self) -> None:
        name = Global(f"{self._line()} {self._line()}")
        if self._ours and name not in OUR_GLOBALS:
            raise _Refused(f"the global {name.replace(' ', '.')!r}")
        self._stack.append(name)

    # --- the memo ---

    def _put(self, number: int) -> None:
        top = self._stack[-1]
        # A container that could be fetched again could hold itself, or unfold without end.
        if self._ours and not (isinstance(top, str) or top is TENSOR):
            raise _Refused(f"{_show(top)} is kept to be used again")
        self._memo[number] = top

    def _put1(self) -> None:
        self._put(self._take(1)[0])

    def _put4(self) -> None:
        self._put(int.from_bytes(self._take(4), "little"))

    def _get1(self) -> None:
        self._stack.append(self._memo[self._take(1)[0]])

    def _get4(self) -> None:
        self._stack.append(self._memo[int.from_bytes(self._take(4), "little")])

    # --- containers ---

    def _mark(self) -> None:
        self._below.append(self._stack)
        self._stack = []

    def _empty_tuple(self) -> None:
        self._stack.append(())

    def _tuple(self) -> None:
        items = self._to_mark()
        self._stack.append(tuple(items))

    def _tuple_of(self, count: int) -> None:
        items = [self._stack.pop() for _ in range(count)]
        self._stack.append(tuple(reversed(items)))

    def _list(self) -> None:
        self._stack.append(LIST)

    def _append(self) -> None:
        self._stack.pop()
        self._expect(LIST)

    def _appends(self) -> None:
        self._to_mark()
        self._expect(LIST)

    def _dict(self) -> None:
        self._stack.append([])

    def _setitem(self) -> None:
        value, key = self._stack.pop(), self._stack.pop()
        self._keep_items([key, value])

    def _setitems(self) -> None:
        self._keep_items(self._to_mark())

    def _keep_items(self, items: list[Any]) -> None:
        """Of a dict with one item it is known which; _with_state and _build look at those."""
        top = self._stack[-1]
        if type(top) is list:
            top[:] = items if len(items) == 2 and not top else [LEAF] * 4
        elif self._ours and top is not ORDERED:
            raise _Refused(f"items put into {_show(top)}")

    def _expect(self, kind: Kind) -> None:
        if self._stack[-1] is not kind and self._ours:
            raise _Refused(f"{_show(self._stack[-1])} where {kind!r} belongs")

    # --- calls ---

    def _newobj(self) -> None:
        self._stack.pop()
        self._stack.pop()
        self._leaf()

    def _build(self) -> None:
        state = self._stack.pop()
        self._expect(ORDERED)
        if self._ours and not (type(state) is list and len(state) == 2 and state[0] == "_metadata"):
            raise _Refused("attributes other than _metadata")

    def _reduce(self) -> None:
        arguments, function = self._stack.pop(), self._stack.pop()
        left = made(function, arguments)
        if left is None and self._ours:
            raise _Refused(f"a call of {_show(function)}")
        self._stack.append(left or LEAF)

    def _storage(self) -> None:
        match self._stack.pop():
            case ("storage", Global() as kind, str(key), str(), int(count)) if kind in self._itemsizes:
                itemsize = self._itemsizes[kind]
            case _:
                raise _Refused("something that is not a storage in a storage's place")
        wanted = count * itemsize
        seen = wanted if self._records is None else self._records.get(f"data/{key}", -1)
        # torch.save may leave a few bytes over, of a storage that isn't a whole number of elements.
        if not (wanted == seen or (0 <= wanted <= seen and not self._ours)):
            raise _Refused(f"{wanted} bytes in data/{key[:20]}, which has {seen}")
        untyped = kind.endswith("UntypedStorage")
        self._stack.append(Storage(seen, None if untyped else itemsize))


def _show(item: object) -> str:
    """Never the repr of a tuple: in v1 it may unfold without end."""
    return str(item)[:100] if isinstance(item, (Global, Kind)) else f"a {type(item).__name__}"


_Method = Callable[[_Checker], None]
_OURS: Final[dict[int, _Method]] = {
    0x80: _Checker._proto, 0x4E: _Checker._leaf, 0x88: _Checker._leaf, 0x89: _Checker._leaf,
    0x4B: _Checker._int1, 0x4D: _Checker._int2, 0x4A: _Checker._int4, 0x8A: _Checker._long,
    0x47: _Checker._float, 0x58: _Checker._text, 0x63: _Checker._global, 0x71: _Checker._put1,
    0x72: _Checker._put4, 0x68: _Checker._get1, 0x6A: _Checker._get4, 0x28: _Checker._mark,
    0x29: _Checker._empty_tuple, 0x74: _Checker._tuple, 0x85: lambda c: c._tuple_of(1),
    0x86: lambda c: c._tuple_of(2), 0x87: lambda c: c._tuple_of(3), 0x5D: _Checker._list,
    0x65: _Checker._appends, 0x7D: _Checker._dict, 0x75: _Checker._setitems, 0x52: _Checker._reduce,
    0x62: _Checker._build, 0x51: _Checker._storage,
}  # fmt: skip
#: What torch.save writes besides.
_ANY: Final[dict[int, _Method]] = _OURS | {
    0x61: _Checker._append, 0x73: _Checker._setitem, 0x81: _Checker._newobj, 0x8F: _Checker._leaf,
    0x55: _Checker._short_text,
}  # fmt: skip
