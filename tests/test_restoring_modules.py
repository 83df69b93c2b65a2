"""Restoring modules into live ones that differ: hooks, ties, lazy parameters, meta tensors, extra state."""

from __future__ import annotations

import copy
import random
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ckptd.errors import RestoreFailed, StateMismatch
from ckptd.tensors.rehearsal import rehearse
from ckptd.tensors.restoring import apply_state
from ckptd.tensors.tied_values import same_stored
from round_trip import same, through_disk
from test_restoring import Counters


def restore(live: Any, stored: Any, **options: Any) -> Any:
    return apply_state({"m": live}, {"m": stored}, only=["m"], **options)


def refused(live: nn.Module, stored: Any, match: str) -> None:
    """Restoring stored is refused, and no bit of live changed."""
    before = {name: value.clone() for name, value in live.state_dict().items()}
    with pytest.raises(StateMismatch, match=match):
        restore(live, stored)
    assert same(dict(live.state_dict()), before)


def old_names(stored: Any) -> Any:
    renamed = OrderedDict((name.replace("weight", "kernel"), value) for name, value in stored.items())
    renamed._metadata = stored._metadata  # type: ignore[attr-defined]
    return renamed


class Renames(nn.Linear):
    """Takes `kernel`, as it was called once, by a hook."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.register_load_state_dict_pre_hook(self._rename)

    @staticmethod
    def _rename(module: Any, state: Any, prefix: str, *rest: Any) -> None:
        if f"{prefix}kernel" in state:
            state[f"{prefix}weight"] = state.pop(f"{prefix}kernel")


class Overrides(nn.Linear):
    """The same by an override."""

    def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
        Renames._rename(self, state, prefix)
        super()._load_from_state_dict(state, prefix, *rest)


@pytest.mark.parametrize("kind", [Renames, Overrides])
@pytest.mark.parametrize("strict", [True, False])
def test_a_module_that_renames_old_keys_takes_them(kind: type[nn.Module], strict: bool) -> None:
    source = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), kind(2, 3))
    live = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), kind(2, 3))
    stored = source.state_dict()
    stored["2.kernel"] = stored.pop("2.weight")
    report = restore(live, stored, strict=strict)
    assert same(live[2].weight, source[2].weight)
    assert same(live[0].weight, source[0].weight)
    assert (report.missing, report.unused) == ([], [])


def test_old_keys_of_another_shape_or_dtype_are_refused_before_anything_is_written() -> None:
    live = nn.Sequential(nn.Linear(2, 2), Renames(2, 3))
    refused(live, old_names(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 3)).state_dict()), r"0.weight")
    wrong = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 4)).state_dict()
    wrong["1.kernel"] = wrong.pop("1.weight")
    refused(live, wrong, "1.weight")
    double = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 3)).state_dict()
    double["1.kernel"] = double.pop("1.weight").double()
    refused(live, double, r"\['1.weight'\] is torch.float64, live torch.float32")


def test_what_a_rehearsal_finds_missing_is_refused_by_name() -> None:
    stored = old_names(Renames(2, 2).state_dict())
    del stored["bias"]
    refused(Renames(2, 2), stored, r"state\['m'\]\['bias'\] is not in the checkpoint")
    refused(Renames(2, 2), {**old_names(Renames(2, 2).state_dict()), "more": torch.ones(1)}, "'more'")


def test_a_counter_that_an_old_checkpoint_of_batchnorm_lacks_is_said_by_name() -> None:
    stored = nn.BatchNorm1d(2).state_dict()
    del stored["num_batches_tracked"], stored._metadata
    live = nn.BatchNorm1d(2)
    live(torch.randn(3, 2))
    refused(live, stored, "num_batches_tracked")
    assert restore(live, stored, strict=False).missing == ["state['m']['num_batches_tracked']"]
    assert live.num_batches_tracked == 1


class Touches(nn.Linear):
    """A hook that changes the module itself."""

    def _load_from_state_dict(self, state: Any, *rest: Any) -> None:
        self.weight.data.zero_()
        with torch.no_grad():
            self.bias.zero_()
        super()._load_from_state_dict(state, *rest)


class Extra(nn.Linear):
    def __init__(self, *args: Any, fails: bool = False) -> None:
        super().__init__(*args)
        self.extra, self.fails = [1], fails

    def get_extra_state(self) -> Any:
        return {"extra": self.extra}

    def set_extra_state(self, state: Any) -> None:
        if self.fails:
            raise KeyError("extra")
        self.extra = state["extra"]


def test_a_rehearsal_changes_nothing_whatever_the_module_does() -> None:
    live = nn.Sequential(Touches(2, 2), nn.BatchNorm1d(2), Extra(2, 2))
    ran = []
    live[2].register_load_state_dict_post_hook(lambda *_: ran.append(1))
    before = [copy.deepcopy(live.state_dict()), [dict(vars(part)) for part in live.modules()]]
    stored = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), Extra(2, 2)).state_dict()
    stored["2._extra_state"] = {"extra": [2]}
    assert rehearse(live, stored) is None
    live[0] = nn.Linear(2, 2)
    before[0] = copy.deepcopy(live.state_dict())
    assert rehearse(live, stored) is not None
    assert same(dict(live.state_dict()), dict(before[0]))
    assert vars(live[2]).keys() == before[1][3].keys()
    assert (live[2].extra, ran) == ([1], [])


def test_extra_state_comes_back_and_a_failing_one_is_said_to_have_touched_the_state(tmp_path: Path) -> None:
    source = Extra(2, 2)
    source.extra = [5]
    loaded = through_disk(tmp_path, {"m": source})
    live = Extra(2, 2)
    apply_state({"m": live}, loaded)
    assert live.extra == [5]
    with pytest.raises(RestoreFailed) as caught:
        apply_state({"m": Extra(2, 2, fails=True)}, loaded)
    assert caught.value.state_touched


def test_a_state_dict_that_hooks_customise_comes_back(tmp_path: Path) -> None:
    class Custom(nn.Module):
        """Leaves its frozen part out of the state, and puts a setting in."""

        def __init__(self) -> None:
            super().__init__()
            self.frozen, self.head, self.setting = nn.Linear(2, 2), nn.Linear(2, 1), 3
            self.register_state_dict_post_hook(self._leave_out)
            self.register_load_state_dict_pre_hook(self._take_out)

        @staticmethod
        def _leave_out(module: Any, state: Any, prefix: str, *rest: Any) -> None:
            for name in [name for name in state if name.startswith(f"{prefix}frozen")]:
                del state[name]
            state[f"{prefix}setting"] = module.setting

        @staticmethod
        def _take_out(module: Any, state: Any, prefix: str, *rest: Any) -> None:
            module.setting = state.pop(f"{prefix}setting")

    source, live = Custom(), Custom()
    source.setting = 4
    frozen = live.frozen.weight.clone()
    apply_state({"m": live}, through_disk(tmp_path, {"m": source}))
    assert same(dict(live.head.state_dict()), dict(source.head.state_dict()))
    assert same(live.frozen.weight.detach(), frozen.detach())
    assert live.setting == 4


# --- ties -------------------------------------------------------------------------------------------


def pair(tied: bool) -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    if tied:
        model[1].weight = model[0].weight
    return model


def test_untied_live_tensors_take_the_values_of_tied_ones(tmp_path: Path) -> None:
    source, live = pair(True), pair(False)
    apply_state({"m": live}, through_disk(tmp_path, {"m": source}))
    assert live[0].weight is not live[1].weight
    assert same(live[0].weight, source[0].weight)
    assert same(live[1].weight, source[0].weight)


def test_tied_live_tensors_take_equal_values_and_refuse_different_ones(tmp_path: Path) -> None:
    source, live = pair(False), pair(True)
    refused(live, source.state_dict(), r"\['1.weight'\] in the live state, and their values")
    with torch.no_grad():
        source[1].weight.copy_(source[0].weight)
    apply_state({"m": live}, through_disk(tmp_path, {"m": source}))
    assert live[0].weight is live[1].weight
    assert same(live[0].weight, source[0].weight)


def test_tensors_of_two_components_that_are_tied_are_checked_together() -> None:
    shared = torch.zeros(4)
    state = {"a": {"t": shared}, "b": [shared.view(2, 2)], "c": shared[:0], "d": torch.zeros(4)}
    stored = {"a": {"t": torch.ones(4)}, "b": [torch.ones(2, 2)], "c": torch.ones(0), "d": torch.ones(4)}
    apply_state(state, stored, only=list(state))
    assert shared.tolist() == [1, 1, 1, 1]
    stored["b"] = [torch.tensor([[2.0, 2], [2, 3]])]
    apply_state(state, stored, only=list(state))
    assert state["a"]["t"] is shared and shared.tolist() == [1, 1, 1, 1]  # type: ignore[call-overload,index]
    assert state["b"][0].tolist() == [[2, 2], [2, 3]]  # type: ignore[index]


def test_overlapping_views_are_set_apart_only_where_they_disagree() -> None:
    memory = torch.zeros(8, dtype=torch.float32)
    state = {"x": memory[0:4], "y": memory[2:6], "even": memory[6::2], "bits": memory[7:].view(torch.int32)}
    stored: dict[str, Any] = {
        "x": torch.arange(4.0),
        "y": torch.arange(2.0, 6.0),
        "even": torch.tensor([6.0]),
        "bits": torch.tensor([7], dtype=torch.int32),
    }
    apply_state(state, dict(stored), only=list(state))
    assert memory[:7].tolist() == [0, 1, 2, 3, 4, 5, 6]
    held = dict(state)
    stored["y"] = torch.arange(4.0)
    apply_state(state, dict(stored), only=list(state))
    assert [name for name in state if state[name] is not held[name]] == ["y"]
    assert same(state, stored)
    inside = {"whole": memory, "first": memory[1:2], "last": memory[6:7]}
    wanted = {"whole": torch.zeros(8), "first": torch.zeros(1), "last": torch.ones(1)}
    held = dict(inside)
    apply_state(inside, dict(wanted), only=list(inside))
    assert [name for name in inside if inside[name] is not held[name]] == ["last"]
    assert same(inside, wanted)


def test_an_array_that_shares_its_memory_with_a_tensor_is_checked_too() -> None:
    array = np.zeros(3, dtype=np.float32)
    state = {"a": array, "t": torch.from_numpy(array)}
    apply_state(state, {"a": np.ones(3, dtype=np.float32), "t": torch.ones(3)}, only=["a", "t"])
    assert array.tolist() == state["t"].tolist() == [1, 1, 1]
    apply_state(state, {"a": np.full(3, 2, np.float32), "t": torch.zeros(3)}, only=["a", "t"])
    assert state["a"] is array
    assert (array.tolist(), state["t"].tolist()) == ([2, 2, 2], [0, 0, 0])


def test_one_object_at_two_places_takes_one_value() -> None:
    both = [{"n": 1}, meter := Counters(1)]
    one, other = [{"n": 2}, {"n": 2}], [{"n": 3}, {"n": 2}]
    with pytest.raises(StateMismatch, match=r"state\['b'\] is the same object as state\['a'\]"):
        apply_state({"a": both, "b": both}, {"a": one, "b": other}, only=["a", "b"])
    assert both == [{"n": 1}, meter] and meter.n == 1
    apply_state({"a": both, "b": both}, {"a": one, "b": copy.deepcopy(one)}, only=["a", "b"])
    assert both == [{"n": 2}, meter] and meter.n == 2


@pytest.mark.parametrize(
    "make",
    [
        lambda seed: torch.Generator().manual_seed(seed),
        np.random.default_rng,
        np.random.RandomState,
        random.Random,
    ],
)
def test_one_generator_at_two_places_takes_one_state(make: Any) -> None:
    both = make(1)
    with pytest.raises(StateMismatch, match="is the same object as"):
        apply_state({"a": both, "b": both}, {"a": make(2), "b": make(3)}, only=["a", "b"])
    apply_state({"a": both, "b": both}, {"a": make(2), "b": make(2)}, only=["a", "b"])
    assert same_stored(both, make(2))


# --- what stays the live side's ---------------------------------------------------------------------


def test_parameters_stay_the_objects_they_are_and_keep_requires_grad(tmp_path: Path) -> None:
    source, live = nn.Linear(2, 2), nn.Linear(2, 2)
    source.weight.requires_grad_(False)
    live.bias.requires_grad_(False)
    held, optimizer = live.weight, torch.optim.SGD(live.parameters(), lr=1.0)
    apply_state({"m": live}, through_disk(tmp_path, {"m": source}))
    assert live.weight is held
    assert optimizer.param_groups[0]["params"][0] is held
    assert (live.weight.requires_grad, live.bias.requires_grad) == (True, False)
    assert same(live.weight.detach(), source.weight.detach())


def test_buffers_that_arent_persistent_are_left_alone(tmp_path: Path) -> None:
    def make(value: float) -> nn.Module:
        model = nn.Linear(1, 1)
        model.register_buffer("cache", torch.tensor(value), persistent=False)
        model.register_buffer("kept", torch.tensor(value))
        return model

    live = make(2.0)
    apply_state({"m": live}, through_disk(tmp_path, {"m": make(1.0)}))
    assert (live.cache.item(), live.kept.item()) == (2.0, 1.0)  # type: ignore[operator]


def test_the_counters_of_batchnorm_come_back(tmp_path: Path) -> None:
    source = nn.BatchNorm1d(2)
    for _ in range(3):
        source(torch.randn(4, 2))
    live = nn.BatchNorm1d(2)
    apply_state({"m": live}, through_disk(tmp_path, {"m": source}))
    assert live.num_batches_tracked == 3
    assert same(dict(live.state_dict()), dict(source.state_dict()))


def test_lazy_parameters_get_their_shape_from_the_checkpoint(tmp_path: Path) -> None:
    source = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    live = nn.Sequential(nn.LazyLinear(2), nn.LazyBatchNorm1d())
    held = live[0].weight
    apply_state({"m": live}, through_disk(tmp_path, {"m": source}))
    assert live[0].weight is held
    live.eval(), source.eval()
    data = torch.randn(4, 3)
    assert torch.equal(live(data), source(data))
    lazy = nn.Sequential(nn.LazyLinear(2), nn.Linear(2, 2))
    with pytest.raises(StateMismatch):
        restore(lazy, source.state_dict())
    assert isinstance(lazy[0].weight, nn.parameter.UninitializedParameter)


def test_an_optimizer_over_lazy_parameters_is_refused_with_what_to_do(tmp_path: Path) -> None:
    def state(model: nn.Module) -> dict[str, Any]:
        return {"m": model, "o": torch.optim.Adam(model.parameters())}

    live = state(nn.LazyLinear(2))
    with pytest.raises(StateMismatch, match=r"state\['o'\] is over lazy parameters.*forward pass"):
        apply_state(live, through_disk(tmp_path, state(nn.Linear(3, 2))))
    assert isinstance(live["m"].weight, nn.parameter.UninitializedParameter)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: nn.Linear(2, 2, device="meta"), "meta device"),
        (lambda: _with_buffer(torch.zeros(1).expand(3)), "expanded"),
        (lambda: _with_buffer(_made_in_inference_mode()), "inference mode"),
        (lambda: _with_buffer(torch.zeros(3, dtype=torch.complex64).conj()), "conjugated"),
    ],
)
def test_a_live_tensor_that_cant_be_written_is_refused_by_name(make: Any, reason: str) -> None:
    live = make()
    stored = {name: torch.ones(value.shape, dtype=value.dtype) for name, value in live.state_dict().items()}
    with pytest.raises(StateMismatch, match=f"can't be written: the live tensor .*{reason}"):
        restore(live, stored)


def _with_buffer(buffer: torch.Tensor) -> nn.Module:
    model = nn.Linear(2, 2)
    model.register_buffer("b", buffer)
    return model


def _made_in_inference_mode() -> torch.Tensor:
    with torch.inference_mode():
        return torch.zeros(3)


def test_a_plain_tensor_that_cant_be_written_is_replaced() -> None:
    state = {"i": _made_in_inference_mode(), "c": torch.zeros(2, dtype=torch.complex64).conj()}
    stored = {"i": torch.ones(3), "c": torch.full((2,), 1 + 2j)}
    apply_state(state, dict(stored), only=["i", "c"])
    assert all(same(state[name], stored[name]) for name in stored)
