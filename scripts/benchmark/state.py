"""The states that are saved: a GPT's weights with Adam's moments, and many small tensors."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import nn

_MIB: Final = 1 << 20
_WIDE_FROM_MIB: Final = 64
_VALUES: Final = 64  # of one small tensor: 256 bytes


class Block(nn.Module):
    """The parameters of one transformer block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.projection = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)


class Saved:
    """A state, and how to change and compare it.

    Attributes:
        live: What ckptd is given: name → module, optimizer, tensors.
        nbytes: Of all its tensors.
        count: Of its tensors.
    """

    def __init__(self, live: dict[str, Any]) -> None:
        self.live = live
        tensors = self.tensors()
        self.nbytes, self.count = sum(tensor.nbytes for tensor in tensors.values()), len(tensors)

    def state_dict(self) -> dict[str, Any]:
        """What everybody else is given: the same tensors, detached, not copied."""
        return {
            name: part.state_dict() if hasattr(part, "state_dict") else part
            for name, part in self.live.items()
        }

    def tensors(self) -> dict[str, torch.Tensor]:
        """All its tensors as they are now, by the path that the state dict gives them."""
        return flat(self.state_dict())

    def change(self) -> None:
        """Make every value another one, as a training step does."""
        for tensor in self.tensors().values():
            tensor.add_(1)

    def wipe(self) -> None:
        """Lose every value."""
        for tensor in self.tensors().values():
            tensor.zero_()

    def copy(self) -> dict[str, torch.Tensor]:
        """Its tensors as they are now, copied."""
        return {path: tensor.clone() for path, tensor in self.tensors().items()}

    def require(self, expected: dict[str, torch.Tensor], who: str) -> None:
        """Raise RuntimeError when a value differs: a restore that is wrong has no speed."""
        now = self.tensors()
        wrong = [path for path, value in expected.items() if not torch.equal(now[path], value)]
        if wrong:
            raise RuntimeError(
                f"{who} brought back something else at {wrong[0]} ({len(wrong)} tensors in all)"
            )


def trained(mib: int) -> Saved:
    """A model of blocks with Adam's moments, of about so many MiB in all; at least one block.

    All values are random: a file system that compresses gains nothing.
    """
    width = 512 if mib >= _WIDE_FROM_MIB else 128
    block_bytes = 3 * 4 * sum(parameter.numel() for parameter in Block(width).parameters())
    model = nn.ModuleList(Block(width) for _ in range(max(1, round(mib * _MIB / block_bytes))))
    optimizer = torch.optim.Adam(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return Saved({"model": model, "optimizer": optimizer})


def many(count: int) -> Saved:
    """So many tensors of 256 bytes."""
    return Saved({"model": {f"t{number}": torch.randn(_VALUES) for number in range(count)}})


def flat(values: Any) -> dict[str, torch.Tensor]:
    """The tensors of nested dicts and lists by their path."""
    return dict(_flat(values, ""))


def _flat(value: Any, path: str) -> list[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        return [(path, value)]
    if isinstance(value, dict):
        return [
            found for key, one in value.items() for found in _flat(one, f"{path}.{key}" if path else f"{key}")
        ]
    if isinstance(value, (list, tuple)):
        return [found for key, one in enumerate(value) for found in _flat(one, f"{path}.{key}")]
    return []
