"""Which tensors of a state may be copied beside the next forward pass: those that nothing but a step changes."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn

import ckptd
from ckptd.tensors.capture import capture
from ckptd.tensors.deferring import calls_hooks, deferred


def waiting(state: dict[str, Any]) -> set[str]:
    """Key paths of the tensors whose copy can wait, written with slashes."""
    captured = capture(state, rng=False)
    owned = [row for row in captured.tensors if row.alias_of is None]
    waits = deferred(state, captured.sources).waits
    return {"/".join(map(str, row.path)) for row, waits_ in zip(owned, waits, strict=True) if waits_}


def trained(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()


def test_parameters_and_moments_wait_and_buffers_and_counters_do_not() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.Adam(model.parameters())
    trained(model, optimizer)
    found = waiting({"model": model, "optimizer": optimizer, "count": torch.ones(3)})
    assert {path for path in found if path.startswith("model/")} == {
        "model/0.weight",
        "model/0.bias",
        "model/1.weight",
        "model/1.bias",
    }
    assert "optimizer/state/model.0.weight/exp_avg" in found
    assert len(found) == 4 + 4 * 3


def test_all_waits_that_lbfgs_keeps() -> None:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        value = (model(torch.ones(2, 3)) - 1).square().sum()
        value.backward()
        return value

    optimizer.step(loss)
    found = waiting({"model": model, "optimizer": optimizer})
    assert any("old_dirs/0" in path for path in found)


def test_what_no_optimizer_of_the_state_trains_does_not_wait() -> None:
    model, frozen, loose = nn.Linear(3, 4), nn.Linear(3, 4), torch.ones(3, requires_grad=True)
    optimizer = torch.optim.SGD([*model.parameters(), loose])
    average = torch.optim.swa_utils.AveragedModel(model)
    state = {"model": model, "frozen": frozen, "average": average, "loose": loose}
    assert waiting(state) == set()
    assert waiting({**state, "optimizer": optimizer}) == {"model/weight", "model/bias"}


def test_a_parameter_of_no_module_in_the_state_does_not_wait() -> None:
    model = nn.Embedding(3, 4, max_norm=1.0)  # its forward pass writes it, which a state_dict doesn't tell
    optimizer = torch.optim.SGD(model.parameters())
    assert waiting({"model": model.state_dict(), "optimizer": optimizer}) == set()


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_an_embedding_that_its_forward_pass_renormalises_does_not_wait(kind: type[nn.Module]) -> None:
    model = nn.ModuleDict({"plain": kind(3, 4), "renormed": kind(3, 4, max_norm=1.0)})
    optimizer = torch.optim.SGD(model.parameters())
    assert waiting({"model": model, "optimizer": optimizer}) == {"model/plain.weight"}


def test_a_buffer_that_is_a_parameter_too_does_not_wait() -> None:
    model = nn.Linear(3, 4)
    model.register_buffer("same", model.weight.detach())
    assert waiting({"model": model, "optimizer": torch.optim.SGD(model.parameters())}) == {"model/bias"}


def test_state_that_is_a_gradient_does_not_wait_and_gradients_do_not() -> None:
    model = nn.Linear(3, 4)
    optimizer = torch.optim.SGD(model.parameters())
    trained(model, optimizer)
    for parameter in model.parameters():
        assert parameter.grad is not None
        optimizer.state[parameter] = {"last": parameter.grad, "own": parameter.grad.clone()}
    found = waiting({"model": model, "optimizer": optimizer, "gradients": ckptd.Gradients(model)})
    assert {path.rpartition("/")[2] for path in found} == {"weight", "bias", "own"}


def test_a_rate_that_is_a_tensor_does_not_wait() -> None:
    model = nn.Linear(3, 4)
    optimizer = torch.optim.Adam(model.parameters(), lr=torch.tensor(0.1), foreach=False)
    trained(model, optimizer)
    found = waiting({"model": model, "optimizer": optimizer})
    assert found
    assert not [path for path in found if path.startswith("optimizer/param_groups")]


def test_an_optimizer_in_a_wrapper_or_deep_in_the_state_is_found() -> None:
    class Wrapper:
        def __init__(self, optimizer: torch.optim.Optimizer) -> None:
            self.optimizer = optimizer

        def state_dict(self) -> dict[str, Any]:
            return self.optimizer.state_dict()

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.optimizer.load_state_dict(state)

    model = nn.Linear(3, 4)
    optimizer = torch.optim.SGD(model.parameters())
    assert waiting({"model": model, "optimizer": Wrapper(optimizer)}) == {"model/weight", "model/bias"}
    assert waiting({"all": [{"m": model}, (optimizer,)]}) == {"all/0/m/weight", "all/0/m/bias"}


def test_modules_whose_parameters_wait_are_named() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model[2].parameters())
    state = {"model": model, "optimizer": optimizer}
    assert deferred(state, capture(state, rng=False).sources).modules == (model[2],)


# --- steps that run no hook ------------------------------------------------------------------------


class Own(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)


class Uninitialised(torch.optim.SGD):
    """Its class was never patched: torch does that where an instance is made."""

    def __init__(self, given: Any) -> None:
        self.__dict__.update(torch.optim.SGD(given).__dict__)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Changes nothing."""


