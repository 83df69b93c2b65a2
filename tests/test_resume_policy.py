"""What Client.restore takes over, leaves alone and says: only=, source= (warm starts), strict=, another device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckptd
from ckptd.errors import CheckpointWarning, InvalidArgument, StateMismatch
from ckptd_places import places
from round_trip import same

__all__ = ["places"]

WEIGHT = "state['model']['weight']"


def make(value: float = 0.0, **more: Any) -> dict[str, Any]:
    """A model, its optimizer after one step, and counters."""
    model = nn.Linear(2, 2)
    with torch.no_grad():
        model.weight.fill_(value)
        model.bias.fill_(value)
    optimizer = torch.optim.Adam(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, value)
    optimizer.step()
    optimizer.zero_grad()
    return {"model": model, "optimizer": optimizer, "train": ckptd.TrainState(step=int(value)), **more}


def values(state: dict[str, Any]) -> Any:
    """What there is to compare, copied."""
    moments = [{key: item.clone() for key, item in one.items()} for one in state["optimizer"].state.values()]
    weights = {name: value.clone() for name, value in state["model"].state_dict().items()}
    return {"model": weights, "optimizer": moments, "train": state["train"].step}


def saved(root: Path, value: float = 5.0, run: str = "default", **more: Any) -> dict[str, Any]:
    state = make(value, **more)
    with ckptd.Client(root, run, daemon="off") as client:
        client.snapshot(int(value), state)
    return state


def restored(root: Path, state: dict[str, Any], **options: Any) -> Any:
    with ckptd.Client(root, daemon="off") as client:
        return client.restore(state, **options)


def test_only_the_model_leaves_optimizer_counters_and_generators_untouched(places: Path) -> None:
    source = saved(places)
    live = make(1.0)
    before, rng = values(live), torch.get_rng_state()
    resumed = restored(places, live, only=["model"])
    assert same(values(live)["model"], values(source)["model"])
    assert same(values(live)["optimizer"], before["optimizer"])
    assert live["train"].step == 1
    assert torch.equal(torch.get_rng_state(), rng)
    assert resumed.not_asked == ("optimizer", "train", "rng")
    assert (resumed.missing, resumed.unused, resumed.reshaped, resumed.step) == ((), (), (), 5)


def test_only_rng_sets_nothing_but_the_generators(places: Path) -> None:
    saved(places)
    wanted = torch.rand(3).tolist()
    live = make(1.0)
    before = values(live)
    torch.rand(5)
    resumed = restored(places, live, only=["rng"])
    assert torch.rand(3).tolist() == wanted
    assert same(values(live), before)
    assert resumed.not_asked == ("model", "optimizer", "train")


def test_nothing_is_left_out_unasked_when_all_is_restored(places: Path) -> None:
    saved(places)
    assert restored(places, make()).not_asked == ()


def test_only_a_name_that_neither_side_has_is_refused(places: Path) -> None:
    saved(places)
    live = make(1.0)
    before = values(live)
    with pytest.raises(InvalidArgument, match="'modle'"):
        restored(places, live, only=["modle"])
    with pytest.raises(InvalidArgument, match="not a list"):
        restored(places, live, only="model")
    assert same(values(live), before)


def test_what_is_asked_for_and_missing_on_one_side_is_refused_or_said_by_name(places: Path) -> None:
    saved(places, extra=1)
    live = make(1.0, ema=nn.Linear(1, 1))
    with pytest.raises(StateMismatch, match=r"state\['ema'\] is not in the checkpoint"):
        restored(places, live, only=["model", "ema"])
    with pytest.raises(StateMismatch, match=r"state\['extra'\] is in the checkpoint, not in the live state"):
        restored(places, live, only=["model", "extra"])
    resumed = restored(places, live, only=["model", "ema", "extra"], strict=False)
    assert (resumed.missing, resumed.unused) == (("state['ema']",), ("state['extra']",))
    assert restored(places, live, only=["model"]).not_asked == ("optimizer", "train", "extra", "rng")


def test_rng_that_was_asked_for_and_not_stored_is_refused(places: Path, tmp_path: Path) -> None:
    path = ckptd.save(tmp_path / "no-rng", make(5.0), step=5, rng=False)
    with pytest.raises(StateMismatch, match=r"state\['rng'\] is not in the checkpoint"):
        restored(places, make(), source=path, only=["rng"])
    assert restored(places, make(), source=path).missing == ("state['rng']",)


def test_a_tensor_of_another_shape_is_refused_or_left_alone_and_said(places: Path) -> None:
    saved(places)
    live = make(1.0)
    live["model"] = nn.Linear(3, 2)
    live["optimizer"] = torch.optim.Adam(live["model"].parameters())
    weight = live["model"].weight.clone()
    with pytest.raises(StateMismatch, match=r"\['weight'\] has shape \[2, 2\], live \[2, 3\]"):
        restored(places, live)
    resumed = restored(places, live, strict=False)
    assert WEIGHT in resumed.reshaped
    assert same(live["model"].weight.detach(), weight.detach())
    assert live["train"].step == 5


# --- warm starts ------------------------------------------------------------------------------------


def sources(root: Path, tmp_path: Path) -> dict[str, Path]:
    saved(root, 7.0, run="other")
    return {
        "another run": root / "other" / "step-000000007",
        "saved by itself": ckptd.save(tmp_path / "alone", make(7.0), step=7),
    }


@pytest.mark.parametrize("kind", ["another run", "saved by itself"])
def test_a_warm_start_takes_values_and_step_and_begins_its_own_time_and_line(
    places: Path, tmp_path: Path, kind: str
) -> None:
    source = sources(places, tmp_path)[kind]
    live = make(1.0)
    with ckptd.Client(places, daemon="off", cadence=ckptd.Cadence(every_steps=1000)) as client:
        resumed = client.restore(live, source=source)
        assert resumed is not None
        assert (resumed.step, resumed.next_step, resumed.sequence) == (7, 8, None)
        assert same(values(live), values(make(7.0)))
        assert client.maybe_snapshot(8, live) is not None  # nothing of this run is saved yet
        assert client.maybe_snapshot(9, live) is None
    again = restored(places, make())
    assert (again.step, again.sequence) == (8, 1)


def test_a_warm_start_from_a_file_of_format_v1_takes_the_model(places: Path, tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    path = tmp_path / "old" / "ckpt.pt"
    path.parent.mkdir()
    payload = {
        "schema": "ckpt.v1", "model": nn.DataParallel(model).state_dict(), "optimizer": {}, "scheduler": {},
        "state": {"step": 50, "epoch": 0, "batch_in_epoch": 0, "losses": []}, "rng": None, "wall_saved_at": 0.0,
    }  # fmt: skip
    torch.save(payload, path)
    live = make(1.0)
    before = values(live)
    resumed = restored(places, live, source=path, only=["model"])
    assert same(values(live)["model"], {name: value.clone() for name, value in model.state_dict().items()})
    assert same(values(live)["optimizer"], before["optimizer"])
    assert resumed.step == 50
    assert {"optimizer", "scheduler", "state"} <= set(resumed.not_asked)


def test_four_cuda_states_on_a_host_without_cuda_warn_and_restore_all_else(
    places: Path, tmp_path: Path
) -> None:
    if torch.cuda.is_available():
        pytest.skip("this host has CUDA")
    source = make(5.0)
    components = ckptd.load(ckptd.save(tmp_path / "c", source, step=5))
    components["rng"]["cuda"] = [torch.zeros(16, dtype=torch.uint8)] * 4
    live = make(1.0)
    from ckptd.tensors.restoring import apply_state

    with pytest.warns(CheckpointWarning, match="4 CUDA devices, this host has 0"):
        apply_state(live, components)
    assert same(values(live), values(source))


def test_a_map_location_moves_no_rng_bytes(tmp_path: Path) -> None:
    path = ckptd.save(tmp_path / "c", make(5.0), step=5)
    loaded = ckptd.load(path, map_location="meta")
    assert loaded["model"]["weight"].is_meta
    assert loaded["rng"]["torch"].device.type == "cpu"
    assert torch.equal(loaded["rng"]["torch"], ckptd.load(path)["rng"]["torch"])
    ckptd.restore_rng_state(loaded["rng"])


def test_the_seconds_of_another_run_are_not_this_ones(places: Path) -> None:
    saved(places, run="other")
    with ckptd.Client(places, "other", daemon="off") as client:
        own = client.restore(make(1.0))
    assert own is not None and own.run_seconds > 0.0
    warm = restored(places, make(1.0), source=own.path)
    assert (warm.run_seconds, warm.sequence) == (0.0, None)
