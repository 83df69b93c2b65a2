"""For tests: every optimizer class of the installed torch with every option of it that works here.

The classes come from torch.optim, the options from their signatures. A class that needs something of its own
(2D parameters, sparse gradients) says so in NEEDS; one that appears in a newer torch is tried like the rest, and
`make_job` raises when it can't be run at all.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

CLASSES: dict[str, type[torch.optim.Optimizer]] = {
    name: kind
    for name, kind in sorted(vars(torch.optim).items())
    if isinstance(kind, type)
    and issubclass(kind, torch.optim.Optimizer)
    and kind is not torch.optim.Optimizer
}

#: Options tried one by one wherever the constructor has them.
OPTIONS: dict[str, Any] = {
    "foreach": [True, False],
    "fused": [True],
    "capturable": [True],
    "differentiable": [True],
    "maximize": [True],
    "amsgrad": [True],
    "nesterov": [True],
    "centered": [True],
    "momentum": [0.9],
    "decoupled_weight_decay": [True],
    "weight_decay": [0.1],
    "line_search_fn": ["strong_wolfe"],
    "lr": ["tensor"],
    "betas": ["tensor"],
    "adjust_lr_fn": ["match_rms_adamw"],
    "lr_decay": [0.5],
    "initial_accumulator_value": [0.25],
}

#: Options that other options need.
WITH: dict[tuple[str, str], dict[str, Any]] = {
    ("SGD", "nesterov"): {"momentum": 0.9},
    ("SGD", "lr"): {"momentum": 0.9},
    ("SGD", "foreach"): {"momentum": 0.9},
    ("SGD", "fused"): {"momentum": 0.9},
    ("SGD", "differentiable"): {"momentum": 0.9},
    ("SGD", "maximize"): {"momentum": 0.9},
    ("RMSprop", "centered"): {"momentum": 0.9},
}


class Dense(nn.Module):
    """Parameters of every kind of shape that classes treat apart: 0-dim, 1D, 2D, more."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.conv = nn.Parameter(torch.rand(2, 2, 2))
        self.scale = nn.Parameter(torch.ones(()))
        self.last = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.first(x)) * self.scale
        return self.last(hidden).pow(2).mean() + self.conv.pow(2).sum() * hidden.mean()


class Matrices(nn.Module):
    """Only 2D parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4, bias=False)
        self.last = nn.Linear(4, 2, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.first(x))).pow(2).mean()


class Sparse(nn.Module):
    """Only sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Embedding(6, 3, sparse=True)
        self.last = nn.Embedding(5, 3, sparse=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = (x.abs() * 100).long()
        return (self.first(rows % 6) * self.last(rows % 5)).pow(2).mean()


NEEDS: dict[str, type[nn.Module]] = {"Muon": Matrices, "SparseAdam": Sparse}


@dataclass
class Job:
    """A model, its optimizer, and the losses of the steps so far. Steps depend on their number alone."""

    kind: str
    options: dict[str, Any] = field(default_factory=dict)
    seed: int = 0
    losses: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        torch.manual_seed(self.seed)
        self.model = NEEDS.get(self.kind, Dense)()
        if self.options.get("differentiable"):
            self.model.requires_grad_(False)  # torch forbids in-place steps on leaves that require a gradient
        self.optimizer = CLASSES[self.kind](self.model.parameters(), **self.arguments())

    def arguments(self) -> dict[str, Any]:
        made = {"lr": torch.tensor(0.05), "betas": (torch.tensor(0.8), torch.tensor(0.9))}
        return {key: made[key] if value == "tensor" else value for key, value in self.options.items()}

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "losses": self.losses}

    def run(self, upto: int) -> Job:
        while len(self.losses) < upto:
            step = len(self.losses)
            loss = self.optimizer.step(lambda step=step: self._closure(step))
            self.losses.append(loss.detach().item())
        return self

    def _closure(self, step: int) -> torch.Tensor:
        x = torch.rand(4, 3, generator=torch.Generator().manual_seed(step))
        if self.options.get("differentiable"):
            return self._graph_closure(x)
        self.optimizer.zero_grad()
        loss: torch.Tensor = self.model(x)
        loss.backward()
        return loss

    def _graph_closure(self, x: torch.Tensor) -> torch.Tensor:
        """Gradients that hang on a graph, as for a learned learning rate."""
        factor = torch.tensor(0.5, requires_grad=True)
        for number, parameter in enumerate(self.model.parameters()):
            parameter.grad = factor * torch.sin(parameter.detach() + number + x.sum())
        return factor.detach()


def cases() -> Iterator[tuple[str, dict[str, Any]]]:
    """Every class as it is, then with each option that its constructor takes."""
    for name, kind in CLASSES.items():
        yield name, {}
        accepted = inspect.signature(kind.__init__).parameters
        for option in OPTIONS:
            for value in OPTIONS[option] if option in accepted else ():
                yield name, {**WITH.get((name, option), {}), option: value}


def runs(kind: str, options: dict[str, Any]) -> bool:
    """Whether torch itself takes two steps with these options on the CPU."""
    try:
        Job(kind, options).run(2)
    except (RuntimeError, AssertionError, ValueError, TypeError):
        return False
    return True


def shown(kind: str, options: dict[str, Any]) -> str:
    return "-".join([kind, *(f"{key}={value}" for key, value in options.items())])
