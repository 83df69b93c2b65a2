"""Gradients as a part of the state: stored when asked, restored exactly, cleared where they belong to another state."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import ckptd
from ckptd.errors import CheckpointWarning, InvalidArgument, StateMismatch, UnstorableState
from ckptd.tensors import accumulation
from ckptd.tensors.capture import capture
from ckptd.tensors.foreseeing import foresee
from ckptd.tensors.gradients import missing_gradients
from ckptd.tensors.restoring import apply_state


@pytest.fixture(autouse=True)
def seeing(monkeypatch: pytest.MonkeyPatch) -> None:
    """No compiled step of another test makes it blind."""
    monkeypatch.setattr(accumulation._watch, "blind", False)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """So small a model is slower with more, and its sums are those of one number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def model_with(*grads: float | None) -> nn.ParameterList:
    """One parameter of three numbers for each; its gradient is so many times (1, 2, 3)."""
    model = nn.ParameterList([nn.Parameter(torch.ones(3)) for _ in grads])
    for parameter, grad in zip(model, grads, strict=True):
        parameter.grad = None if grad is None else grad * torch.tensor([1.0, 2.0, 3.0])
    return model


def grads_of(model: nn.Module) -> list[Any]:
    return [None if p.grad is None else p.grad.tolist() for p in model.parameters()]


# --- the object -----------------------------------------------------------------------------------


def test_the_state_has_the_gradients_that_are_there_by_name_and_copies_none() -> None:
    model = model_with(1.0, None, -2.0)
    state = ckptd.Gradients(model).state_dict()
    assert list(state) == ["0", "2"]
    assert state["0"] is model[0].grad
    assert repr(ckptd.Gradients(model)) == "<Gradients 2 of 3 parameters have one>"


@pytest.mark.parametrize(
    "given",
    [
        lambda model: model,
        lambda model: model.parameters(),
        lambda model: list(model.parameters()),
        lambda model: model.named_parameters(),
    ],
    ids=["module", "generator", "list", "named"],
)
def test_a_module_or_its_parameters_can_be_given(given: Callable[[Any], Any]) -> None:
    gradients = ckptd.Gradients(given(model_with(1.0, None)))
    for _ in range(2):  # a generator too is there for every snapshot
        assert {name: grad.tolist() for name, grad in gradients.state_dict().items()} == {"0": [1, 2, 3]}


@pytest.mark.parametrize(
    "of", [3, "model", torch.ones(2), {"a": torch.ones(2)}, [3], [("a", 3)], [(1, torch.ones(1))]]
)
def test_what_has_no_parameters_is_refused(of: Any) -> None:
    with pytest.raises(InvalidArgument, match="not a module"):
        ckptd.Gradients(of)


def test_two_parameters_of_one_name_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="one name"):
        ckptd.Gradients([("a", torch.ones(1)), ("a", torch.ones(1))])


def test_wrapping_a_model_changes_no_name() -> None:
    model = model_with(1.0, 2.0)
    wrapped = nn.DataParallel(model)
    assert list(ckptd.Gradients(wrapped).state_dict()) == ["0", "1"]


def test_parameters_that_a_module_gets_later_count() -> None:
    model = model_with(1.0)
    gradients = ckptd.Gradients(model)
    model.append(nn.Parameter(torch.ones(2)))
    model[1].grad = torch.ones(2)
    assert list(gradients.state_dict()) == ["0", "1"]


def test_a_stored_gradient_goes_into_the_tensor_that_is_there_and_the_others_are_none() -> None:
    live = model_with(7.0, 8.0, None)
    before = live[0].grad
    state = {"0": torch.tensor([4.0, 5.0, 6.0]), "2": torch.ones(3)}
    ckptd.Gradients(live).load_state_dict(state)
    assert grads_of(live) == [[4, 5, 6], None, [1, 1, 1]]
    assert live[0].grad is before
    live[2].grad.add_(1)
    assert state["2"].tolist() == [1, 1, 1]  # nothing of what was given is kept


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ({"5": torch.ones(3)}, "5 is in the checkpoint, the live model has no such parameter"),
        ({"0": torch.ones(4)}, r"0 has shape \[4\], live \[3\]"),
        ({"0": torch.ones(3, dtype=torch.float64)}, "0 is torch.float64, live torch.float32"),
        ({"0": [1.0, 2.0, 3.0]}, "0 is list in the checkpoint"),
        ([1], "a list, not the state of Gradients"),
        ({0: torch.ones(3)}, "0 is in the checkpoint, the live model has no such parameter"),
    ],
)
def test_what_does_not_fit_is_refused_by_name_and_nothing_is_changed(state: Any, said: str) -> None:
    live = model_with(7.0, None)
    if isinstance(state, dict):
        state = {"1": torch.ones(3), **state}
    gradients = ckptd.Gradients(live)
    for act in (gradients.check_state_dict, gradients.load_state_dict):
        with pytest.raises(StateMismatch, match=said):
            act(state)
        assert grads_of(live) == [[7, 14, 21], None]


