from __future__ import annotations

import copy
import random
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import ckptd
from ckptd.errors import InvalidArgument, RestoreFailed, StateMismatch
from ckptd.snapshot.descriptor import Sharding
from ckptd.tensors.restoring import apply_state
from round_trip import LAYOUT_IDS, LAYOUTS, same, through_disk

Pair = namedtuple("Pair", "a b")


class Counters:
    def __init__(self, n: int = 0) -> None:
        self.n = n

    def state_dict(self) -> dict[str, int]:
        return {"n": self.n}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.n = state["n"]


class Fails(Counters):
    def load_state_dict(self, state: dict[str, int]) -> None:
        raise KeyError("x")


class Refuses(Counters):
    def load_state_dict(self, state: dict[str, int]) -> None:
        raise StateMismatch("not mine")


def data() -> dict[str, Any]:
    return {
        "dict": {"a": 1, "deep": {"list": [1, [2, {"x": 3}]], "none": None}},
        "floats": [0.5] * 100,
        "tensor": torch.arange(4.0),
        "tensors": [torch.ones(2), {"t": torch.zeros(3)}],
        "tuple": (1, torch.ones(2), [3]),
        "pair": Pair(1, torch.ones(1)),
        "plain pair": Pair(1, 2),
        "array": np.arange(3),
        "set": {1, 2},
        "deque": deque([1, 2], maxlen=4),
        "bytes": bytearray(b"ab"),
        "default": defaultdict(list, {"k": [1]}),
        "ordered": OrderedDict(b=1, a=2),
        "counter": Counter("aab"),
        "scalar": 5,
        "text": "x",
    }


def changed(value: dict[str, Any]) -> dict[str, Any]:
    value["dict"]["a"] = 9
    value["dict"]["deep"]["list"][1][1]["x"] = 9
    value["dict"]["deep"]["list"][0] = 9
    value["dict"]["deep"]["none"] = 9
    value["floats"].append(9.0)
    value["tensor"].fill_(9)
    value["tensors"][0].fill_(9)
    value["tensors"][1]["t"].fill_(9)
    value["tuple"][1].fill_(9)
    value["tuple"][2].append(9)
    value["pair"].b.fill_(9)
    value["plain pair"] = Pair(9, 9)
    value["array"][:] = 9
    value["set"].add(9)
    value["deque"].append(9)
    value["bytes"].extend(b"9")
    value["default"]["k"].append(9)
    value["ordered"].move_to_end("b")
    value["counter"]["a"] += 9
    value["scalar"], value["text"] = 9, "9"
    return value


@pytest.mark.parametrize("sharding", LAYOUTS, ids=LAYOUT_IDS)
def test_plain_data_is_restored_in_place_and_scalars_in_their_parent(
    sharding: Sharding, tmp_path: Path
) -> None:
    state = {"data": data(), "top": 3}
    loaded = through_disk(tmp_path, state, sharding)
    live = state["data"]
    held = {name: value for name, value in live.items() if name not in ("scalar", "text", "plain pair")}
    inner = live["dict"]["deep"]["list"], live["dict"]["deep"]["list"][1][1], live["tuple"][2]  # type: ignore[index]
    changed(live)  # type: ignore[arg-type]
    state["top"] = 9
    apply_state(state, loaded)
    assert same(state, {"data": data(), "top": 3})
    assert all(live[name] is value for name, value in held.items() if name != "tuple")  # type: ignore[index]
    assert live["dict"]["deep"]["list"] is inner[0]  # type: ignore[index]
    assert live["dict"]["deep"]["list"][1][1] is inner[1]  # type: ignore[index]
    assert live["tuple"][2] is inner[2]  # type: ignore[index]


def test_a_tuple_with_a_changed_number_keeps_its_tensor(tmp_path: Path) -> None:
    tensor = torch.ones(2)
    state: dict[str, Any] = {"x": (1, tensor)}
    loaded = through_disk(tmp_path, state)
    tensor.fill_(5)
    state["x"] = (2, tensor)
    apply_state(state, loaded)
    assert state["x"][0] == 1
    assert state["x"][1] is tensor
    assert tensor.tolist() == [1, 1]


def test_data_that_grew_since_the_start_comes_back_whole(tmp_path: Path) -> None:
    saved = {
        "d": {
            "losses": [1.0, 2.0],
            "seen": {"a": 1, "b": {"c": 2}},
            "history": [torch.ones(1), torch.zeros(2)],
        }
    }
    loaded = through_disk(tmp_path, saved)
    fresh: dict[str, Any] = {"d": {"losses": [], "seen": {}, "history": []}}
    apply_state(fresh, loaded)
    assert same(fresh, saved)


