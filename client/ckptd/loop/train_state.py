"""The counters of a training loop, as one object that a state can hold."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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

    def check_state_dict(self, state: Mapping[str, Any]) -> None:
        """Whether load_state_dict would take `state`: every fault in one error. Changes nothing.

        Raises:
            StateMismatch: Keys or types are others; `faults` lists them.
        """
        wanted = {"step", "epoch", "batch_in_epoch", "losses"}
        if not isinstance(state, Mapping) or set(state) != wanted:
            seen = sorted(map(str, state)) if isinstance(state, Mapping) else type(state).__name__
            raise StateMismatch("not a TrainState", seen=str(seen), wanted=str(sorted(wanted)))
        faults = tuple(fault for name in sorted(wanted) for fault in _faults(name, state[name]))
        if faults:
            raise StateMismatch("not a TrainState", seen="; ".join(faults), faults=faults)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` gave; `losses` stays the same list object.

        Raises:
            StateMismatch: As for check_state_dict. Nothing was changed.
        """
        self.check_state_dict(state)
        self.step, self.epoch, self.batch_in_epoch = state["step"], state["epoch"], state["batch_in_epoch"]
        self.losses[:] = state["losses"]


def _faults(name: str, value: object) -> Iterator[str]:
    if name == "losses":
        if not isinstance(value, list) or not all(isinstance(item, (int, float)) for item in value):
            yield f"{name} is a {type(value).__name__}, wanted a list of numbers"
    elif isinstance(value, bool) or not isinstance(value, int) or value < 0:
        yield f"{name} is {value!r:.80}, wanted an int of 0 or more"
