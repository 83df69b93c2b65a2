"""The files of a checkpoint: which there are, what torch reads from them, and what the table says."""

from __future__ import annotations

import json
from collections import OrderedDict
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckptd.format.plan import CheckpointPlan, SlotRange, plan_checkpoint
from ckptd.format.table_rows import table_from_bytes
from ckptd.format.tensor_table import canonical_table
from ckptd.limits import MIB, SINGLE_FILE_BELOW_BYTES
from ckptd.snapshot import keypath
from ckptd.snapshot.descriptor import Descriptor, Sharding, TensorSpec
from ckptd.snapshot.descriptor_codec import decode, encode
from ckptd.snapshot.values import TensorRef
from plain_state import bytes_of, described, of_rows, write

SHARDINGS = [
    Sharding(shards=1), Sharding(shards=3), Sharding(by="round-robin", shards=2),
    Sharding(by="param-group", shards=3), Sharding(shards=1000),
]  # fmt: skip


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wte = torch.nn.Embedding(11, 6)
        self.body = torch.nn.Linear(6, 6)
        self.norm = torch.nn.LayerNorm(6)
        self.head = torch.nn.Linear(6, 11, bias=False)
        self.head.weight = self.wte.weight
        self.register_buffer("none", torch.empty(0, 3))


def training_state() -> dict[str, Any]:
    model = Tied()
    moments = {
        name: {"step": torch.tensor(3.0), "exp_avg": torch.randn_like(p)}
        for name, p in model.named_parameters()
    }
    return {
        "model": model.state_dict(),
        "optimizer": {"state": moments, "param_groups": [{"lr": 0.1, "params": list(moments)}]},
        "ema": {"wte": model.wte.weight.detach()},
        "train": {"step": 7, "losses": [1.0, 2.0]},
        "rng": {"torch": torch.get_rng_state()},
        "odd-name": torch.randn(3),
    }


def load(folder: Path, name: str, *, mmap: bool = False) -> Any:
    return torch.load(folder / name, weights_only=True, mmap=mmap)


def by_name(plan: CheckpointPlan, component: str) -> list[str]:
    return [file.path for file in plan.files if file.component == component]


@pytest.mark.parametrize("mmap", [False, True])
@pytest.mark.parametrize("how", SHARDINGS)
def test_shards_merge_into_a_state_dict_without_us(how: Sharding, mmap: bool, tmp_path: Path) -> None:
    state = training_state()
    descriptor, data = described(state, how)
    plan = plan_checkpoint(decode(encode(descriptor)))
    write(plan, data, tmp_path)
    merged: dict[str, torch.Tensor] = {}
    for path in by_name(plan, "model"):
        merged.update(load(tmp_path, path, mmap=mmap)["tensors"])
    assert merged.keys() == state["model"].keys()
    assert all(torch.equal(merged[key], state["model"][key]) for key in merged)
    assert merged["wte.weight"].data_ptr() == merged["head.weight"].data_ptr()
    Tied().load_state_dict(merged)


@pytest.mark.parametrize("how", SHARDINGS)
def test_a_shard_says_what_it_is(how: Sharding, tmp_path: Path) -> None:
    descriptor, data = described(training_state(), how)
    plan = plan_checkpoint(descriptor)
    write(plan, data, tmp_path)
    assert plan.layout == "sharded"
    assert plan.files[0].path == "meta.pt"
    for file in plan.files[1:]:
        payload = load(tmp_path, file.path)
        assert list(payload) == ["schema", "wall_saved_at", "component", "shard", "tensors", "keys"]
        assert payload["schema"] == "ckpt-shard.v2"
        assert payload["wall_saved_at"] == descriptor.saved_at
        assert (payload["component"], payload["shard"]) == (file.component, file.shard)
        assert file.path == f"{file.component}.shard-{file.shard:03d}.pt"
        assert payload["keys"] == list(payload["tensors"])
        storages = {t.data_ptr(): t.numel() for t in payload["tensors"].values()}
        assert file.num_params == sum(storages.values())


