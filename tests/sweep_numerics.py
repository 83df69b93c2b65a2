"""For tests: small jobs, one for each way in which the numbers of a training step can come about."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import ckptd

VOCABULARY = 12


class NumericsJob:
    """A model over noise, its optimizers, and one forward pass that gives the loss."""

    def __init__(
        self, model: nn.Module, optimizers: dict[str, torch.optim.Optimizer], loss: Callable[[], Tensor]
    ) -> None:
        self._optimizers, self._loss = list(optimizers.values()), loss
        self.train = ckptd.TrainState()
        self.state: dict[str, Any] = {"model": model, **optimizers, "train": self.train}

    def run(self, until: str, after: Callable[[str, Any], None]) -> None:
        while str(self.train.step) != until:
            loss = self._loss()
            for optimizer in self._optimizers:
                optimizer.zero_grad()
            loss.backward()
            for optimizer in self._optimizers:
                optimizer.step()
            self.train.step += 1
            after(str(self.train.step), loss.item())


def job(model: nn.Module, forward: Callable[[], Tensor], optimizer: str = "AdamW", **how: Any) -> NumericsJob:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    made = getattr(torch.optim, optimizer)(trained, lr=0.02, **how)
    return NumericsJob(model, {"optimizer": made}, lambda: forward().float().square().mean())


def wide() -> NumericsJob:
    """Large enough that two threads share a matrix product and a sum."""
    model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 8))
    return job(model, lambda: model(torch.randn(128, 256)))


def autocast() -> NumericsJob:
    model = nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.Linear(32, 4))

    def forward() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            found: Tensor = model(torch.randn(8, 16))
        return found

    return job(model, forward)


class FloatMoments(torch.optim.Optimizer):
    """Momentum and master weights in fp32 over bf16 parameters: another dtype would be another run."""

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state |= {"momentum": torch.zeros_like(parameter).float(), "master": parameter.float()}
                state["momentum"].mul_(0.9).add_(parameter.grad.float())
                state["master"].sub_(state["momentum"], alpha=group["lr"])
                parameter.copy_(state["master"])


def low_precision() -> NumericsJob:
    model = nn.Linear(16, 8).to(torch.bfloat16)
    optimizer = FloatMoments(model.parameters(), lr=0.001)
    return NumericsJob(
        model,
        {"optimizer": optimizer},
        lambda: model(torch.randn(8, 16, dtype=torch.bfloat16)).float().square().mean(),
    )


def channels_last() -> NumericsJob:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3))
    model = model.to(memory_format=torch.channels_last)
    return job(model, lambda: model(torch.randn(4, 3, 9, 9).contiguous(memory_format=torch.channels_last)))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, 8), nn.Linear(8, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        found: Tensor = self.head(self.embed(tokens).tanh())
        return found


def tied() -> NumericsJob:
    model = Tied()
    return job(model, lambda: model(torch.randint(VOCABULARY, (4, 5))))


def compiled() -> NumericsJob:
    model = torch.compile(nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2), nn.Linear(16, 2)), backend="eager")
    assert isinstance(model, nn.Module)
    return job(model, lambda: model(torch.randn(4, 8)))


def weight_norm() -> NumericsJob:
    model = nn.Sequential(parametrizations.weight_norm(nn.Linear(6, 8)), nn.ReLU(), nn.Linear(8, 2))
    return job(model, lambda: model(torch.randn(4, 6)))


def spectral_norm() -> NumericsJob:
    """Each forward pass moves its two buffers."""
    model = nn.Sequential(parametrizations.spectral_norm(nn.Linear(6, 8)), nn.ReLU(), nn.Linear(8, 2))
    return job(model, lambda: model(torch.randn(4, 6)))


def old_spectral_norm() -> NumericsJob:
    model = nn.Sequential(nn.utils.spectral_norm(nn.Linear(6, 8)), nn.ReLU(), nn.Linear(8, 2))
    return job(model, lambda: model(torch.randn(4, 6)))


def frozen_backbone() -> NumericsJob:
    """The backbone's norm still moves; its weights and their optimizer state don't exist to the optimizer."""
    backbone = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8)).requires_grad_(False)
    model = nn.Sequential(backbone, nn.Linear(8, 2))
    return job(model, lambda: model(torch.randn(4, 6)))


def lstm() -> NumericsJob:
    """Its weights lie in one flat storage, as views."""
    model = nn.LSTM(6, 5, num_layers=2, dropout=0.3, bidirectional=True, batch_first=True)
    model.flatten_parameters()
    return job(model, lambda: model(torch.randn(3, 4, 6))[0])


def sparse_embedding() -> NumericsJob:
    embed, head = nn.Embedding(VOCABULARY, 4, sparse=True), nn.Linear(4, 2)
    model = nn.ModuleDict({"embed": embed, "head": head})
    optimizers: dict[str, torch.optim.Optimizer] = {
        "sparse": torch.optim.SparseAdam(list(embed.parameters()), lr=0.02),
        "dense": torch.optim.Adam(head.parameters(), lr=0.02),
    }
    return NumericsJob(
        model, optimizers, lambda: head(embed(torch.randint(VOCABULARY, (6,)))).square().mean()
    )


def double() -> NumericsJob:
    model = nn.Sequential(nn.Linear(6, 8), nn.Softplus(), nn.Linear(8, 2)).double()
    return job(model, lambda: model(torch.randn(4, 6, dtype=torch.float64)), "SGD", momentum=0.9)


def complex_weights() -> NumericsJob:
    model = nn.Linear(4, 3, dtype=torch.complex64)
    return job(model, lambda: torch.view_as_real(model(torch.randn(5, 4, dtype=torch.complex64))))


JOBS: dict[str, Callable[[], NumericsJob]] = {
    made.__name__.replace("_", " "): made
    for made in (
        wide, autocast, low_precision, channels_last, tied, compiled, weight_norm, spectral_norm,
        old_spectral_norm, frozen_backbone, lstm, sparse_embedding, double, complex_weights,
    )
}  # fmt: skip