def test_checking_changes_nothing() -> None:
    live = model_with(7.0, None)
    ckptd.Gradients(live).check_state_dict({"1": torch.ones(3)})
    assert grads_of(live) == [[7, 14, 21], None]


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="gradients have the parameter's dtype")
def test_a_gradient_of_another_dtype_than_its_parameter_keeps_it() -> None:
    live = nn.ParameterList([nn.Parameter(torch.ones(2, dtype=torch.bfloat16))])
    live[0].grad_dtype = torch.float32
    ckptd.Gradients(live).load_state_dict({"0": torch.tensor([0.1, 0.2])})
    assert (live[0].grad.dtype, live[0].grad.tolist()) == (torch.float32, torch.tensor([0.1, 0.2]).tolist())


def test_a_sparse_gradient_is_refused_by_key_path() -> None:
    model = nn.Embedding(5, 2, sparse=True)
    model(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(UnstorableState) as caught:
        capture({"model": model, "gradients": ckptd.Gradients(model)})
    assert caught.value.where == "state['gradients']['weight']"
    assert "sparse" in str(caught.value)


def test_room_is_made_for_gradients_to_come() -> None:
    model = nn.Linear(1000, 1000, bias=False)
    gradients = ckptd.Gradients(model)
    assert missing_gradients(gradients) == [model.weight]
    assert foresee({"model": model, "gradients": gradients}) > 8_000_000
    model.weight.grad = torch.zeros_like(model.weight)
    assert missing_gradients(gradients) == []
    model.weight.requires_grad_(requires_grad=False).grad = None
    assert missing_gradients(gradients) == []


# --- with a restore -------------------------------------------------------------------------------


def through_disk(tmp_path: Path, state: dict[str, Any]) -> dict[str, Any]:
    return ckptd.load(ckptd.save(tmp_path / "saved", state, step=1))


def test_gradients_come_back_bit_for_bit_in_value_dtype_and_shape(tmp_path: Path) -> None:
    model = nn.ParameterDict(
        {
            "bf16": nn.Parameter(torch.ones(3, 4, dtype=torch.bfloat16)),
            "nan": nn.Parameter(torch.ones(2)),
            "scalar": nn.Parameter(torch.tensor(1.0)),
            "none": nn.Parameter(torch.zeros(0, 3)),
            "complex": nn.Parameter(torch.ones(2, dtype=torch.complex64)),
            "frozen": nn.Parameter(torch.ones(2), requires_grad=False),
        }
    )
    for name, parameter in model.items():
        if name != "frozen":
            parameter.grad = torch.randn_like(parameter)
    model["nan"].grad = torch.tensor([float("nan"), -0.0])
    saved = through_disk(tmp_path, {"gradients": ckptd.Gradients(model)})
    live = nn.ParameterDict(
        {name: nn.Parameter(p.detach().clone(), p.requires_grad) for name, p in model.items()}
    )
    apply_state({"gradients": ckptd.Gradients(live)}, saved)
    for name, parameter in model.items():
        got, wanted = live[name].grad, parameter.grad
        assert (got is None) == (wanted is None)
        if wanted is not None:
            assert (got.dtype, got.shape, got.requires_grad) == (wanted.dtype, wanted.shape, False)
            assert torch.equal(got.reshape(-1).view(torch.uint8), wanted.reshape(-1).view(torch.uint8))


def test_a_restore_clears_the_gradients_of_what_it_restores(tmp_path: Path) -> None:
    saved = through_disk(tmp_path, {"nested": [{"model": model_with(1.0)}]})
    model, other = model_with(5.0), model_with(6.0)
    apply_state({"nested": [{"model": model}], "other": other}, saved, strict=False)
    assert (grads_of(model), grads_of(other)) == ([None], [[6, 12, 18]])


def test_an_optimizers_parameters_are_cleared_where_no_module_is_stored(tmp_path: Path) -> None:
    def state(grad: float) -> dict[str, Any]:
        return {"optimizer": torch.optim.SGD(model_with(grad).parameters(), 0.1)}

    live = state(5.0)
    apply_state(live, through_disk(tmp_path, state(0.0)))
    assert live["optimizer"].param_groups[0]["params"][0].grad is None


def test_what_only_leaves_out_keeps_its_gradients(tmp_path: Path) -> None:
    saved = through_disk(tmp_path, {"a": model_with(1.0), "b": model_with(1.0)})
    live = {"a": model_with(5.0), "b": model_with(6.0)}
    apply_state(live, saved, only=["a", "rng"])
    assert (grads_of(live["a"]), grads_of(live["b"])) == ([None], [[6, 12, 18]])


def test_a_refused_restore_leaves_all_gradients(tmp_path: Path) -> None:
    model = model_with(1.0, 2.0)
    saved = through_disk(tmp_path, {"model": model, "gradients": ckptd.Gradients(model)})
    live = model_with(5.0, None)
    live[1] = nn.Parameter(torch.ones(4))
    with pytest.raises(StateMismatch, match=r"state\['gradients'\]"):
        apply_state({"model": live, "gradients": ckptd.Gradients(live)}, saved)
    assert grads_of(live) == [[5, 10, 15], None]


@pytest.mark.parametrize("order", [("model", "gradients"), ("gradients", "model")])
def test_what_gradients_restore_is_not_cleared(tmp_path: Path, order: tuple[str, ...]) -> None:
    def state(model: nn.Module) -> dict[str, Any]:
        parts = {"model": model, "gradients": ckptd.Gradients(model)}
        return {name: parts[name] for name in order}

    saved = through_disk(tmp_path, state(model_with(1.0, None)))
    live = model_with(5.0, 6.0)
    buffer = live[0].grad
    apply_state(state(live), saved)
    assert grads_of(live) == [[1, 2, 3], None]
    assert live[0].grad is buffer  # a reducer's bucket, or a graph's


def test_gradients_saved_when_there_were_none_clear_those_of_before(tmp_path: Path) -> None:
    model = model_with(None)
    saved = through_disk(tmp_path, {"model": model, "gradients": ckptd.Gradients(model)})
    live = model_with(5.0)
    apply_state({"model": live, "gradients": ckptd.Gradients(live)}, saved)
    assert grads_of(live) == [None]


def test_a_checkpoint_from_before_the_first_step_clears_optimizer_state_and_gradients(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    state = {"model": model, "optimizer": optimizer}
    saved = through_disk(tmp_path, state)
    before = [p.detach().clone() for p in model.parameters()]
    for _ in range(2):
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
    apply_state(state, saved)
    assert not optimizer.state
    assert grads_of(model) == [None, None]
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


# --- a run that accumulates -----------------------------------------------------------------------

MICRO, STEPS = 4, 9  # 7 batches an epoch: 36 micro-batches end in the sixth


class Noisy(Dataset[Tensor]):
    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> Tensor:
        return torch.rand(4) + index / 20 + random.random() + float(np.random.random())


def build() -> dict[str, Any]:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 1))
    return {
        "model": model,
        "optimizer": torch.optim.AdamW(model.parameters(), 0.05),
        "loader": ckptd.ResumableLoader(DataLoader(Noisy(), 3, shuffle=True)),
        "train": ckptd.TrainState(),
        "micro": [0],
    }