def test_meta_has_everything_else_and_a_tag_for_each_tensor_that_is_in_a_shard(tmp_path: Path) -> None:
    state = training_state()
    descriptor, data = described(state, Sharding(shards=2))
    plan = plan_checkpoint(descriptor)
    write(plan, data, tmp_path)
    meta = load(tmp_path, "meta.pt")
    assert list(meta) == ["schema", "wall_saved_at", "step", *state]
    assert (meta["schema"], meta["step"]) == ("ckpt.v2-sharded", 7)
    assert meta["train"] == state["train"]
    assert torch.equal(meta["rng"]["torch"], state["rng"]["torch"])
    assert torch.equal(meta["odd-name"], state["odd-name"])
    assert type(meta["model"]) is OrderedDict
    assert meta["model"]._metadata == state["model"]._metadata
    tag = meta["optimizer"]["state"]["body.weight"]["exp_avg"]
    assert (list(tag), tag["__ckptd__"]) == (["__ckptd__", "file", "key"], "tensor")
    assert tag["key"] == '["state","body.weight","exp_avg"]'
    found = load(tmp_path, tag["file"])["tensors"][tag["key"]]
    assert torch.equal(found, state["optimizer"]["state"]["body.weight"]["exp_avg"])


def test_a_tie_across_components_is_stored_in_both(tmp_path: Path) -> None:
    state = training_state()
    descriptor, data = described(state, Sharding(shards=1))
    write(plan_checkpoint(descriptor), data, tmp_path)
    ema = load(tmp_path, "ema.shard-000.pt")["tensors"]["wte"]
    assert torch.equal(ema, state["ema"]["wte"])
    rows = {row.key: row for row in table_from_bytes((tmp_path / "tensors.json").read_bytes(), "t")}
    row = rows[("ema", "wte")]
    assert (row.file, row.alias_of) == ("ema.shard-000.pt", ("model", "wte.weight"))


@pytest.mark.parametrize("how", [Sharding(), *SHARDINGS])
def test_the_table_says_where_the_bytes_of_every_tensor_are(how: Sharding, tmp_path: Path) -> None:
    state = training_state()
    descriptor, data = described(state, how)
    plan = plan_checkpoint(descriptor)
    write(plan, data, tmp_path)
    rows = table_from_bytes(plan.table, "tensors.json")
    assert [row.key for row in rows] == [spec.path for spec in descriptor.tensors]
    for row, spec in zip(rows, descriptor.tensors, strict=True):
        content = (tmp_path / row.file).read_bytes()[row.offset : row.offset + row.bytes]
        assert content == data[spec.offset : spec.offset + spec.nbytes]
        assert (row.dtype, row.shape, row.stride) == (spec.dtype, spec.shape, spec.stride)
    weight = next(row for row in rows if row.key == ("model", "body.weight"))
    content = (tmp_path / weight.file).read_bytes()[weight.offset : weight.offset + weight.bytes]
    assert content == bytes_of(state["model"]["body.weight"])


def test_the_table_is_canonical() -> None:
    descriptor, _ = described({"m": {1: torch.ones(2), "1": torch.ones(2, 3).t()}})
    table = plan_checkpoint(descriptor).table
    assert canonical_table(json.loads(table)) == table
    assert [keypath.from_json(row["key"]) for row in json.loads(table)["tensors"]] == [("m", 1), ("m", "1")]
    assert json.loads(table)["tensors"][1]["stride"] == [1, 3]


def sized(*components: tuple[str, list[int]], how: Sharding | None = None) -> Descriptor:
    rows: list[TensorSpec] = []
    tree: dict[str, Any] = {}
    at = 0
    for name, sizes in components:
        tree[name] = {}
        for i, nbytes in enumerate(sizes):
            tree[name][f"t{i}"] = TensorRef(len(rows))
            rows.append(
                TensorSpec(
                    path=(name, f"t{i}"), dtype="uint8", itemsize=1, shape=(nbytes,), stride=None, offset=at,
                    nbytes=nbytes,
                )
            )  # fmt: skip
            at += nbytes
    return of_rows(tree, rows, at, how)


def test_auto_makes_one_file_below_64_mib_and_shards_from_there_on() -> None:
    small = plan_checkpoint(sized(("model", [SINGLE_FILE_BELOW_BYTES - 1])), cores=4)
    assert (small.layout, [file.path for file in small.files]) == ("single", ["ckpt.pt"])
    assert (small.files[0].component, small.files[0].num_params) == ("ckpt", SINGLE_FILE_BELOW_BYTES - 1)
    large = plan_checkpoint(sized(("model", [SINGLE_FILE_BELOW_BYTES])), cores=4)
    assert [file.path for file in large.files] == ["meta.pt", "model.shard-000.pt"]
    spread = plan_checkpoint(sized(("model", [16 * MIB] * 8)), cores=4)
    assert len(spread.files) == 1 + 4


