from __future__ import annotations

import hashlib
import json
import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ckptd.errors import CorruptCheckpoint, UnknownSchema
from ckptd.format.plan import plan_checkpoint
from ckptd.format.records import (
    CheckpointIndex,
    ShardRecord,
    index_from_bytes,
    index_to_bytes,
    read_index,
)
from ckptd.format.strict_json import canonical
from ckptd.format.table_rows import faults_in_files, table_from_bytes
from ckptd.format.tensor_table import canonical_table
from snapshots import descriptor

SHARDS = tuple(
    ShardRecord(
        shard=n,
        component="model",
        path=f"model.shard-{n:03d}.pt",
        bytes=10 + n,
        sha256=f"{n}" * 64,
        num_params=n,
    )
    for n in range(2)
)
INDEX = index_from_bytes(
    index_to_bytes(CheckpointIndex(
        run="default", run_id="a" * 32, client_id="b" * 32, snapshot=3, sequence=9, parent=4, step=1200,
        saved_at=1.25, lineage=((1, 4), (9, 9)), run_seconds=3.5,
        layout="sharded", num_shards=2, shards=SHARDS,
        meta_sha256="c" * 64, meta_bytes=5, tensors_sha256="d" * 64, tensors_bytes=6,
        metrics={"loss": math.nan, "gain": math.inf, "acc": 0.5}, versions={"torch": "2.6"},
    )), "index.json"
)  # fmt: skip


def changed(**fields: Any) -> bytes:
    """The index's bytes with other fields, canonical and with a right hash: only its sense is wrong."""
    obj = json.loads(index_to_bytes(INDEX)) | fields
    del obj["index_sha256"]
    obj = {name: value for name, value in obj.items() if value != "REMOVED"}
    return canonical(obj | {"index_sha256": hashlib.sha256(canonical(obj)).hexdigest()})


def refused(data: bytes) -> CorruptCheckpoint:
    with pytest.raises(CorruptCheckpoint) as caught:
        index_from_bytes(data, "run/step-000001200/index.json")
    assert "step-000001200" in caught.value.where
    return caught.value


def test_an_index_comes_back_with_metrics_that_are_no_json_numbers() -> None:
    back = index_from_bytes(index_to_bytes(INDEX), "")
    assert math.isnan(back.metrics["loss"])
    assert replace(back, metrics={}) == replace(INDEX, metrics={})
    assert (back.metrics["gain"], back.metrics["acc"]) == (math.inf, 0.5)
    json.loads(index_to_bytes(INDEX), parse_constant=lambda token: pytest.fail(f"{token} is not strict JSON"))


def test_any_changed_byte_of_an_index_shows() -> None:
    data = index_to_bytes(INDEX)
    for at in range(len(data)):
        for flip in (0x01, 0x20, 0x80):
            wrong = bytearray(data)
            wrong[at] ^= flip
            refused(bytes(wrong))
    for wrong_length in (data[:-1], data + b"\n", data + b" ", b" " + data, data[:100], b""):
        refused(wrong_length)


def test_another_spelling_is_refused_even_with_a_right_hash() -> None:
    line = f'  "index_sha256": "{INDEX.index_sha256}",\n'
    for old, new in (
        (b"\n}\n", b"\n} \n"),
        (b'"step": 1200', b'"step":  1200'),
        (b'"default"', b'"\\u0064efault"'),
    ):
        rest = index_to_bytes(INDEX).replace(old, new).replace(line.encode(), b"")
        spelled = index_to_bytes(INDEX).replace(old, new)
        assert spelled != index_to_bytes(INDEX)
        refused(spelled.replace(INDEX.index_sha256.encode(), hashlib.sha256(rest).hexdigest().encode()))


def test_the_helper_for_wrong_fields_makes_right_ones() -> None:
    assert index_from_bytes(changed(), "").sequence == INDEX.sequence


@pytest.mark.parametrize("name", sorted(json.loads(index_to_bytes(INDEX))))
def test_every_field_is_required(name: str) -> None:
    if name == "index_sha256":
        obj = json.loads(index_to_bytes(INDEX))
        del obj[name]
        refused(canonical(obj))
    else:
        refused(changed(**{name: "REMOVED"}))


@pytest.mark.parametrize("name", sorted(set(json.loads(index_to_bytes(INDEX))) - {"index_sha256", "parent"}))
def test_no_field_may_be_null_or_of_another_type(name: str) -> None:
    for wrong in (None, True, [None], {"x": None}, -1, "\x00" * 5000):
        refused(changed(**{name: wrong}))


@pytest.mark.parametrize(
    "wrong",
    [
        {"extra": 1},
        {"num_shards": 3},
        {"lineage": [[1, 4], [3, 9]]},
        {"lineage": [[1, 4]]},
        {"lineage": []},
        {"parent": 9},
        {"layout": "single"},
        {"run": "../x"},
        {"meta_sha256": None},
        {"meta_bytes": None},
        {"tensors_sha256": "d" * 63},
        {"world_size": 0},
    ],
)
def test_fields_that_can_not_be_true_together_are_refused(wrong: dict[str, Any]) -> None:
    refused(changed(**wrong))