def batches(state: dict[str, Any], *, zero_before: bool) -> Iterator[int]:
    """Train to the end, one micro-batch after the other; yields how many there were."""
    model, optimizer, loader, train, micro = (
        state[name] for name in ("model", "optimizer", "loader", "train", "micro")
    )
    while train.step < STEPS:
        for batch in loader:
            if zero_before and micro[0] % MICRO == 0:
                optimizer.zero_grad()
            loss = model(batch).square().mean() / MICRO
            loss.backward()
            train.losses.append(loss.item())
            micro[0] += 1
            if micro[0] % MICRO == 0:
                optimizer.step()
                train.step += 1
                if not zero_before:
                    optimizer.zero_grad()
            yield micro[0]
            if train.step == STEPS:
                return


def seed(number: int) -> None:
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)


def end_of(state: dict[str, Any]) -> list[Any]:
    """Everything a run comes to, bit for bit, with the next draws."""
    draws = [random.random(), float(np.random.random()), torch.rand(3).tolist()]
    moments = [value.tolist() for per in state["optimizer"].state.values() for value in per.values()]
    return [state["train"].losses, [t.tolist() for t in state["model"].state_dict().values()], moments, draws]


def uncut(*, zero_before: bool) -> list[Any]:
    state = build()
    seed(1)
    for _ in batches(state, zero_before=zero_before):
        pass
    return end_of(state)