def test_a_tie_counts_once_in_what_auto_adds_up() -> None:
    d = sized(("model", [40 * MIB]), ("ema", [0]))
    alias = msgspec.structs.replace(d.tensors[0], path=("ema", "t0"), alias_of=0)
    assert plan_checkpoint(replace(d, tensors=(d.tensors[0], alias))).layout == "single"


def test_with_auto_a_component_below_one_mib_stays_in_meta() -> None:
    d = sized(
        ("model", [100 * MIB]), ("ema", [MIB - 1]), ("big", [MIB]), ("rng", [5 * MIB]), ("Odd", [5 * MIB])
    )
    assert {file.component for file in plan_checkpoint(d, cores=1).files} == {"meta", "model", "big"}


def test_a_number_always_means_the_sharded_layout() -> None:
    plan = plan_checkpoint(sized(("model", [1]), ("empty", [0, 0]), how=Sharding(shards=1)))
    assert [file.path for file in plan.files] == ["meta.pt", "model.shard-000.pt"]
    nothing = plan_checkpoint(sized(how=Sharding(shards=1)))
    assert (nothing.layout, [file.path for file in nothing.files]) == ("sharded", ["meta.pt"])


def test_every_byte_of_the_slot_that_is_a_tensor_is_written_once() -> None:
    d = sized(("model", [5, 7, 0, 100_000]), ("optimizer", [3, 9]), ("rng", [2]), how=Sharding(shards=2))
    ranges = [
        part for file in plan_checkpoint(d).files for part in file.segments if isinstance(part, SlotRange)
    ]
    wanted = sorted((row.offset, row.nbytes) for row in d.tensors if row.nbytes)
    assert sorted((part.offset, part.nbytes) for part in ranges) == wanted


def test_a_row_met_in_two_components_is_found_from_both(tmp_path: Path) -> None:
    descriptor, data = described({"model": {"w": torch.arange(3.0)}, "notes": {}}, Sharding(shards=1))
    descriptor.state["notes"]["same"] = TensorRef(0)
    write(plan_checkpoint(decode(encode(descriptor))), data, tmp_path)
    tag = load(tmp_path, "meta.pt")["notes"]["same"]
    assert load(tmp_path, tag["file"])["tensors"][tag["key"]].tolist() == [0.0, 1.0, 2.0]


def test_a_component_that_is_one_tensor_has_a_shard(tmp_path: Path) -> None:
    descriptor, data = described({"mask": torch.arange(3)}, Sharding(shards=1))
    write(plan_checkpoint(descriptor), data, tmp_path)
    assert load(tmp_path, "meta.pt")["mask"] == {
        "__ckptd__": "tensor",
        "file": "mask.shard-000.pt",
        "key": "[]",
    }
    assert load(tmp_path, "mask.shard-000.pt")["tensors"]["[]"].tolist() == [0, 1, 2]


TENSORS = st.builds(
    lambda dtype, shape, transpose: (torch.rand(shape) * 100).to(dtype).movedim(0, -1 if transpose else 0),
    st.sampled_from([torch.float32, torch.bfloat16, torch.uint16, torch.bool, torch.float8_e5m2]),
    st.lists(st.integers(0, 6), min_size=1, max_size=4), st.booleans(),
)  # fmt: skip
NAMES = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
COMPONENTS = st.dictionaries(
    st.sampled_from(["model", "optimizer", "a", "my-model", "é", "rng"]),
    st.recursive(
        TENSORS, lambda inner: st.dictionaries(NAMES | st.integers(), inner, max_size=4), max_leaves=6
    ),
    max_size=4,
)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(state=COMPONENTS, how=st.sampled_from([Sharding(), *SHARDINGS]))
def test_any_state_of_tensors_is_found_again(state: dict[str, Any], how: Sharding, tmp_path: Path) -> None:
    descriptor, data = described(state, how)
    plan = plan_checkpoint(decode(encode(descriptor)))
    write(plan, data, tmp_path)
    files = {file.path: load(tmp_path, file.path) for file in plan.files}
    top = files[plan.files[0].path]
    assert list(top)[3:] == list(state)
    for key, value in state.items():
        check_same(top[key], value, files)


def check_same(found: Any, wanted: Any, files: dict[str, Any]) -> None:
    if isinstance(wanted, dict):
        assert list(map(repr, found)) == list(map(repr, wanted))
        for key in wanted:
            check_same(found[key], wanted[key], files)
        return
    if isinstance(found, dict):
        found = files[found["file"]]["tensors"][found["key"]]
    assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
    assert bytes_of(found.contiguous()) == bytes_of(wanted.contiguous())
