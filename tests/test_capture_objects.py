"""Objects inside what another object's state_dict() gave: they would come back as dicts, so they are refused."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, lr_scheduler
from torch.optim.swa_utils import SWALR, AveragedModel

import ckptd
from ckptd.errors import UnstorableState
from ckptd.tensors.capture import capture
from ckptd.tensors.restoring import apply_state
from round_trip import same, through_disk


class Giving:
    """Gives all its attributes away, as many an object does."""

    def __init__(self, **parts: Any) -> None:
        vars(self).update(parts)

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    def state_dict(self) -> Any:
        return dict(vars(self))

    def load_state_dict(self, state: Any) -> None:
        vars(self).update(state)


class GivesItself(Giving):
    def state_dict(self) -> Any:
        return self.inner


class Factor:
    """What a LambdaLR calls; torch stores its attributes."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer, self.seen = optimizer, 0

    def __call__(self, step: int) -> float:
        return 0.5


class Warmup(lr_scheduler.LRScheduler):
    """Holds another scheduler, or a module, as an attribute: torch's state_dict() gives it as it is."""

    def __init__(self, optimizer: Any, inner: Any) -> None:
        self.inner = inner
        super().__init__(optimizer)

    def get_lr(self) -> Any:
        return [group["lr"] for group in self.optimizer.param_groups]


class Extra(nn.Module):
    def get_extra_state(self) -> Any:
        return {"meter": Giving(count=1)}

    def set_extra_state(self, state: Any) -> None:
        raise AssertionError("nothing was stored")


@ckptd.register_type
@dataclass
class Holding:
    name: str
    inner: Any


def sgd() -> SGD:
    return SGD(nn.Linear(1, 1).parameters(), lr=0.1)


def lambda_over_its_optimizer() -> Any:
    optimizer = sgd()
    return lr_scheduler.LambdaLR(optimizer, Factor(optimizer))


INSIDE: dict[str, tuple[Callable[[], Any], str, str]] = {
    "module": (lambda: Giving(model=nn.Linear(2, 2)), "['model']", "Linear"),
    "optimizer": (lambda: Giving(parts=[0, sgd()]), "['parts'][1]", "SGD"),
    "object": (lambda: Giving(a={"b": (Giving(),)}), "['a']['b'][0]", "Giving"),
    "in a dataclass": (lambda: Giving(a=Holding("x", nn.ReLU())), "['a']['inner']", "ReLU"),
    "lambda over its optimizer": (lambda_over_its_optimizer, "['lr_lambdas'][0]['optimizer']", "SGD"),
    "scheduler that holds a module": (lambda: Warmup(sgd(), nn.Linear(1, 1)), "['inner']", "Linear"),
    "scheduler that holds one": (lambda: Warmup(sgd(), lr_scheduler.StepLR(sgd(), 3)), "['inner']", "StepLR"),
    "extra state": (Extra, "['_extra_state']['meter']", "Giving"),
    "nothing but it": (lambda: GivesItself(inner=Giving()), "", "Giving"),
}


@pytest.mark.parametrize("kind", INSIDE)
def test_an_object_inside_what_another_gave_is_refused_by_key_path_with_what_to_do(
    kind: str, tmp_path: Path
) -> None:
    make, where, seen = INSIDE[kind]
    with pytest.raises(UnstorableState, match="put it into the state as a component of its own") as caught:
        ckptd.save(tmp_path / "c", {"fine": nn.Linear(1, 1), "holder": [make()]}, step=1)
    assert caught.value.where == f"state['holder'][0]{where}"
    assert f".{seen}, given by state['holder'][0]" in str(caught.value)
    assert not (tmp_path / "c").exists()


