"""Descriptors as bytes: exact both ways, and nothing but ProtocolError for anything else."""

from __future__ import annotations

import math
import random
import struct
import tracemalloc
from collections import OrderedDict
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptd.errors import ProtocolError, UnstorableState
from ckptd.limits import MAX_TREE_DEPTH
from ckptd.snapshot import descriptor_codec
from ckptd.snapshot.descriptor import Descriptor, Sharding, TensorSpec
from ckptd.snapshot.descriptor_codec import decode, encode
from ckptd.snapshot.values import DeviceValue, DtypeValue, PackedNumbers, SizeValue, TensorRef
from plain_state import of_rows

#: Where these fields lie in the encoded array.
FORMAT_AT, TENSORS_AT, ROWS_AT, OPS_AT, BEGINS_AT = map(
    descriptor_codec._Envelope.__struct_fields__.index, ("format", "tensors", "rows", "ops", "begins_line")
)

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
INTS = st.one_of(
    st.integers(-300, 300), st.integers(-(2**70), 2**70), st.sampled_from([2**63, -(2**63), 2**63 - 1])
)
SCALARS = st.one_of(st.none(), st.booleans(), INTS, st.floats(), TEXT, st.binary(max_size=20))
KEYS = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3).map(tuple), max_leaves=4)
LEAVES = st.one_of(
    SCALARS, st.complex_numbers(), st.sets(KEYS, max_size=4),
    st.builds(SizeValue, st.lists(st.integers(0, 2**40), max_size=4).map(tuple)),
    st.sampled_from([DtypeValue("bfloat16"), DeviceValue("cuda:1"), DeviceValue("cpu")]),
    st.builds(lambda xs: PackedNumbers("d", struct.pack(f"<{len(xs)}d", *xs)),
    st.lists(st.floats(), max_size=9)),
    st.builds(
        lambda xs: PackedNumbers("q", struct.pack(f"<{len(xs)}q", *xs)),
        st.lists(st.integers(-(2**63), 2**63 - 1), max_size=9),
    ),
)  # fmt: skip


def _with_metadata(items: list[Any], metadata: Any) -> Any:
    result = OrderedDict(items)
    result._metadata = metadata  # type: ignore[attr-defined]
    return result


def _containers(inner: Any) -> Any:
    return st.one_of(
        st.lists(inner, max_size=5),
        st.lists(inner, max_size=5).map(tuple),
        st.dictionaries(KEYS, inner, max_size=5),
        st.lists(st.tuples(KEYS, inner), max_size=5).map(OrderedDict),
        st.builds(
            _with_metadata,
            st.lists(st.tuples(TEXT, inner), max_size=3),
            inner.filter(lambda x: x is not None),
        ),
    )


TREES = st.recursive(LEAVES, _containers, max_leaves=20)


def exact(value: Any) -> Any:
    """value as nested tuples that are equal only when type, order and every bit are."""
    kind = type(value).__name__
    if isinstance(value, float):
        return (kind, struct.pack("<d", value))
    if isinstance(value, complex):
        return (kind, struct.pack("<2d", value.real, value.imag))
    if isinstance(value, dict):
        return (
            kind,
            [(exact(k), exact(v)) for k, v in value.items()],
            exact(getattr(value, "_metadata", None)),
        )
    if isinstance(value, list | tuple):
        return (kind, [exact(item) for item in value])
    if isinstance(value, set):
        return (kind, sorted(map(repr, map(exact, value))))
    return (kind, repr(value))


def described(value: Any) -> Descriptor:
    return of_rows({"x": value}, [], 0)


def rows_of(count: int) -> list[TensorSpec]:
    return [
        TensorSpec(
            path=("m", i), dtype="float32", itemsize=4, shape=(2, 3), stride=None, offset=64 * i, nbytes=24
        )
        for i in range(count)
    ]


def with_rows(*rows: TensorSpec, data_bytes: int = 1000) -> Descriptor:
    return of_rows({"m": [TensorRef(i) for i in range(len(rows))]}, list(rows), data_bytes)


ROW = rows_of(1)[0]


@settings(max_examples=120)
@given(TREES)
def test_any_plain_tree_comes_back_in_value_type_and_order(tree: Any) -> None:
    assert exact(decode(encode(described(tree))).state) == exact({"x": tree})


