# ruff: noqa: TID253
"""What was found while a restore was planned: what refuses it, what it tolerates, what it will write where."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy
import torch

from ckptd.errors import CheckpointWarning, StateMismatch
from ckptd.snapshot import keypath
from ckptd.snapshot.keypath import Path
from ckptd.tensors.generator_state import kind_of
from ckptd.tensors.optim_plan import OptimizerPlan
from ckptd.tensors.optim_restore import shorten

#: Writes one value and returns what its parent should hold: the live object itself, or a replacement.
Write: TypeAlias = Callable[[], Any]
Shaped: TypeAlias = torch.Tensor | numpy.ndarray


@dataclass(frozen=True, slots=True)
class Target:
    """A live tensor that will be written, and what with."""

    path: Path
    live: torch.Tensor
    stored: torch.Tensor


class Findings:
    """Collects while nothing live is changed.

    Args:
        strict: Whether names without counterpart, and other shapes in a module, refuse the restore.

    Attributes:
        problems: What refuses the restore, each with its key path.
        missing: Key paths live but not stored, tolerated.
        unused: Key paths stored but not live, tolerated.
        reshaped: Key paths of tensors whose shapes differ, tolerated: they keep their values.
        tolerated: Parameter groups and classes of optimizers that differ, tolerated; each with its key path, in words.
        warnings: What to say once nothing refuses the restore.
        targets: The tensors that will be written in place.
    """

    def __init__(self, *, strict: bool) -> None:
        self.strict = strict
        self.problems: list[str] = []
        self.missing: list[str] = []
        self.unused: list[str] = []
        self.reshaped: list[str] = []
        self.tolerated: list[str] = []
        self.warnings: list[str] = []
        self.targets: list[Target] = []

    def raise_problems(self) -> None:
        """Raise StateMismatch with all of them in `faults`, when there are any."""
        if self.problems:
            raise StateMismatch(
                "the checkpoint doesn't fit the live state",
                where="state",
                seen=shorten(self.problems),
                todo="build the state as it was when it was saved, or pass strict=False or only=[…]",
                faults=tuple(self.problems),
            )

    def warn(self) -> None:
        """Say what was found to be worth a warning."""
        for text in self.warnings:
            warnings.warn(text, CheckpointWarning, stacklevel=2)

    def problem(self, path: Path, fault: str) -> None:
        self.problems.append(f"{keypath.show(path)} {fault}")

    def refused(self, path: Path, error: StateMismatch) -> None:
        """Enter what an object said that was asked whether a stored state fits it."""
        for fault in error.faults or (str(error),):
            self.problems.append(f"{keypath.show(path)}: {fault}")

    def wrong_kind(self, live: Any, stored: Any, path: Path) -> Write:
        self.problem(path, f"is {kind_of(stored)} in the checkpoint, {kind_of(live)} in the live state")
        return lambda: live

    def missing_at(self, path: Path) -> None:
        self._tolerate(self.missing, path, "is not in the checkpoint")

    def unused_at(self, path: Path) -> None:
        self._tolerate(self.unused, path, "is in the checkpoint, not in the live state")

    def reshaped_at(self, path: Path, live: Shaped, stored: Shaped) -> None:
        self._tolerate(self.reshaped, path, f"has shape {list(stored.shape)}, live {list(live.shape)}")

    def of_optimizer(self, path: Path, plan: OptimizerPlan) -> None:
        """Enter what the plan for an optimizer at path leaves alone or takes nevertheless."""
        for found, names in (
            (self.missing, plan.missing),
            (self.unused, plan.unused),
            (self.reshaped, plan.reshaped),
        ):
            found.extend(keypath.show((*path, name)) for name in names)
        self.tolerated.extend(f"{keypath.show(path)}: {text}" for text in plan.tolerated)
        self.warnings.extend(f"{keypath.show(path)}: {text}" for text in plan.warnings)

    def _tolerate(self, found: list[str], path: Path, fault: str) -> None:
        if self.strict:
            self.problem(path, fault)
        else:
            found.append(keypath.show(path))