def test_what_a_refusal_advises_works(tmp_path: Path) -> None:
    """The inner object as a component, left out of what the outer one gives."""

    class Trainer(Giving):
        def state_dict(self) -> Any:
            return {"count": self.count}

    def make(value: float) -> dict[str, Any]:
        model = nn.Linear(2, 2)
        nn.init.constant_(model.weight, value)
        return {"trainer": Trainer(model=model, count=int(value)), "model": model}

    stored, live = make(3.0), make(1.0)
    with pytest.raises(UnstorableState):
        capture({"trainer": Giving(model=stored["model"])})
    model = live["model"]
    apply_state(live, through_disk(tmp_path, stored))
    assert live["trainer"].model is model is live["model"]
    assert live["trainer"].count == 3
    assert same(model.state_dict(), stored["model"].state_dict())


class Metric(nn.Module):
    """As torchmetrics has them: a module whose states come and go, lists among them."""

    def __init__(self) -> None:
        super().__init__()
        self.values = [torch.rand(3), torch.rand(1)]
        self.total = torch.rand(())

    def state_dict(self, *args: Any, prefix: str = "", **options: Any) -> Any:
        state = super().state_dict(*args, prefix=prefix, **options)
        state[f"{prefix}values"] = [value.detach() for value in self.values]
        state[f"{prefix}total"] = self.total.detach()
        return state


def torchs_own() -> dict[str, Any]:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    optimizer = Adam(model.parameters())
    schedules = [lr_scheduler.StepLR(optimizer, 3), lr_scheduler.ExponentialLR(optimizer, 0.9)]
    return {
        "model": model,
        "optimizer": optimizer,
        "averaged": AveragedModel(model),
        "swa": SWALR(optimizer, 0.1),
        "chained": lr_scheduler.ChainedScheduler(schedules),
        "plateau": lr_scheduler.ReduceLROnPlateau(optimizer),
        "lambda": lr_scheduler.LambdaLR(optimizer, Factor(7)),
        "scaler": torch.amp.GradScaler("cpu"),
        "metrics": nn.ModuleDict({"a": Metric(), "b": Metric()}),
        "gradients": ckptd.Gradients(model),
        "train": ckptd.TrainState(),
        "loader": ckptd.ResumableLoader(
            torch.utils.data.DataLoader(range(3), shuffle=True)  # type: ignore[arg-type]
        ),
    }


def test_what_torchs_own_objects_and_those_of_metric_libraries_give_is_stored() -> None:
    state = torchs_own()
    capture(state)
    for component in state.values():  # and what they give lies below a giver that passes it on as plain data
        capture({"outer": Giving(inner=component.state_dict())})


def test_objects_in_the_states_own_containers_are_stored_and_restored_in_place(tmp_path: Path) -> None:
    def make(value: float) -> dict[str, Any]:
        first, second, third = Giving(x=value), Giving(x=-value), Giving(x=[value])
        return {"held": Holding("a", first), "list": [second, {"deep": (third,)}], "last": first}

    stored, live = make(2.0), make(1.0)
    first = live["last"]
    apply_state(live, through_disk(tmp_path, stored))
    assert live["held"].inner is first is live["last"]
    assert (first.x, live["list"][0].x, live["list"][1]["deep"][0].x) == (2.0, -2.0, [2.0])


def test_generators_and_registered_data_inside_a_state_dict_come_back_as_they_are(tmp_path: Path) -> None:
    inside: dict[str, Any] = {
        "torch": torch.Generator().manual_seed(1),
        "numpy": np.random.default_rng(2),
        "legacy": np.random.RandomState(3),
        "python": random.Random(4),
    }
    live = Giving()
    stored = Giving(g=inside, data=Holding("a", [1, torch.ones(2)]))
    apply_state({"x": live}, through_disk(tmp_path, {"x": stored}))
    assert {name: type(value) for name, value in live.g.items()} == {
        name: type(value) for name, value in inside.items()
    }
    assert live.g["python"].random() == inside["python"].random()
    assert live.g["numpy"].random() == inside["numpy"].random()
    assert type(live.data) is Holding and same(live.data.inner, [1, torch.ones(2)])