def test_all_fields_come_back() -> None:
    rows = rows_of(3)
    rows[1] = msgspec.structs.replace(rows[1], stride=(1, 2), requires_grad=True, parameter=True)
    rows[2] = msgspec.structs.replace(rows[2], offset=0, alias_of=0)
    d = of_rows(
        {"m": OrderedDict(a=TensorRef(0), b=[TensorRef(1), TensorRef(2), TensorRef(2)])}, rows, 500,
        Sharding(by="round-robin", shards=5), metrics={"loss": math.inf, "nan": math.nan},
        versions={"torch": "2"},
        base_sequence=41, base_snapshot=6, snapshot=9, run="gpt-2",
    )  # fmt: skip
    back = decode(memoryview(encode(d)))
    assert exact(back.state) == exact(d.state)
    assert exact(back.metrics) == exact(d.metrics)
    assert replace(back, metrics={}) == replace(d, metrics={})
    assert type(back.saved_at) is float


def test_nan_payloads_and_signed_zeros_survive() -> None:
    patterns = [0x7FF8000000000001, 0xFFF0000000000123, 0x8000000000000000, 0x7FF0000000000000, 1]
    floats = [struct.unpack("<d", struct.pack("<Q", bits))[0] for bits in patterns]
    back = decode(encode(described(floats))).state["x"]
    assert [struct.unpack("<Q", struct.pack("<d", value))[0] for value in back] == patterns


@pytest.mark.parametrize(
    ("value", "where"),
    [
        ({"a": [0, "\ud800"]}, "state['x']['a'][1]"),
        ({"a\ud800": 1}, "state['x']"),
        ({1: 0, "a\ud800": 1}, "state['x']"),
        ({"a": object()}, "state['x']['a']"),
        ((1, {2, 1j, frozenset()}), "state['x'][1]"),
        ({1j: 0}, "state['x']"),
        ({"big": 2**2040}, "state['x']['big']"),
        ([bytearray(b"x")], "state['x'][0]"),
        (OrderedDict(a=OrderedDict(b=print)), "state['x']['a']['b']"),
        (PackedNumbers("d", b"1234567"), "state['x']"),
        (DtypeValue(3), "state['x']"),  # type: ignore[arg-type]
        ({"s": SizeValue((-1,))}, "state['x']['s']"),
        (type("L", (list,), {})(), "state['x']"),
        (True.__class__, "state['x']"),
    ],
)
def test_what_has_no_exact_form_is_refused_by_key_path(value: Any, where: str) -> None:
    with pytest.raises(UnstorableState) as caught:
        encode(described(value))
    assert caught.value.where == where


def nested(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


def test_depth_is_limited_when_writing_and_when_reading() -> None:
    deepest = MAX_TREE_DEPTH - 1  # the state's own dict is one level
    assert decode(encode(described(nested(deepest)))).state["x"] == nested(deepest)
    with pytest.raises(UnstorableState, match="nested too deep"):
        encode(described(nested(deepest + 1)))


def test_the_longest_integers_that_can_be_read_back_are_kept() -> None:
    edges = [2**2039 - 1, -(2**2039), 2**63, -(2**63) - 1, 2**64]
    assert decode(encode(described(edges))).state["x"] == edges


@pytest.mark.parametrize(
    "row",
    [
        msgspec.structs.replace(ROW, dtype="int4", itemsize=1, nbytes=6),
        msgspec.structs.replace(ROW, dtype="float32\nos", itemsize=4),
        msgspec.structs.replace(ROW, itemsize=8),
    ],
)
def test_a_dtype_no_archive_can_hold_is_refused(row: TensorSpec) -> None:
    with pytest.raises(UnstorableState, match="dtype"):
        encode(with_rows(row))


@pytest.mark.parametrize(
    "rows",
    [
        [msgspec.structs.replace(ROW, offset=990)],
        [msgspec.structs.replace(ROW, offset=-1)],
        [msgspec.structs.replace(ROW, offset=-1, shape=(0,), nbytes=0)],
        [msgspec.structs.replace(ROW, stride=(-1, -1), shape=(0, 2), nbytes=0)],
        [msgspec.structs.replace(ROW, shape=(2, -3))],
        [msgspec.structs.replace(ROW, shape=(1,) * 65)],
        [msgspec.structs.replace(ROW, stride=(3,))],
        [msgspec.structs.replace(ROW, stride=(1, 1))],
        [msgspec.structs.replace(ROW, stride=(1, 3))],
        [msgspec.structs.replace(ROW, stride=(-1, 2))],
        [msgspec.structs.replace(ROW, stride=(2**62, 2))],
        [msgspec.structs.replace(ROW, shape=(2**40, 2**40))],
        [msgspec.structs.replace(ROW, path=())],
        [msgspec.structs.replace(ROW, path=("m",) * 101)],
        [msgspec.structs.replace(ROW, dtype="int64", itemsize=8, shape=(3,), requires_grad=True)],
        [msgspec.structs.replace(ROW, alias_of=0)],
        [msgspec.structs.replace(ROW, alias_of=7)],
        [ROW, msgspec.structs.replace(ROW, path=("m", 1), offset=20)],
        [ROW, msgspec.structs.replace(ROW, offset=64)],
        [ROW, msgspec.structs.replace(ROW, path=("m", 1), alias_of=0, offset=64)],
        [ROW, msgspec.structs.replace(ROW, path=("m", 1), alias_of=0, shape=(3, 2))],
        [ROW, msgspec.structs.replace(ROW, path=("m", 1), alias_of=0, dtype="int32")],
        [
            ROW,
            msgspec.structs.replace(ROW, path=("m", 1), alias_of=0),
            msgspec.structs.replace(ROW, path=("m", 2), alias_of=1),
        ],
    ],
)
def test_rows_that_do_not_fit_each_other_or_the_data_are_refused(rows: list[TensorSpec]) -> None:
    data = encode(with_rows(*rows))
    with pytest.raises(ProtocolError):
        decode(data)


def test_paths_that_python_calls_equal_are_two_paths() -> None:
    rows = [
        msgspec.structs.replace(ROW, path=("m", key), offset=64 * i)
        for i, key in enumerate([1, True, 1.0, "1"])
    ]
    assert [type(row.path[1]) for row in decode(encode(with_rows(*rows))).tensors] == [int, bool, float, str]


@pytest.mark.parametrize(
    "changes",
    [
        {"run": "../x"}, {"client_id": "0" * 31}, {"client_id": "G" * 32}, {"snapshot": 0}, {"step": -1},
        {"saved_at": math.nan}, {"saved_at": math.inf}, {"run_seconds": -1.0}, {"base_sequence": -1},
        {"begins_line": True, "base_sequence": 3}, {"begins_line": True, "base_sequence": 0},
        {"base_snapshot": -1}, {"base_snapshot": 5, "snapshot": 5}, {"data_bytes": -1},
        {"data_bytes": 2**63}, {"metrics": {"a": 1}}, {"metrics": {1: 1.0}},
        {"metrics": {str(i): 0.0 for i in range(1001)}},
        {"versions": {"a": 1}}, {"state": [1]}, {"state": {"schema": 1}}, {"state": {"step": 1}},
        {"state": {"wall_saved_at": 1}},
        {"state": {"m": TensorRef(0)}}, {"state": OrderedDict()},
    ],
)  # fmt: skip
def test_fields_that_cannot_be_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ProtocolError):
        decode(encode(replace(described(1), **changes)))


