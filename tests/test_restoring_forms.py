"""Modules whose state is more than their parameters: extra states, forms of their own, buffers they resize."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckptd
from ckptd.errors import StateMismatch
from ckptd.tensors.rehearsal import rehearse
from ckptd.tensors.restoring import apply_state
from round_trip import same, through_disk


class Extra(nn.Linear):
    """Its extra state is a tensor, or anything else, as TransformerEngine's is."""

    def __init__(self, extra: Any) -> None:
        super().__init__(1, 1)
        self.extra = extra

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize(
    ("live", "stored"),
    [
        (torch.zeros(3), torch.ones(5, dtype=torch.uint8)),
        (torch.zeros(3), None),
        (None, torch.ones(2)),
        (torch.zeros(1), {"a": 1}),
        ({"a": 1}, torch.ones(1)),
    ],
)
def test_an_extra_state_is_given_to_the_module_whatever_it_is(
    live: Any, stored: Any, strict: bool, tmp_path: Path
) -> None:
    model = nn.Sequential(nn.Linear(1, 1), Extra(live))
    source = nn.Sequential(nn.Linear(1, 1), Extra(stored))
    report = apply_state({"m": model}, through_disk(tmp_path, {"m": source}), strict=strict)
    assert same(model[1].extra, stored)
    assert same(model[1].weight, source[1].weight)
    assert report.reshaped == []


def test_a_buffer_that_is_called_so_is_a_buffer() -> None:
    model = nn.Linear(1, 1)
    model.register_buffer("_extra_state", torch.zeros(2))
    with pytest.raises(StateMismatch, match=r"\['_extra_state'\] has shape \[3\], live \[2\]"):
        apply_state({"m": model}, {"m": {**model.state_dict(), "_extra_state": torch.ones(3)}}, only=["m"])


def test_an_extra_state_that_is_missing_is_refused_by_name() -> None:
    stored = Extra(None).state_dict()
    del stored["_extra_state"]
    with pytest.raises(StateMismatch, match=r"\['_extra_state'\] is not in the checkpoint"):
        apply_state({"m": Extra(None)}, {"m": stored}, only=["m"])


# --- forms of their own -----------------------------------------------------------------------------


class AsTuple(nn.Linear):
    def __init__(self, rounds: int = 0) -> None:
        super().__init__(1, 1)
        self.rounds = rounds

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.rounds, self.weight.detach(), self.bias.detach()

    def load_state_dict(self, state: Any, *args: Any, **kwargs: Any) -> Any:
        self.rounds = state[0]
        with torch.no_grad():
            self.weight.copy_(state[1]), self.bias.copy_(state[2])


class Packed(AsTuple):
    """Stores what isn't zero only: another number of elements, and of keys, from one time to the next."""

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        flat = self.weight.detach().reshape(-1)
        at = flat.nonzero().reshape(-1)
        return {"at": at, "values": flat[at]} | ({"rounds": self.rounds} if self.rounds else {})

    def load_state_dict(self, state: Any, *args: Any, **kwargs: Any) -> Any:
        self.rounds = state.get("rounds", 0)
        with torch.no_grad():
            self.weight.zero_().reshape(-1)[state["at"]] = state["values"]


@pytest.mark.parametrize("strict", [True, False])
def test_a_module_that_gives_a_tuple_and_takes_one_gets_it(strict: bool, tmp_path: Path) -> None:
    source, live = AsTuple(3), AsTuple()
    held = live.weight
    live.weight.grad = torch.ones(1, 1)
    apply_state({"m": live}, through_disk(tmp_path, {"m": source}), strict=strict)
    assert (live.rounds, live.weight is held, live.weight.grad) == (3, True, None)
    assert same(live.weight, source.weight)


@pytest.mark.parametrize("strict", [True, False])
def test_a_packed_form_of_another_size_goes_to_the_module(strict: bool, tmp_path: Path) -> None:
    source, live = Packed(2), Packed()
    with torch.no_grad():
        live.weight.zero_()
    report = apply_state({"m": live}, through_disk(tmp_path, {"m": source}), strict=strict)
    assert (live.rounds, report.reshaped) == (2, [])
    assert same(live.weight, source.weight)
    with torch.no_grad():
        source.weight.zero_()
    apply_state({"m": live}, through_disk(tmp_path, {"m": source}), strict=strict)
    assert live.weight.item() == 0


def test_a_form_of_its_own_is_asked_for_by_check_state_dict(tmp_path: Path) -> None:
    class Judges(AsTuple):
        def check_state_dict(self, state: Any) -> None:
            raise StateMismatch("of another family")

    live = Judges(1)
    with pytest.raises(StateMismatch, match="of another family"):
        apply_state({"m": live}, through_disk(tmp_path, {"m": AsTuple(3)}))
    assert live.rounds == 1


def test_a_form_that_nothing_takes_is_refused_by_what_to_override(tmp_path: Path) -> None:
    class Gives(nn.Linear):
        def state_dict(self, *args: Any, **kwargs: Any) -> Any:
            return (self.weight.detach(),)

    with pytest.raises(StateMismatch, match=r"builtins.tuple by state_dict\(\) and has no load_state_dict"):
        apply_state({"m": Gives(1, 1)}, through_disk(tmp_path, {"m": Gives(1, 1)}))


