"""Columns that no writer makes, each named for what is wrong with it."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import pytest

from ckptd.errors import ProtocolError
from ckptd.snapshot.tree_columns import Columns, Op
from ckptd.snapshot.tree_reader import TreeReader
from ckptd.snapshot.tree_writer import TreeWriter


def columns(
    *ops: int,
    ints: Sequence[int] = (),
    strings: Sequence[str] = (),
    blobs: Sequence[bytes] = (),
    **changes: bytes,
) -> Columns:
    parts = {
        "ops": bytes(ops), "ints": struct.pack(f"<{len(ints)}q", *ints), "floats": b"",
        "string_lengths": struct.pack(f"<{len(strings)}q", *map(len, strings)),
        "text": "".join(strings).encode(),
        "blob_lengths": struct.pack(f"<{len(blobs)}q", *map(len, blobs)), "blobs": b"".join(blobs), **changes,
    }  # fmt: skip
    return Columns(**parts)


def test_what_these_tests_vary_is_what_a_writer_makes() -> None:
    writer = TreeWriter()
    writer.write([{"a": "a"}, {5}, b"x"])
    ops = (Op.LIST, Op.DICT, Op.NAMES, Op.STR, Op.SET, Op.INT, Op.BYTES)
    assert writer.columns() == columns(*ops, ints=[3, 1, 0, 0, 1, 5], strings=["a"], blobs=[b"x"])


@pytest.mark.parametrize(
    ("bad", "seen"),
    [
        (lambda: columns(Op.NONE, Op.NONE), "left over"),
        (lambda: columns(Op.STR, ints=[-1], strings=["a"]), "string -1"),
        (lambda: columns(Op.NAMES, ints=[1, -1], strings=["a"]), "strings that"),
        (lambda: columns(Op.NAMES, ints=[2, 0], strings=["a"]), "strings that"),
        (lambda: columns(Op.REF, ints=[-1]), "row -1"),
        (lambda: columns(Op.LIST, ints=[-1]), "length"),
        (lambda: columns(Op.SIZE, ints=[1, -1]), "length"),
        (lambda: columns(Op.DICT, Op.NONE), "keys"),
        (lambda: columns(Op.DICT, Op.TUPLE, Op.LIST, Op.NONE, ints=[1, 0]), "keys"),
        (lambda: columns(Op.DICT, Op.TUPLE, Op.COMPLEX, Op.NONE, ints=[1], floats=bytes(16)), "keys"),
        (lambda: columns(Op.DICT, Op.NAMES, Op.NONE, Op.NONE, ints=[2, 0, 0], strings=["a"]), "twice"),
        (lambda: columns(Op.SET, Op.LIST, ints=[1, 0]), "opcode"),
        (lambda: columns(Op.SET, Op.DOUBLES, ints=[1], blobs=[b"8" * 8]), "opcode"),
        (lambda: columns(Op.SET, Op.NONE, Op.NONE, ints=[2]), "opcode"),
        (lambda: columns(Op.DOUBLES, blobs=[b"7" * 7]), "opcode"),
        (lambda: columns(Op.BIG, blobs=[b"1"]), "integer"),
        (lambda: columns(Op.BIG, blobs=[b"1" * 256]), "integer"),
        (lambda: columns(20, blobs=[b""]), "opcode 20"),
        (lambda: columns(99, Op.NONE), "opcode 99"),
        (lambda: columns(Op.NONE, ints=[], floats=b"1234567"), "7 bytes"),
        (lambda: columns(Op.STR, ints=[0], strings=["a"], text=b"ab"), "add up"),
        (lambda: columns(Op.STR, ints=[0], text=b"ab", string_lengths=struct.pack("<2q", 3, -1)), "add up"),
        (lambda: columns(Op.BYTES, blobs=[b"ab"], blob_lengths=struct.pack("<2q", 3, -1)), "add up"),
        (lambda: columns(*[Op.LIST] * 200, Op.NONE, ints=[1] * 200), "nesting"),
        (lambda: columns(*[Op.ODICT_META] * 200, Op.NONE), "nesting"),
    ],
)  # fmt: skip
def test_malformed_columns_are_refused(bad: Any, seen: str) -> None:
    with pytest.raises(ProtocolError, match=seen):
        read(bad())


def read(given: Columns) -> None:
    reader = TreeReader(given)
    reader.read()
    reader.finish()


def test_more_values_than_the_limit_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckptd.snapshot.tree_reader.MAX_TREE_NODES", 3)
    with pytest.raises(ProtocolError, match="4 values"):
        read(columns(*[Op.NONE] * 4))