@pytest.mark.parametrize(
    "path",
    [
        "../model.shard-000.pt",
        "/etc/passwd",
        "index.json",
        "meta.pt",
        "a/b.pt",
        "",
        ".",
        "model.shard-001.pt",
        "x",
    ],
)
def test_a_shard_that_is_not_where_it_belongs_is_refused(path: str) -> None:
    shards = json.loads(index_to_bytes(INDEX))["shards"]
    refused(changed(shards=[shards[0] | {"path": path}, shards[1]]))


def test_a_missing_hash_is_a_failure() -> None:
    shards = json.loads(index_to_bytes(INDEX))["shards"]
    for wrong in ({"sha256": ""}, {"sha256": None}, {"sha256": "Z" * 64}):
        refused(changed(shards=[shards[0] | wrong, shards[1]]))
    bare = {name: value for name, value in shards[0].items() if name != "sha256"}
    refused(changed(shards=[bare, shards[1]]))


@pytest.mark.parametrize("schema", ["ckpt.v1-index", "ckpt.v3-index", "", None, 7])
def test_an_unknown_schema_is_refused_by_its_name(schema: object) -> None:
    with pytest.raises(UnknownSchema) as caught:
        index_from_bytes(changed(schema=schema), "x")
    assert caught.value.seen == repr(schema)


@pytest.mark.parametrize("kind", ["link", "folder", "fifo", "long"])
def test_an_index_that_is_no_plain_small_file_is_refused(tmp_path: Path, kind: str) -> None:
    (tmp_path / "real.json").write_bytes(index_to_bytes(INDEX))
    index = tmp_path / "index.json"
    if kind == "link":
        index.symlink_to("real.json")
    elif kind == "folder":
        index.mkdir()
    elif kind == "fifo":
        os.mkfifo(index)
    else:
        index.write_bytes(b" " * (5 * 2**20))
    with pytest.raises(CorruptCheckpoint):
        read_index(tmp_path)


def test_an_index_is_read_by_path_and_by_descriptor(tmp_path: Path) -> None:
    (tmp_path / "index.json").write_bytes(index_to_bytes(INDEX))
    assert read_index(tmp_path).sequence == 9
    fd = os.open(tmp_path, os.O_RDONLY)
    try:
        assert read_index(fd, where="x").sequence == 9
    finally:
        os.close(fd)


# --- the table ------------------------------------------------------------------------------------

TABLE = plan_checkpoint(descriptor(1)).table
ROWS = json.loads(TABLE)["tensors"]


def test_the_planned_table_is_read_back() -> None:
    rows = table_from_bytes(TABLE, "")
    assert [row.key for row in rows] == [("model", "w"), ("model", "b")]
    assert [(row.dtype, row.shape, row.bytes) for row in rows] == [
        ("float32", (8, 8), 256),
        ("int64", (16,), 128),
    ]


def table(*rows: dict[str, Any], **more: Any) -> bytes:
    return canonical_table({"schema": "ckpt.v2-tensors", "tensors": list(rows)} | more)


@pytest.mark.parametrize(
    "wrong",
    [
        {"key": "model"}, {"key": [{"bool": 1}]}, {"key": [1.5]}, {"file": 3}, {"dtype": None},
        {"shape": [-1]},
        {"shape": [True]}, {"shape": [1] * 65}, {"stride": [1]}, {"offset": -1},
        {"offset": 2**63}, {"bytes": 255},
        {"bytes": 0}, {"alias_of": ["model", "nobody"]}, {"extra": 1},
    ],
)  # fmt: skip
def test_rows_that_can_not_be_are_refused(wrong: dict[str, Any]) -> None:
    table_from_bytes(table(ROWS[0]), "")
    with pytest.raises(CorruptCheckpoint):
        table_from_bytes(table(ROWS[0] | wrong), "")


def test_a_tensor_listed_twice_is_refused_but_keys_that_only_look_alike_are_not() -> None:
    with pytest.raises(CorruptCheckpoint):
        table_from_bytes(table(ROWS[0], ROWS[0]), "")
    alike = [ROWS[0] | {"key": ["model", key]} for key in (1, "1", {"bool": True}, {"float": (1.0).hex()})]
    assert len(table_from_bytes(table(*alike), "")) == 4


def test_a_table_in_another_spelling_or_of_another_schema_is_refused() -> None:
    for wrong in (TABLE.replace(b",", b", ", 1), TABLE[:-1], table(ROWS[0], more=1)):
        with pytest.raises(CorruptCheckpoint):
            table_from_bytes(wrong, "")
    with pytest.raises(UnknownSchema):
        table_from_bytes(table(schema="ckpt.v9-tensors"), "")


def test_rows_outside_of_the_files_are_faults() -> None:
    rows = table_from_bytes(TABLE, "")
    assert faults_in_files(rows, {"ckpt.pt": 10**6}) == []
    assert len(faults_in_files(rows, {"ckpt.pt": 10})) == 2
    assert len(faults_in_files(rows, {"other.pt": 10**6})) == 2