def test_a_module_that_overrides_both_and_keeps_torchs_form_is_still_compared_beforehand() -> None:
    class Inner(nn.Module):
        """Leaves its wrapping out of the names, and gives copies of what it calls as torch does."""

        def __init__(self) -> None:
            super().__init__()
            self.inner, self.scale = nn.Linear(2, 2), nn.Parameter(torch.ones(1))

        def state_dict(self, *args: Any, **kwargs: Any) -> Any:
            return {**self.inner.state_dict(), "scale": self.scale.detach().clone()}

        def load_state_dict(self, state: Any, *args: Any, **kwargs: Any) -> Any:
            raise AssertionError("loaded")

    live = Inner()
    short = {name: value for name, value in live.state_dict().items() if name != "bias"}
    for stored, fault in (
        (short, r"\['bias'\] is not in the checkpoint"),
        ({**live.state_dict(), "weight": torch.ones(3)}, r"\['weight'\] has shape \[3\]"),
        ({**live.state_dict(), "scale": torch.ones(3)}, r"\['scale'\] has shape \[3\]"),
    ):
        with pytest.raises(StateMismatch, match=fault):
            apply_state({"m": live}, {"m": stored}, only=["m"])


def test_a_packed_form_with_a_compiled_part_gets_the_names_that_it_gave(tmp_path: Path) -> None:
    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.DataParallel(nn.Linear(1, 1))

        def state_dict(self, *args: Any, **kwargs: Any) -> Any:
            return {"net.module.weight": self.net.module.weight.detach(), "packed": [1]}

        def load_state_dict(self, state: Any, *args: Any, **kwargs: Any) -> Any:
            self.names = list(state)

    live = Whole()
    apply_state({"m": live}, through_disk(tmp_path, {"m": Whole()}))
    assert live.names == ["net.module.weight", "packed"]


# --- buffers that a module resizes ------------------------------------------------------------------


class Grows(nn.Module):
    """A buffer gets its shape with the first batch, and from a checkpoint, as torch's observers do it."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.register_buffer("scale", torch.zeros(size))
        self.register_buffer("fixed", torch.zeros(2))

    def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
        if f"{prefix}scale" in state:
            self.scale.resize_(state[f"{prefix}scale"].shape)  # type: ignore[operator,union-attr]
        super()._load_from_state_dict(state, prefix, *rest)


@pytest.mark.parametrize("sizes", [(0, 3), (3, 0), (2, 3), (3, 3)])
def test_a_buffer_that_the_module_resizes_itself_is_restored(sizes: tuple[int, int], tmp_path: Path) -> None:
    live, source = nn.Sequential(Grows(sizes[0])), nn.Sequential(Grows(sizes[1]))
    source[0].scale.fill_(7)
    held = live[0].scale
    apply_state({"m": live}, through_disk(tmp_path, {"m": source}))
    assert live[0].scale is held
    assert same(dict(live.state_dict()), dict(source.state_dict()))


def test_what_doesnt_fit_beside_a_resized_buffer_is_refused_before_it_is_resized() -> None:
    live, stored = Grows(0), Grows(3).state_dict()
    held = live.scale
    for other, fault in (
        ({"fixed": torch.zeros(5)}, r"\['fixed'\] has shape \[5\], live \[2\]"),
        ({"scale": torch.zeros(3, dtype=torch.float64)}, r"\['scale'\] is torch.float64"),
    ):
        with pytest.raises(StateMismatch, match=fault):
            apply_state({"m": live}, {"m": {**stored, **other}}, only=["m"])
    found = rehearse(live, stored)
    assert found is not None and found.resized == {"scale"}
    assert live.scale is held and held.shape == (0,)
    assert list(live._buffers) == ["scale", "fixed"]


def test_quantisation_aware_training_per_channel_goes_on(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.ao is to be replaced
        from torch.ao import quantization

        def make() -> Any:
            model = nn.Sequential(quantization.QuantStub(), nn.Linear(4, 4), quantization.DeQuantStub())
            model.qconfig = quantization.get_default_qat_qconfig("fbgemm")  # type: ignore[assignment]
            return quantization.prepare_qat(model.train())

        source, live = make(), make()
        data = torch.randn(3, 4)
        source(data)
        apply_state({"m": live}, through_disk(tmp_path, {"m": source}))
        assert same(dict(live.state_dict()), dict(source.state_dict()))
        assert torch.equal(live(data), source(data))
        trained = copy.deepcopy(live)
        apply_state({"m": live}, through_disk(tmp_path, {"m": trained}))


def test_a_restore_in_inference_mode_leaves_tensors_that_can_be_trained_on(tmp_path: Path) -> None:
    def make() -> dict[str, Any]:
        model = nn.Linear(2, 1)
        return {"m": model, "o": torch.optim.Adam(model.parameters()), "t": [None]}

    def train(state: dict[str, Any]) -> None:
        state["o"].zero_grad()
        state["m"](torch.ones(2)).sum().backward()
        state["o"].step()

    source, live = make(), make()
    train(source)
    source["t"] = [torch.ones(1)]
    path = ckptd.save(tmp_path / "one", source, step=0)
    with ckptd.Client(tmp_path / "run", daemon="off") as client, torch.inference_mode():
        client.restore(live, source=path)
        assert torch.is_inference_mode_enabled()
    assert not live["t"][0].is_inference()
    train(live), train(source)
    assert same(dict(live["m"].state_dict()), dict(source["m"].state_dict()))
