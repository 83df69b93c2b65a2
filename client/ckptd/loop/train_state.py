"""The counters of a training loop, as one object that a state can hold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ckptd.errors import StateMismatch


@dataclass
class TrainState:
    """Where training stands: put it into the state, keep it current in the loop.

    Attributes:
        step: Finished optimizer steps.
        epoch: Finished passes over the data.
        batch_in_epoch: Finished batches of this pass.
        losses: One float per finished step. Any length: it travels packed.
    """

    step: int = 0
    epoch: int = 0
    batch_in_epoch: int = 0
    losses: list[float] = field(default_factory=list)

    def state_dict(self) -> dict[str, Any]:
        """Plain values, the same four keys as the `state` of format v1."""
        return {
            "step": self.step,
            "epoch": self.epoch,
            "batch_in_epoch": self.batch_in_epoch,
            "losses": list(self.losses),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` gave; `losses` stays the same list object.

        Raises:
            StateMismatch: Keys or types are others. Nothing was changed.
        """
        wanted = {"step", "epoch", "batch_in_epoch", "losses"}
        if not isinstance(state, Mapping) or set(state) != wanted:
            seen = sorted(map(str, state)) if isinstance(state, Mapping) else type(state).__name__
            raise StateMismatch("not a TrainState", seen=str(seen), wanted=str(sorted(wanted)))
        counters = {name: _count(name, state[name]) for name in ("step", "epoch", "batch_in_epoch")}
        losses = _numbers(state["losses"])
        self.step, self.epoch, self.batch_in_epoch = counters.values()
        self.losses[:] = losses


def _count(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise StateMismatch("not a counter", where=name, seen=repr(value), wanted="an int of 0 or more")
    return value


def _numbers(value: object) -> list[float]:
    if not isinstance(value, list) or not all(isinstance(item, (int, float)) for item in value):
        raise StateMismatch(
            "not a loss history", where="losses", seen=type(value).__name__, wanted="a list of numbers"
        )
    return list(value)