def test_that_it_begins_a_line_comes_back() -> None:
    assert decode(encode(described(1))).begins_line is False
    assert decode(encode(replace(described(1), begins_line=True))).begins_line is True


def test_what_an_earlier_version_sealed_begins_no_line() -> None:
    fields = msgspec.msgpack.decode(encode(replace(described(1), base_sequence=4)))
    fields[FORMAT_AT] = descriptor_codec.FORMAT_1
    old = decode(msgspec.msgpack.encode(fields[:BEGINS_AT]))
    assert (old.base_sequence, old.begins_line, old.state) == (4, False, {"x": 1})


@pytest.mark.parametrize("value", [None, 0, 1, 2, "true", b"", [], [True]])
def test_whether_it_begins_a_line_is_yes_or_no(value: Any) -> None:
    fields = msgspec.msgpack.decode(encode(described(1)))
    fields[BEGINS_AT] = value
    with pytest.raises(ProtocolError):
        decode(msgspec.msgpack.encode(fields))


def test_a_format_with_the_fields_of_another_is_refused() -> None:
    fields = msgspec.msgpack.decode(encode(described(1)))
    with pytest.raises(ProtocolError, match="begins_line"):
        decode(msgspec.msgpack.encode(fields[:BEGINS_AT]))
    fields[FORMAT_AT] = descriptor_codec.FORMAT_1
    with pytest.raises(ProtocolError, match="begins_line"):
        decode(msgspec.msgpack.encode(fields))


def test_a_row_that_nothing_refers_to_is_refused() -> None:
    with pytest.raises(ProtocolError, match="refs"):
        decode(encode(of_rows({"m": TensorRef(0)}, rows_of(2), 200)))


def sample() -> bytes:
    state = {
        "m": OrderedDict(a=TensorRef(0), b=TensorRef(1)),
        "n": [1, -2, 2**70, 1.5, 1 + 2j, "é", b"x", None, True],
        "s": {1, "a", (2, b"")},
        "v": [SizeValue((1, 2)), DtypeValue("int8"), DeviceValue("cpu"), PackedNumbers("d", b"8" * 16)],
        "d": {1: "a", (1, "b"): {}}, "l": list(range(40)),
    }  # fmt: skip
    state["m"]._metadata = {"": {"version": 1}}
    return encode(of_rows(state, rows_of(2), 200, metrics={"loss": 0.5}, versions={"torch": "2.6"}))


def decodes_or_refuses(data: bytes) -> bool:
    try:
        decode(data)
    except ProtocolError:
        return False
    return True