@pytest.mark.slow
@pytest.mark.parametrize(
    "zero_before", [True, False], ids=["zeroed before backward", "zeroed after the step"]
)
def test_a_run_cut_at_every_micro_batch_goes_on_bit_for_bit(tmp_path: Path, zero_before: bool) -> None:
    """Saved and cut after each of them, restored by a new process's objects: 36 cuts in one run."""
    seed(1)
    for cut in range(1, MICRO * STEPS + 1):
        state = build()
        state["gradients"] = ckptd.Gradients(state["model"])
        if cut == 1:
            seed(1)
        with ckptd.Client(tmp_path / "root", daemon="off") as client:
            resumed = client.restore(state)
            assert (resumed is None) == (cut == 1)
            for micro in batches(state, zero_before=zero_before):
                assert micro == cut
                client.snapshot(state["train"].step, state)
                break
        random.seed(99)  # what happens to the generators in between is no matter
    assert end_of_restored(tmp_path / "root") == uncut(zero_before=zero_before)


def end_of_restored(root: Path) -> list[Any]:
    state = build()
    state["gradients"] = ckptd.Gradients(state["model"])
    with ckptd.Client(root, daemon="off") as client:
        client.restore(state)
    return end_of(state)


@pytest.mark.parametrize("cut", [3, 6, 14])
def test_a_run_cut_inside_an_accumulation_trains_to_the_end_bit_for_bit(tmp_path: Path, cut: int) -> None:
    for turn in range(2):
        state = build()
        state["gradients"] = ckptd.Gradients(state["model"])
        seed(1 + turn)
        with ckptd.Client(tmp_path / "root", daemon="off") as client:
            client.restore(state)
            for micro in batches(state, zero_before=False):
                if micro == cut and turn == 0:
                    client.snapshot(state["train"].step, state)
                    break
    assert end_of(state) == uncut(zero_before=False)


def test_without_gradients_a_cut_inside_an_accumulation_is_said_once_and_goes_another_way(
    tmp_path: Path,
) -> None:
    state = build()
    seed(1)
    with ckptd.Client(tmp_path / "root", daemon="off") as client:
        for micro in batches(state, zero_before=False):
            if micro in (4, 6, 7):
                if micro == 6:
                    with pytest.warns(
                        CheckpointWarning, match=r"step 1: state\['optimizer'\].*ckptd.Gradients\(model\)"
                    ):
                        ticket = client.snapshot(state["train"].step, state)
                    assert ticket.committed
                else:
                    client.snapshot(
                        state["train"].step, state
                    )  # at a step nothing is lost, and it is said once
            if micro == 7:
                break
    state = build()
    with ckptd.Client(tmp_path / "root", daemon="off") as client:
        client.restore(state)
        for _ in batches(state, zero_before=False):
            pass
    assert end_of(state) != uncut(zero_before=False)


@pytest.mark.parametrize("zero_before", [True, False])
def test_without_gradients_cuts_at_optimizer_steps_are_exact_and_nothing_is_said(
    tmp_path: Path, zero_before: bool
) -> None:
    for step in range(1, STEPS + 1):
        state = build()
        if step == 1:
            seed(1)
        with ckptd.Client(tmp_path / "root", daemon="off") as client:
            client.restore(state)
            for micro in batches(state, zero_before=zero_before):
                if micro % MICRO == 0:
                    client.snapshot(state["train"].step, state)
                    break
    assert end_of(state) == uncut(zero_before=zero_before)
