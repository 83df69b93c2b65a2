# ruff: noqa: TID253
"""What was found while a restore was planned: what refuses it, what it tolerates, what it will write where."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy
import torch

from ckptd.errors import StateMismatch
from ckptd.snapshot import keypath
from ckptd.snapshot.keypath import Path
from ckptd.tensors.generator_state import kind_of
from ckptd.tensors.optim_plan import OptimizerPlan
from ckptd.tensors.optim_restore import shorten
from ckptd.tensors.shared_tensors import SharedTensors
from ckptd.tensors.tied_values import Target
from ckptd.tensors.unread import NOTHING_UNREAD, Unread
from ckptd.warning import warn

#: Writes one value and returns what its parent should hold: the live object itself, or a replacement.
Write: TypeAlias = Callable[[], Any]
Shaped: TypeAlias = torch.Tensor | numpy.ndarray


@dataclass(frozen=True, slots=True)
class Held:
    """Plain containers, tensors and arrays that one object holds, or one piece of data that keeps its value.

    Attributes:
        live: As they are held; never written to.
        stored: What an object's load_state_dict will get, and may copy into live; None where it doesn't.
    """

    path: Path
    live: Any
    stored: Any = None


class Findings:
    """Collects while nothing live is changed.

    Args:
        strict: Whether names without counterpart, and other shapes in a module, refuse the restore.
        follows: Whether plain data takes the stored structure altogether, as in a rollback: what has grown since goes,
            what has changed its kind, shape or dtype is replaced. Objects are compared all the same.
        unread: Which of the stored tensors have no content yet: what looks at values needs them first.

    Attributes:
        problems: What refuses the restore, each with its key path.
        missing: Key paths live but not stored, tolerated.
        unused: Key paths stored but not live, tolerated.
        reshaped: Key paths of tensors whose shapes differ, tolerated: they keep their values.
        dropped: Key paths of live dicts' entries that the checkpoint lacks and that will be removed.
        tolerated: What was taken though it differs: an optimizer's groups, class or state, another kind or dtype, a
            number that was rounded; each with its key path, in words.
        warnings: What to say once nothing refuses the restore; and again, what showed while it was written.
        targets: The tensors that will be written in place.
        held: What objects hold, and data that keeps its value: not in the checkpoint, of another shape, or not asked for.
        shared: What is given of stored tensors that are another component's as well.
    """

    def __init__(self, *, strict: bool, follows: bool = False, unread: Unread = NOTHING_UNREAD) -> None:
        self.strict, self.follows, self.unread = strict, follows, unread
        self.problems: list[str] = []
        self._strict_only = 0  # of the problems, those that wouldn't refuse with strict=False
        self.missing: list[str] = []
        self.unused: list[str] = []
        self.reshaped: list[str] = []
        self.dropped: list[str] = []
        self.tolerated: list[str] = []
        self.warnings: list[str] = []
        self.targets: list[Target] = []
        self.held: list[Held] = []
        self.shared = SharedTensors()

    def given(self, stored: Any) -> Write:
        """The write of a value that is set in what holds it."""
        return lambda: self.shared.lend(stored)

    @contextmanager
    def following(self, follows: bool) -> Iterator[None]:
        """What is planned meanwhile takes the stored structure, if follows says so."""
        before, self.follows = self.follows, self.follows or follows
        try:
            yield
        finally:
            self.follows = before

    def raise_problems(self) -> None:
        """Raise StateMismatch with all of them in `faults`, when there are any."""
        if self.problems:
            strict_only = self._strict_only == len(self.problems)
            raise StateMismatch(
                "the checkpoint doesn't fit the live state",
                where="state",
                seen=shorten(self.problems),
                todo=f"build the state as it was when it was saved, or pass {'strict=False or ' * strict_only}only=[…]",
                faults=tuple(self.problems),
                strict_only=strict_only,
            )

    def warn(self, say: Callable[[str], None] = warn) -> None:
        """Say once what was found to be worth a warning."""
        said, self.warnings = self.warnings, []
        for text in said:
            say(text)

    def warn_of_dropped(self) -> None:
        """Nothing tells a dict that shrank before the checkpoint from one that a newer script made larger."""
        if self.dropped and not self.follows:
            more = f" and {len(self.dropped) - 5} more" if len(self.dropped) > 5 else ""
            self.warnings.append(
                f"the checkpoint lacks {', '.join(self.dropped[:5])}{more}: removed from the live state, as a dict of data "
                "follows the checkpoint; strict=False keeps such entries"
            )

    def problem(self, path: Path, fault: str) -> None:
        self.problems.append(f"{keypath.show(path)} {fault}")

    def refused(self, path: Path, error: StateMismatch) -> None:
        """Enter what an object said that was asked whether a stored state fits it."""
        for fault in error.faults or (str(error),):
            self.problems.append(f"{keypath.show(path)}: {fault}")
            self._strict_only += error.strict_only

    def differs(self, path: Path, fault: str) -> None:
        """Enter what is refused when strict, else taken over as it is in the checkpoint."""
        if self.strict:
            self._strict_only += 1
            self.problem(path, fault)
        else:
            self.tolerated.append(f"{keypath.show(path)} {fault}")

    def wrong_kind(self, live: Any, stored: Any, path: Path) -> Write:
        self.problem(path, _kinds(live, stored))
        return lambda: live

    def other_kind(self, live: Any, stored: Any, path: Path) -> Write:
        """The write of a value of another kind: refused when strict, else set in what holds it."""
        self.differs(path, _kinds(live, stored))
        return self.given(stored)

    def missing_at(self, path: Path, advice: str = "") -> None:
        self._tolerate(self.missing, path, f"is not in the checkpoint{advice}")

    def dropped_at(self, path: Path) -> None:
        self.dropped.append(keypath.show(path))

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
            self.differs(path, fault)
        else:
            found.append(keypath.show(path))


def _kinds(live: Any, stored: Any) -> str:
    return f"is {kind_of(stored)} in the checkpoint, {kind_of(live)} in the live state"
