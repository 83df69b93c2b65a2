# ruff: noqa: TID253
"""What a restore will write, decided without writing: a walk over live and stored values side by side."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from functools import partial
from typing import Any, Final

import torch
from torch.nn.parameter import is_lazy

from ckptd.errors import StateMismatch
from ckptd.snapshot import keypath
from ckptd.snapshot.keypath import Path
from ckptd.snapshot.values import SCALARS
from ckptd.tensors.capture import has_state_dict
from ckptd.tensors.generator_state import GENERATORS, kind_of, set_generator, skipped_generator
from ckptd.tensors.live_contents import holds_object, is_plain
from ckptd.tensors.object_faults import object_faults
from ckptd.tensors.optim import held_optimizer, is_torch_form, name_parameters
from ckptd.tensors.optim_hooks import has_load_hooks
from ckptd.tensors.optim_names import by_live_names
from ckptd.tensors.optim_plan import OptimizerPlan
from ckptd.tensors.optim_restore import has_own_load, match_optimizer
from ckptd.tensors.registered_tags import Unbuilt
from ckptd.tensors.restore_data import is_written_in_place, plan_data
from ckptd.tensors.restore_findings import Findings, Held, Write
from ckptd.tensors.restore_held import containers, held_by_objects, targets
from ckptd.tensors.restore_kinds import object_finder, plan_replaced
from ckptd.tensors.restore_module import has_own_form, own_form_for, plan_module
from ckptd.tensors.restore_tensor import plan_tensor
from ckptd.tensors.tag_reader import GeneratorElsewhere
from ckptd.tensors.tied_values import Target, same_stored, settle_ties
from ckptd.tensors.unread import NOTHING_UNREAD, Unread

_BACK: Final = (
    "isn't in the live state, and is set as the dict that was stored; if it was an object's (a scheduler's is stored so), "
    "put the object back before the restore"
)


class Planner:
    """Plans the writes of one restore; nothing live is changed before they are called.

    Attributes:
        found: What was found on the way.
        written: Once nothing is refused, all tensors that will be written in place.
    """

    def __init__(
        self, state: Mapping[Any, Any], *, strict: bool, rollback: bool = False,
        unread: Unread = NOTHING_UNREAD,
    ) -> None:  # fmt: skip
        self.found = Findings(strict=strict, follows=rollback, unread=unread)
        self._state = state
        self._names: Mapping[int, str] | None = None
        self._met: dict[int, tuple[Any, Any, Path]] = {}
        self._optimizers: list[tuple[OptimizerPlan, Path]] = []
        self._held: dict[int, tuple[Any, Any]] = {}
        self.written: list[Target] = []

    def plan_components(
        self, components: Mapping[Any, Any], asked: Collection[Any]
    ) -> dict[Any, Write | None]:
        """The writes by name; None has the entry removed. What isn't asked for, or isn't in both, is left alone."""
        both = {name: components[name] for name in self._state if name in asked and name in components}
        gone = {name for name in self._state if name in asked and name not in both and self._may_go(name)}
        rest = (name for name in self._state if name not in both and name not in gone)
        self.found.held += (Held((name,), self._state[name]) for name in rest)
        self.found.held += held_by_objects(self._state, both)
        self._held = containers(self.found.held)
        writes: dict[Any, Write | None] = {}
        for name, live in self._state.items():
            if name in both:
                writes[name] = self.plan(live, both[name], (name,))
            elif name in gone:
                self.found.dropped_at((name,))
                writes[name] = None
            elif name in asked:
                self.found.missing_at((name,))
        return {**writes, **self._plan_new(components, asked)}

    def _may_go(self, name: Any) -> bool:
        """Whether a component that the checkpoint lacks was made since: in a rollback, if it is data."""
        return self.found.strict and self.found.follows and not holds_object(self._state[name])

    def _plan_new(self, components: Mapping[Any, Any], asked: Collection[Any]) -> dict[Any, Write]:
        """The writes of components that were removed since: in a rollback, where they are data."""
        writes, is_object = {}, object_finder(self._state.values())
        for name in (name for name in components if name in asked and name not in self._state):
            if self.found.follows and not is_object(components[name]):
                writes[name] = self.found.given(components[name])
                if isinstance(components[name], Mapping) and holds_object(self._state):
                    self.found.warnings.append(f"{keypath.show((name,))} {_BACK}")
            else:
                self.found.unused_at((name,))
        return writes

    @property
    def planned(self) -> list[Any]:
        """Every live object that gets a stored value, at any depth."""
        return [live for live, _, _ in self._met.values()]

    def raise_problems(self) -> None:
        """Raise StateMismatch when anything that was planned can't be done, or would come out wrong."""
        of_optimizers = list(self._of_optimizers())
        ties = settle_ties([*self.found.targets, *of_optimizers], targets(self.found.held), self.found.unread)
        for path, fault in ties.faults:
            self.found.problem(path, fault)
        for target in ties.apart:
            if target.set_apart is not None:
                target.set_apart()
            self.found.targets.remove(target)
        self.found.raise_problems()
        for plan, where in self._optimizers:
            self.found.warnings += plan.rounded(where)
            self.found.shared.expect(plan.stored.values())
        self.found.shared.expect(target.stored for target in self.found.targets)
        self.written = [*self.found.targets, *of_optimizers]

    def _of_optimizers(self) -> Iterator[Target]:
        for plan, path in self._optimizers:
            for live, stored, may_arrive in plan.written():
                arrived = partial(plan.arrived.add, id(live)) if may_arrive else None
                yield Target(path, live, stored, arrived=arrived)

    def retie(self) -> None:
        """Once everything is written, let objects hold the live tensors that theirs were tied to."""
        written = [(target.stored, target.live) for target in self.found.targets]
        self.found.shared.retie(written + [pair for plan, _ in self._optimizers for pair in plan.placed()])

    def plan(self, live: Any, stored: Any, path: Path) -> Write:
        """The write that brings live to stored; problems are noted."""
        if isinstance(stored, Unbuilt):
            return lambda: live  # refused by its class: see faults_of_classes
        if type(live) in SCALARS:
            return plan_replaced(self.found, live, stored, path)
        if isinstance(live, torch.Tensor):
            return plan_tensor(self.found, live, stored, path)
        if self._is_held(live, stored):
            both = isinstance(live, Mapping) and isinstance(stored, Mapping)
            return self.found.given(stored) if both else plan_replaced(self.found, live, stored, path)
        if (where := self._met_elsewhere(live, stored, path)) is not None:
            return self._second_value(live, stored, path, where)
        if isinstance(live, GENERATORS):
            return self._generator(live, stored, path)
        if not has_state_dict(live):
            return plan_data(self.found, self.plan, live, stored, path)
        self._ask(live, stored, path)
        if isinstance(live, torch.nn.Module):
            return self._module(live, stored, path)
        if isinstance(live, torch.optim.Optimizer) or held_optimizer(live) is not None:
            return self._optimizer(live, stored, path)
        return self._object(live, stored, path)

    def _is_held(self, live: Any, stored: Any) -> bool:
        """Whether live, a container, is an object's too, or in data that keeps its value, and has to come apart."""
        if id(live) not in self._held or not is_written_in_place(live) or holds_object(live):
            return False
        _, other = self._held[id(live)]
        if other is None or not is_plain(live):
            return True
        self.found.unread.need(other, stored)
        return not same_stored(other, stored)

    def _met_elsewhere(self, live: Any, stored: Any, path: Path) -> Path | None:
        """Where live stands already, and is to come to another value than here."""
        if not is_written_in_place(live):
            return None
        _, first, where = self._met.setdefault(id(live), (live, stored, path))
        if where == path:
            return None
        self.found.unread.need(first, stored)
        return None if same_stored(first, stored) else where

    def _second_value(self, live: Any, stored: Any, path: Path, where: Path) -> Write:
        """Plain data becomes two; an object can't."""
        if not holds_object(live):
            return plan_replaced(self.found, live, stored, path)
        self.found.problem(
            path, f"is the same object as {keypath.show(where)} in the live state, not in the checkpoint"
        )
        return lambda: live

    def _ask(self, live: Any, stored: Any, path: Path) -> None:
        """Have the object say beforehand whether it would take the stored state."""
        check = getattr(live, "check_state_dict", None)
        if not callable(check):
            return
        self.found.unread.need(stored)
        try:
            check(stored)
        except StateMismatch as error:
            self.found.refused(path, error)
        except Exception as error:  # noqa: BLE001 - the user's own code; what it raises refuses too
            self.found.problem(path, f"failed its check_state_dict: {type(error).__name__}: {error}")

    def _optimizer(self, live: Any, stored: Any, path: Path) -> Write:
        """Of an optimizer, or of an object that wraps one and gives its state."""
        if not is_torch_form(stored) and (has_own_load(live) or not isinstance(live, torch.optim.Optimizer)):
            return self._object(live, stored, path)
        if any(
            is_lazy(parameter) for group in held_optimizer(live).param_groups for parameter in group["params"]
        ):
            self.found.problem(
                path, "is over lazy parameters, which have no shape yet: run a forward pass first"
            )
            return lambda: live
        if self._names is None:
            self._names = name_parameters(self._state)
        optimizer, unread = held_optimizer(live), self.found.unread
        if has_load_hooks(optimizer):
            unread.need(stored)
        unread.peek(stored.get("param_groups") if isinstance(stored, Mapping) else None)
        stored = by_live_names(optimizer, self._names, stored)
        try:
            plan = match_optimizer(live, self._names, stored, strict=self.found.strict)
        except StateMismatch as error:
            self.found.refused(path, error)
            return lambda: live
        self.found.of_optimizer(path, plan)
        self._optimizers.append((plan, path))

        def write() -> Any:
            plan.apply()
            return live

        return write

    def _module(self, live: torch.nn.Module, stored: Any, path: Path) -> Write:
        if has_own_form(live):
            return self._object(live, own_form_for(live, stored), path)
        return plan_module(self.found, live, stored, path)

    def _object(self, live: Any, stored: Any, path: Path) -> Write:
        faults = list(object_faults(live, stored, path))
        for where, fault in faults:
            self.found.problem(where, fault)
        judges = callable(getattr(live, "check_state_dict", None))  # whether empty is right: Gradients may be
        if stored is None and not judges and live.state_dict() is not None:  # there was none then
            return self.found.wrong_kind(live, stored, path)
        if not (faults or judges) and isinstance(stored, Mapping) and not stored and live.state_dict():
            self.found.problem(
                path,
                f"is empty in the checkpoint, the live {type(live).__qualname__} has state (disabled then?)",
            )

        def write() -> Any:
            live.load_state_dict(self.found.shared.lend(stored))
            return live

        return write

    def _generator(self, live: Any, stored: Any, path: Path) -> Write:
        if isinstance(stored, GeneratorElsewhere):
            if isinstance(live, torch.Generator) and live.device.type == "cpu":
                self.found.problem(path, f"was on {stored.device}, the live generator is on the CPU")
            self.found.warnings.append(skipped_generator(stored, path))
            return lambda: live
        if type(stored) is not type(live) or kind_of(stored) != kind_of(live):
            return self.found.wrong_kind(live, stored, path)

        def write() -> Any:
            self.found.warnings += set_generator(live, stored, path)
            return live

        return write