def test_steps_of_classes_that_torch_has_wrapped_run_its_hooks() -> None:
    parameters = [nn.Parameter(torch.ones(2))]
    for kind in (torch.optim.SGD, torch.optim.Adam, torch.optim.LBFGS, Own):
        assert calls_hooks(kind(parameters))
    scheduled = torch.optim.SGD(parameters, lr=1.0)
    torch.optim.lr_scheduler.StepLR(scheduled, 1)  # puts a step of its own on the instance
    assert "step" in vars(scheduled)
    assert calls_hooks(scheduled)


def test_steps_that_escape_torchs_hooks_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    parameters = [nn.Parameter(torch.ones(2))]
    assert not calls_hooks(Uninitialised(parameters))
    replaced = Own(parameters)
    monkeypatch.setattr(Own, "step", lambda self, closure=None: None)
    assert not calls_hooks(replaced)
    on_instance = torch.optim.SGD(parameters)
    on_instance.step = lambda closure=None: None  # type: ignore[method-assign]
    assert not calls_hooks(on_instance)


def test_a_step_that_only_says_of_itself_what_torchs_says_is_known() -> None:
    parameters = [nn.Parameter(torch.ones(2))]
    torch.optim.SGD(parameters)  # torch wraps the class's step when it makes the first

    class Decays(torch.optim.SGD):
        @functools.wraps(torch.optim.SGD.step)
        def step(self, closure: Any = None) -> Any:  # type: ignore[override]
            with torch.no_grad():
                parameters[0].mul_(0.9)  # before any hook
            return super().step(closure)

    assert not calls_hooks(Decays(parameters))
    on_instance = torch.optim.SGD(parameters)
    plain = on_instance.step
    on_instance.step = functools.wraps(plain)(lambda closure=None: plain(closure))  # type: ignore[method-assign]
    assert not calls_hooks(on_instance)
    on_instance.step = torch.no_grad()(plain)  # type: ignore[method-assign]
    assert calls_hooks(on_instance)


def test_what_an_optimizer_without_hooks_trains_does_not_wait_though_another_trains_it_too() -> None:
    model, other = nn.Linear(3, 4), nn.Linear(3, 4)
    optimizer = torch.optim.SGD([*model.parameters(), *other.parameters()])
    state = {"model": model, "other": other, "one": optimizer, "two": Uninitialised(model.parameters())}
    found = deferred(state, capture(state, rng=False).sources)
    assert found.unheard == ("Uninitialised",)
    assert waiting(state) == {"other/weight", "other/bias"}