def test_every_changed_byte_decodes_to_a_descriptor_or_is_refused_as_such() -> None:
    good = sample()
    for at in range(len(good)):
        for value in (0, 1, 0x7F, 0x80, 0xDD, 0xFF, good[at] ^ 1):
            decodes_or_refuses(good[:at] + bytes((value,)) + good[at + 1 :])


def test_every_truncation_and_extension_is_refused() -> None:
    good = sample()
    assert not any(decodes_or_refuses(good[:length]) for length in range(len(good)))
    assert not decodes_or_refuses(good + b"\0")


def test_columns_swapped_or_filled_with_noise_are_refused_as_such() -> None:
    fields = msgspec.msgpack.decode(sample())
    columns = [i for i, field in enumerate(fields) if isinstance(field, bytes)]
    dice = random.Random(5)
    for _ in range(400):
        changed = list(fields)
        a, b = dice.sample(columns, 2)
        changed[a], changed[b] = changed[b], changed[a]
        c = dice.choice(columns)
        changed[c] = dice.randbytes(dice.choice([0, 8, 64, len(changed[c])]))
        decodes_or_refuses(msgspec.msgpack.encode(changed))


@settings(max_examples=200)
@given(st.binary(max_size=200))
def test_noise_is_refused(data: bytes) -> None:
    assert not decodes_or_refuses(data)


def test_lengths_that_lie_cost_no_memory() -> None:
    fields = msgspec.msgpack.decode(sample())
    huge = struct.pack("<q", 2**62)
    attacks = [b"\xdd\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\x91" * 100_000, b"\xdc\xff\xff" * 1000]
    for column, content in ((OPS_AT, bytes([op])) for op in (32, 33, 34, 10)):
        changed = list(fields)
        changed[column], changed[column + 1] = content, huge
        attacks.append(msgspec.msgpack.encode(changed))
    changed = list(fields)
    changed[TENSORS_AT] = 2**62
    attacks.append(msgspec.msgpack.encode(changed))
    tracemalloc.start()
    try:
        assert not any(decodes_or_refuses(data) for data in attacks)
        assert tracemalloc.get_traced_memory()[1] < 20_000_000
    finally:
        tracemalloc.stop()


def test_a_bomb_of_nested_lists_is_refused() -> None:
    fields = msgspec.msgpack.decode(sample())
    fields[OPS_AT], fields[OPS_AT + 1] = bytes([32]) * 100_000, struct.pack("<q", 1) * 100_000
    with pytest.raises(ProtocolError, match="nest"):
        decode(msgspec.msgpack.encode(fields))


def test_a_long_list_of_packed_numbers_stays_packed() -> None:
    packed = PackedNumbers("d", bytes(800_000))
    assert decode(encode(described({"losses": packed}))).state["x"]["losses"] == packed


def fields_of(data: bytes) -> list[Any]:
    return list(msgspec.msgpack.decode(data))


@pytest.mark.parametrize(
    ("at", "change"),
    [
        (FORMAT_AT, lambda field: "ckptd.snapshot.descriptor-4"),
        (TENSORS_AT, lambda field: field - 1),
        (TENSORS_AT, lambda field: field + 1),
        (ROWS_AT, lambda field: field + bytes(8)),
        (ROWS_AT, lambda field: field[:-8]),
        (ROWS_AT, lambda field: bytes(8) + field[8:]),
        (ROWS_AT, lambda field: struct.pack("<q", 1) + field[8:]),
        (ROWS_AT, lambda field: field[:8] + struct.pack("<q", -1) + field[16:]),
        (ROWS_AT, lambda field: field[:16] + struct.pack("<q", 8) + field[24:]),
        (ROWS_AT, lambda field: field[:32] + struct.pack("<q", -1) + field[40:]),
    ],
)
def test_an_envelope_that_does_not_fit_its_rows_is_refused(at: int, change: Any) -> None:
    fields = fields_of(sample())
    fields[at] = change(fields[at])
    assert not decodes_or_refuses(msgspec.msgpack.encode(fields))


def test_a_negative_number_of_tensors_is_refused() -> None:
    fields = fields_of(encode(described(1)))
    fields[TENSORS_AT] = -1
    assert not decodes_or_refuses(msgspec.msgpack.encode(fields))


def test_a_descriptor_over_the_limit_is_neither_written_nor_read(monkeypatch: pytest.MonkeyPatch) -> None:
    data = sample()
    monkeypatch.setattr("ckptd.snapshot.descriptor_codec.MAX_DESCRIPTOR_BYTES", len(data) - 1)
    with pytest.raises(ProtocolError, match="too long"):
        decode(data)
    with pytest.raises(UnstorableState, match="outside of tensors"):
        sample()
