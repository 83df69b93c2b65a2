# ruff: noqa: TID253
"""From loaded components back into live objects: everything is checked first, then written, RNG last."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, cast

import torch

from ckptd.errors import (
    CorruptCheckpoint,
    InvalidArgument,
    ReadFailed,
    RestoreFailed,
    RestoreTorn,
    StateMismatch,
)
from ckptd.snapshot import keypath
from ckptd.tensors.capture import has_state_dict
from ckptd.tensors.collector import collector_held
from ckptd.tensors.gradients import without_gradients
from ckptd.tensors.live_contents import holds
from ckptd.tensors.optim_restore import shorten
from ckptd.tensors.registered_restore import faults_of_classes
from ckptd.tensors.restore_findings import Findings, Write
from ckptd.tensors.restore_plan import Planner
from ckptd.tensors.rng import plan_rng, unlike_devices
from ckptd.tensors.straight import straight
from ckptd.tensors.tied_values import Target
from ckptd.tensors.unread import NOTHING_UNREAD, Unread
from ckptd.warning import HeldBack, warn_after

RNG: Final = "rng"


@dataclass(frozen=True, slots=True)
class RestoreReport:
    """What a restore left alone; the first three by full key path.

    Attributes:
        missing: Live and not in the checkpoint; they keep their values.
        unused: In the checkpoint and not live; they were ignored.
        reshaped: Tensors of another shape in the checkpoint; they keep their values.
        not_asked: Names of the checkpoint's components that `only` left out.
        tolerated: What differs and was taken all the same, each with its key path, in words: parameter groups (and whose
            settings each has now) and classes of optimizers, values of another kind or dtype, numbers that were rounded.
        dropped: Entries of live dicts that the checkpoint lacks, by full key path; they were removed.
    """

    missing: list[str] = field(default_factory=list)
    unused: list[str] = field(default_factory=list)
    reshaped: list[str] = field(default_factory=list)
    not_asked: list[str] = field(default_factory=list)
    tolerated: list[str] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)


def apply_state(
    state: MutableMapping[Any, Any],
    components: Mapping[Any, Any],
    *,
    strict: bool = True,
    only: Collection[str] | None = None,
    rollback: bool = False,
    unread: Unread = NOTHING_UNREAD,
) -> RestoreReport:
    """Bring the live objects in state to what components hold.

    Modules, optimizers, objects with `load_state_dict`, generators, tensors, arrays, lists and dicts are restored in
    place; numbers, strings and the like are set in the container that holds them. Optimizer state is matched
    by parameter name. The gradients of what is restored are cleared, unless a `Gradients` restores them. The
    global generators are set last. Inference mode is off meanwhile, else the tensors could never be trained on.

    The kind of a value must be the live one's:

    - None goes with everything but objects, on both sides (a `best` that was None at first). Of objects only the state
      of an optimizer is told from a dict where the live value is None.
    - What is restored in place takes its like only: a dict takes a dict, a list a list, an array one of its shape and
      dtype, an object what its own load_state_dict takes. A tensor or array of one element takes a number that
      its dtype holds exactly.
    - Dicts and lists may have grown or shrunk, but not by an object, for which there is none to restore. A list of data
      has the stored length after, and one of another length what was stored in it. An entry of data that only the live
      dict has is removed (`dropped`); a tensor or array may be what new code has, and is refused.
    - What is set in its container: a number
      with every number (bool, int, float, complex, NumPy's, a tensor or array of one element), text with
      text, bytes with bytes, a tuple with a tuple of any length, a namedtuple with one of the same fields,
      and anything else (a dtype, a device, a range, an enum's member) with its own type.
    - The items of a list that holds numbers, text and None alone are a history, and aren't compared.

    Plain data that stands at several places, or shares its tensors with others or with an object, becomes as many as
    were stored, and gets tensors of its own beside what isn't restored; objects that do are refused where the stored
    values differ.

    Args:
        state: As for a snapshot.
        components: As `ckptd.load` gives them. Their tensors become the live state's: use them once.
        strict: True refuses anything that has no counterpart, other shapes, dtypes and kinds. False reports the
            first two by key path and leaves them alone, and reports in words what it takes (`tolerated`): dtypes are
            converted where torch would, what is set in its container, or stands for an array, comes as it was
            stored, and settings of other parameter groups go by the names of the parameters. Whatever
            an object refuses itself (`check_state_dict`, a scheduler of another class) is refused all the same.
        only: Restore just these components ("rng" is one); the others are left alone. None means all.
        rollback: The checkpoint is known to be of this very state as it was earlier in this process. Then plain data takes
            the stored structure altogether, in `state` itself too: entries and tensors made since are removed, those
            removed since are back, what has changed its kind, shape or dtype is replaced. Objects are compared as ever.
        unread: Which of the components' tensors have no content yet (see `Loaded.unread`). Where nothing but a copy of bytes
            would follow they are read into the live tensors; the rest is read before anything is written.

    Raises:
        StateMismatch: The checkpoint doesn't fit; `faults` lists what. The live state is untouched.
        InvalidArgument: state isn't a dict, or `only` names what neither side has. Nothing was changed.
        RestoreFailed: An object's own load_state_dict failed half-way; `state_touched` is True.
        RestoreTorn: What was unread can't be read, or isn't what was committed, and a part of it is in the live
            state already.
        CorruptCheckpoint, ReadFailed: The same, and the live state is untouched.
    """
    if not isinstance(state, MutableMapping):
        raise InvalidArgument(
            "the state is not a dict", where="state", seen=type(state).__name__, wanted="name → object"
        )
    with normal_tensors(), HeldBack(), collector_held():
        return _apply(state, components, strict=strict, only=only, rollback=rollback, unread=unread)


def normal_tensors() -> AbstractContextManager[None]:
    """Inference mode off: a tensor made in it can't be trained on, nor written outside of it."""
    return cast("AbstractContextManager[None]", torch.inference_mode(False))


def _apply(
    state: MutableMapping[Any, Any],
    components: Mapping[Any, Any],
    *,
    strict: bool,
    only: Collection[str] | None,
    rollback: bool,
    unread: Unread,
) -> RestoreReport:
    names = _selected(state, components, only)
    planner = Planner(state, strict=strict, rollback=rollback, unread=unread)
    found = planner.found
    with _proven(unread):
        writes = planner.plan_components(components, names - {RNG} if RNG not in state else names)
        both = {name: components[name] for name in components if name in names and name in state}
        for path, fault in faults_of_classes(both):
            found.problem(path, fault)
        set_rng = _plan_rng(components, names, found, asked=only is not None)
        planner.raise_problems()
    found.warn_of_dropped()
    found.warn()
    first = {name: writes[name] for name in writes if _has_code(state.get(name))}
    unread.need(*(components.get(name) for name in first))
    with _proven(unread, StateMismatch):
        _write(state, first)
    _read(planner.written, components, unread, touched=bool(first))
    _write(state, {name: write for name, write in writes.items() if name not in first})
    _finish(without_gradients(planner.planned), set_rng)
    planner.retie()
    found.warn(warn_after)
    not_asked = [str(name) for name in components if name not in names]
    return RestoreReport(
        found.missing, found.unused, found.reshaped, not_asked, found.tolerated, found.dropped
    )


def _selected(
    state: Mapping[Any, Any], components: Mapping[Any, Any], only: Collection[str] | None
) -> set[Any]:
    known = {*state, *components, RNG}
    if only is None:
        return known
    if isinstance(only, str):
        raise InvalidArgument("not a list of components", where="only", seen=repr(only), wanted=f"[{only!r}]")
    unknown = [name for name in only if name not in known]
    if unknown:
        raise InvalidArgument(
            "no such component",
            where="only",
            seen=", ".join(map(repr, unknown)),
            wanted=shorten(sorted(map(repr, known))),
        )
    return set(only)


def _plan_rng(
    components: Mapping[Any, Any], names: set[Any], found: Findings, *, asked: bool
) -> Callable[[], None] | None:
    if RNG not in names:
        return None
    if RNG not in components:
        if asked:
            found.missing_at((RNG,))
        else:
            found.missing.append(keypath.show((RNG,)))  # saved without: that was said when it was saved
        return None
    found.unread.need(components[RNG])
    try:
        set_rng: Callable[[], None] = plan_rng(components[RNG])
        found.warnings += unlike_devices(components[RNG])
        return set_rng
    except StateMismatch as error:
        found.problems.append(str(error))
        return None


@contextmanager
def _proven(unread: Unread, refusal: type[Exception] = Exception) -> Iterator[None]:
    """What refuses a restore counts only where the bytes it looked at, and all others, are those committed."""
    try:
        yield
    except (CorruptCheckpoint, ReadFailed):
        raise
    except refusal:
        unread.prove()
        raise


def _has_code(live: Any) -> bool:
    """Whether code that isn't torch's is given stored values: it gets them before any parameter is overwritten."""
    return holds(live, lambda one: has_state_dict(one) and _turn(one) == 0)


def _read(
    written: Collection[Target], components: Mapping[Any, Any], unread: Unread, *, touched: bool
) -> None:
    live = straight(written, unread.uses(components), unread)
    try:
        unread.read_apart(live)
        touched = touched or bool(live)
        unread.read({address: group[0].live for address, group in live.items()})
    except Exception as error:
        if not touched:
            raise
        raise RestoreTorn(
            "the checkpoint can't be read to its end, and the live state was already written to",
            where="state", seen=f"{type(error).__name__}: {error}",
            todo="restore another one (step=, source=), or make the objects anew before training on",
        ) from error  # fmt: skip
    for target in (target for group in live.values() for target in group):
        if target.arrived is not None:
            target.arrived()


def _write(state: MutableMapping[Any, Any], writes: Mapping[Any, Write | None]) -> None:
    touched = False
    # Objects first: only their own code may still refuse, and no parameter is overwritten by then.
    for name in sorted(writes, key=lambda name: _turn(state.get(name))):
        write = writes[name]
        if write is None:
            del state[name]
            continue
        try:
            value = write()
            if name not in state or value is not state[name]:
                state[name] = value
        except Exception as error:
            if isinstance(error, StateMismatch) and not touched and _turn(state.get(name)) == 0:
                raise  # ours refuse before they change anything
            raise _half_way(name, error) from error
        touched = True


def _finish(to_clear: Collection[torch.Tensor], set_rng: Callable[[], None] | None) -> None:
    for parameter in to_clear:  # a gradient of before would count in the next step, or in an accumulation
        parameter.grad = None
    if set_rng is not None:
        try:
            set_rng()
        except RuntimeError as error:  # a device that takes no such state
            raise _half_way(RNG, error) from error


def _turn(live: Any) -> int:
    if isinstance(live, (torch.nn.Module, torch.optim.Optimizer)):
        return 2
    return 0 if has_state_dict(live) else 1


def _half_way(name: Any, error: Exception) -> RestoreFailed:
    return RestoreFailed(
        "restoring failed half-way",
        state_touched=True,
        where=f"state[{name!r}]",
        seen=f"{type(error).__name__}: {error}",
        todo="make the objects anew before training on",
    )