def test_data_that_shrank_comes_back_short(tmp_path: Path) -> None:
    loaded = through_disk(tmp_path, {"d": {"losses": [1.0], "rows": [[1]]}})
    live: dict[str, Any] = {"d": {"losses": [1.0, 2.0], "rows": [[1], [2]]}}
    apply_state(live, loaded)
    assert live == {"d": {"losses": [1.0], "rows": [[1]]}}


def module_state() -> dict[str, Any]:
    return {"model": nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)), "n": {"k": 1}, "c": Counters(4)}


@pytest.mark.parametrize("sharding", LAYOUTS, ids=LAYOUT_IDS)
def test_modules_are_restored_in_place_with_their_buffers(sharding: Sharding, tmp_path: Path) -> None:
    state = module_state()
    state["model"](torch.randn(5, 3))
    loaded = through_disk(tmp_path, state, sharding)
    fresh = module_state()
    held = dict(fresh["model"].named_parameters())
    report = apply_state(fresh, loaded)
    assert same(fresh["model"].state_dict(), state["model"].state_dict())
    assert all(held[name] is p for name, p in fresh["model"].named_parameters())
    assert all(p.requires_grad and p.is_leaf for p in fresh["model"].parameters())
    assert (report.missing, report.unused) == ([], [])


def frozen_copy(state: dict[str, Any]) -> Any:
    return {
        "model": {k: v.clone() for k, v in state["model"].state_dict().items()},
        "n": copy.deepcopy(state["n"]),
        "c": state["c"].n,
    }


MISFITS: dict[str, Any] = {
    r"state\['model'\]\['0.weight'\] has shape \[3, 3\], live \[4, 3\]": {
        "model": nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    },
    r"state\['model'\]\['2.weight'\] is not in the checkpoint": {
        "model": nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(1, 1))
    },
    r"state\['model'\]\['1.weight'\] is in the checkpoint, not in the live": {
        "model": nn.Sequential(nn.Linear(3, 3))
    },
    r"\['0.weight'\] is torch.float32, live torch.float64": {
        "model": nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).double()
    },
    r"state\['ema'\] is not in the checkpoint": {"ema": Counters()},
    r"state\['n'\]\['new'\] is not in the checkpoint": {"n": {"k": 1, "new": torch.ones(1)}},
    r"state\['n'\] is builtins.dict in the checkpoint, builtins.list in the live": {"n": [1]},
    r"state\['n'\]\['k'\] is builtins.int in the checkpoint, a tensor in the live": {
        "n": {"k": torch.ones(2)}
    },
    r"state\['n'\] is builtins.dict in the checkpoint, .*Generator": {"n": torch.Generator()},
    r"state\['model'\] is": {"model": torch.ones(1)},
}


@pytest.mark.parametrize("fault", MISFITS)
def test_a_checkpoint_that_doesnt_fit_is_refused_with_the_paths_and_nothing_is_touched(
    fault: str, tmp_path: Path
) -> None:
    loaded = through_disk(tmp_path, module_state())
    live = module_state() | {"c": Counters(77)} | MISFITS[fault]
    before = {
        k: copy.deepcopy(v.state_dict()) if hasattr(v, "state_dict") else copy.deepcopy(v)
        for k, v in live.items()
        if not isinstance(v, torch.Generator)
    }
    rng = torch.get_rng_state()
    with pytest.raises(StateMismatch, match=fault):
        apply_state(live, loaded)
    after = {
        k: v.state_dict() if hasattr(v, "state_dict") else v
        for k, v in live.items()
        if not isinstance(v, torch.Generator)
    }
    assert same(after, before)
    assert torch.equal(torch.get_rng_state(), rng)


def test_something_in_the_checkpoint_that_isnt_registered_is_refused_by_name(tmp_path: Path) -> None:
    loaded = through_disk(tmp_path, module_state())
    live = module_state()
    del live["c"]
    with pytest.raises(StateMismatch, match=r"state\['c'\] is in the checkpoint, not in the live state"):
        apply_state(live, loaded)


def test_every_misfit_is_listed_not_only_the_first(tmp_path: Path) -> None:
    loaded = through_disk(tmp_path, module_state())
    live = module_state() | {"x": 1, "y": 2, "n": []}
    with pytest.raises(StateMismatch) as caught:
        apply_state(live, loaded)
    assert all(name in caught.value.seen for name in ("state['x']", "state['y']", "state['n']"))


def test_not_strict_restores_what_fits_and_reports_the_rest(tmp_path: Path) -> None:
    state = module_state()
    loaded = through_disk(tmp_path, state)
    live = module_state() | {"ema": Counters(5), "n": {"k": 3, "new": 2}}
    live["model"] = nn.Sequential(nn.Linear(3, 3))
    del live["c"]
    report = apply_state(live, loaded, strict=False)
    assert set(report.missing) == {"state['ema']", "state['n']['new']"}
    assert "state['c']" in report.unused
    assert "state['model']['1.weight']" in report.unused
    assert live["n"] == {"k": 1, "new": 2}
    assert live["ema"].n == 5
    assert torch.equal(live["model"][0].weight, state["model"][0].weight)


def test_not_strict_converts_a_modules_dtype(tmp_path: Path) -> None:
    state = module_state()
    loaded = through_disk(tmp_path, state)
    live = {"model": nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).double()}
    apply_state(live, loaded, strict=False)
    assert torch.equal(live["model"][0].weight, state["model"][0].weight.double())  # type: ignore[index,union-attr,operator]


def test_not_strict_leaves_tensors_of_another_shape_alone_and_names_them(tmp_path: Path) -> None:
    state = {"model": nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)), "d": {"t": torch.ones(3), "n": 1}}
    loaded = through_disk(tmp_path, state)
    live = {"model": nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 5)), "d": {"t": torch.zeros(2), "n": 0}}
    head, held = copy.deepcopy(live["model"][1].state_dict()), live["d"]["t"]  # type: ignore[index]
    report = apply_state(live, loaded, strict=False)  # type: ignore[arg-type]
    assert set(report.reshaped) == {
        "state['model']['1.weight']",
        "state['model']['1.bias']",
        "state['d']['t']",
    }
    assert same(live["model"][1].state_dict(), head)  # type: ignore[index]
    assert torch.equal(live["model"][0].weight, state["model"][0].weight)  # type: ignore[index]
    assert live["d"]["t"] is held  # type: ignore[index]
    assert (held.tolist(), live["d"]["n"]) == ([0, 0], 1)  # type: ignore[index]
    assert (report.missing, report.unused) == ([], [])


def test_only_restores_what_is_named(tmp_path: Path) -> None:
    loaded = through_disk(tmp_path, module_state())
    live = module_state() | {"c": Counters(8), "unknown": 1}
    live["n"]["k"] = 5
    rng = torch.get_rng_state()
    torch.rand(3)
    moved = torch.get_rng_state()
    apply_state(live, loaded, only=["n"])
    assert (live["n"], live["c"].n) == ({"k": 1}, 8)
    assert torch.equal(torch.get_rng_state(), moved)
    apply_state(live, loaded, only=["rng"])
    assert not torch.equal(torch.get_rng_state(), moved)
    torch.set_rng_state(rng)
    with pytest.raises(InvalidArgument, match="nn"):
        apply_state(live, loaded, only=["nn"])
    with pytest.raises(InvalidArgument):
        apply_state(live, loaded, only="n")


def test_the_generators_are_set_after_everything_else(tmp_path: Path) -> None:
    class Draws(Counters):
        def load_state_dict(self, state: dict[str, int]) -> None:
            torch.rand(5), random.random(), np.random.rand()

    state = {"c": Draws()}
    loaded = through_disk(tmp_path, state)
    wanted = torch.rand(3).tolist(), random.random(), np.random.rand()
    apply_state(state, loaded)
    assert (torch.rand(3).tolist(), random.random(), np.random.rand()) == wanted


def test_a_bad_rng_state_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    loaded = through_disk(tmp_path, {"n": {"k": 1}})
    loaded["rng"]["torch"] = torch.zeros(3, dtype=torch.uint8)
    live = {"n": {"k": 5}}
    with pytest.raises(StateMismatch, match="rng"):
        apply_state(live, loaded)
    assert live == {"n": {"k": 5}}


def test_a_checkpoint_without_rng_says_so(tmp_path: Path) -> None:
    loaded = through_disk(tmp_path, {"n": 1}, rng=False)
    assert apply_state({"n": 2}, loaded).missing == ["state['rng']"]


def test_an_object_that_fails_half_way_is_a_failed_restore_that_touched_the_state(tmp_path: Path) -> None:
    loaded = through_disk(tmp_path, module_state())
    with pytest.raises(RestoreFailed, match="KeyError") as caught:
        apply_state(module_state() | {"c": Fails()}, loaded)
    assert caught.value.state_touched
    assert caught.value.where == "state['c']"


def test_an_object_of_ours_that_refuses_first_leaves_the_model_alone(tmp_path: Path) -> None:
    loaded = through_disk(tmp_path, module_state())
    live = module_state() | {"c": Refuses()}
    before = frozen_copy(live)
    with pytest.raises(StateMismatch, match="not mine"):
        apply_state(live, loaded)
    assert same(frozen_copy(live), before)


def test_a_disabled_scalers_empty_state_is_refused_by_a_live_one(tmp_path: Path) -> None:
    class Scaler(Counters):
        def state_dict(self) -> dict[str, int]:
            return {"n": self.n} if self.n else {}

    loaded = through_disk(tmp_path, {"s": Scaler(0)})
    with pytest.raises(StateMismatch, match=r"state\['s'\] is empty"):
        apply_state({"s": Scaler(5)}, loaded)
    apply_state({"s": Scaler(0)}, loaded, only=[])


def test_tied_weights_are_tied_after_the_restore(tmp_path: Path) -> None:
    def make() -> nn.Module:
        model = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 5, bias=False))
        model[1].weight = model[0].weight
        return model

    state = {"model": make()}
    loaded = through_disk(tmp_path, state, Sharding(shards=4))
    fresh = {"model": make()}
    apply_state(fresh, loaded)
    assert fresh["model"][1].weight is fresh["model"][0].weight  # type: ignore[index]
    assert torch.equal(fresh["model"][0].weight, state["model"][0].weight)  # type: ignore[index]


def test_generators_in_the_state_are_set_in_place(tmp_path: Path) -> None:
    live = {
        "t": torch.Generator(),
        "n": np.random.default_rng(1),
        "r": np.random.RandomState(2),
        "p": random.Random(3),
    }
    held = dict(live)
    loaded = through_disk(tmp_path, live)

    def draw() -> list[Any]:
        return [
            torch.rand(2, generator=held["t"]).tolist(),
            held["n"].random(),
            held["r"].rand(),
            held["p"].random(),
        ]  # type: ignore[call-overload,union-attr]

    wanted = draw()
    apply_state(live, loaded)
    assert all(live[name] is value for name, value in held.items())
    assert draw() == wanted


def test_another_kind_of_generator_is_refused(tmp_path: Path) -> None:
    loaded = through_disk(tmp_path, {"n": np.random.default_rng(1)})
    with pytest.raises(StateMismatch, match=r"PCG64 in the checkpoint, .*Philox"):
        apply_state({"n": np.random.Generator(np.random.Philox(1))}, loaded)


def test_an_expanded_tensor_is_replaced_as_it_cant_be_written(tmp_path: Path) -> None:
    loaded = through_disk(tmp_path, {"x": torch.arange(3.0).expand(2, 3)})
    live: dict[str, Any] = {"x": torch.zeros(3).expand(2, 3)}
    apply_state(live, loaded)
    assert live["x"].tolist() == [[0, 1, 2], [0, 1, 2]]


def test_the_bits_of_odd_dtypes_are_restored(tmp_path: Path) -> None:
    nan = torch.tensor([0x7FC00001, 0x7F800001], dtype=torch.int32).view(torch.float32)
    state = {"n": nan.clone(), "f8": torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)}
    wanted = {name: value.clone() for name, value in state.items()}
    loaded = through_disk(tmp_path, state)
    for value in state.values():
        value.view(torch.uint8).fill_(0)
    apply_state(state, loaded)
    assert all(same(state[name], value) for name, value in wanted.items())


@pytest.mark.parametrize("state", [None, [1], MappingProxyType({"a": 1})])
def test_a_state_that_cant_be_set_is_refused(state: Any) -> None:
    with pytest.raises(InvalidArgument):
        apply_state(state, {"a": 1})


def test_an_ema_and_a_nested_object_are_restored(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    ema = torch.optim.swa_utils.AveragedModel(model)
    state = {"ema": ema, "objects": [Counters(1), {"x": Counters(2)}], "train": ckptd.TrainState(step=3)}
    ema.update_parameters(model)
    loaded = through_disk(tmp_path, state)
    fresh = {
        "ema": torch.optim.swa_utils.AveragedModel(nn.Linear(2, 2)),
        "objects": [Counters(), {"x": Counters()}],
        "train": ckptd.TrainState(),
    }
    apply_state(fresh, loaded)
    assert same(dict(fresh["ema"].state_dict()), dict(ema.state_dict()))  # type: ignore[attr-defined]
    assert [fresh["objects"][0].n, fresh["objects"][1]["x"].n] == [1, 2]  # type: ignore[index]
    assert fresh["train"].step == 3  # type: ignore[attr-defined]
