"""A ResumableLoader's position as plain values: made, checked, compared with the loader it is to be set in."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final, TypeAlias

from ckptd.errors import StateMismatch
from ckptd.loop.loader_ahead import say_read_ahead
from ckptd.loop.loader_kind import Kinds
from ckptd.loop.loader_memory import Memory, is_fetched
from ckptd.loop.loader_pass import Pass
from ckptd.loop.loader_record import own_records
from ckptd.snapshot.values import SCALARS
from ckptd.warning import warn, warn_after

Position: TypeAlias = dict[str, Any]

SCHEMA: Final = "ckptd.loader.v1"
_OPTIONAL: Final = (dict, type(None))
_LISTS: Final = (list, type(None))
#: The keys of a position and of the pass in it.
_POSITION: Final[dict[str, Any]] = {
    "schema": str, "epoch": int, "kind": dict, "now": dict, "birth": _OPTIONAL, "workers": _LISTS, "pass": _OPTIONAL,
    "over": _OPTIONAL, "unrecorded": list,
}  # fmt: skip
_PASS: Final[dict[str, Any]] = {
    "start": dict, "first": _OPTIONAL, "birth": bool, "batches": int, "steps": int, "check": int,
    "workers": _LISTS, "workers_at_start": _LISTS, "changed": str, "exhausted": bool, "last": _OPTIONAL, "loop_draws": bool,
    "streams": bool, "proofs": list, "line": bool, "rebound": list, "apart": _LISTS,
}  # fmt: skip
_COUNTS: Final = ("epoch", "batches", "steps", "check")
#: What positions of before lack.
_NEWER: Final[dict[str, Any]] = {"streams": False, "proofs": [], "line": False, "rebound": [], "apart": None}


def of_pass(of: Pass, memory: Memory) -> dict[str, Any]:
    """A pass as plain values, which later steps don't change; the memory was just read."""
    known = of.workers is not None and None not in of.workers
    at_start = of.workers_at_start if known else None
    changed = next(filter(is_fetched, of.look(read=True)), "")  # after it, what repeats is known
    return {
        "start": of.start, "first": of.first, "birth": of.birth,
        "batches": of.batches, "steps": of.steps, "check": of.check,
        "workers": list(of.workers or ()) if known else None,
        "workers_at_start": list(at_start) if at_start is not None else None,
        "changed": changed,
        "exhausted": of.exhausted, "last": of.last if of.repeats else None, "loop_draws": of.loop_draws and of.repeats,
        "proofs": [proof.plain(again=not changed and of.kind["dataset"] == "map") for proof in of.proofs],
        "streams": of.streams is not None, "line": of.line, "rebound": memory.rebound(of.held),
        "apart": of.apart() if of.apart is not None else None,
    }  # fmt: skip


def check(position: Any, kinds: Kinds, memory: Memory) -> None:
    """Whether the position can be set in this loader.

    Raises:
        StateMismatch: It can't. Nothing was changed.
    """
    _check_form(position)
    if position["pass"] is not None or position["over"] is not None:
        kinds.compare(position["kind"])
    for where, record in list(own_records(position)):
        memory.check(record, whole=where == "now")
        memory.check_contents(record)


def _check_form(position: Any) -> None:
    schema = position.get("schema") if isinstance(position, Mapping) else None
    if type(schema) is not str or schema != SCHEMA:
        raise StateMismatch(
            "not the position of a ResumableLoader, or one of another version", where="loader",
            seen=_shape(position) if schema is None else repr(schema), wanted=SCHEMA,
        )  # fmt: skip
    _check_keys(current(position), _POSITION, "loader")
    for name in ("pass", "over"):
        if position[name] is not None:
            _check_keys({**_NEWER, **position[name]}, _PASS, f"loader[{name!r}]")
            _check_names(position[name].get("rebound", []), f"loader[{name!r}]")
            _check_names(position[name].get("apart") or [], f"loader[{name!r}]")
    _check_names(position.get("unrecorded", []), "loader")
    kind = {
        name: said for name, said in position["kind"].items() if name != "sizes"
    }  # checked when it is compared
    if not all(type(name) is str and type(said) in SCALARS for name, said in kind.items()):
        raise StateMismatch("damaged position of a loader", where="loader", seen="a kind that isn't plain")


def _check_names(names: list[Any], where: str) -> None:
    if not all(type(name) is str for name in names):
        raise StateMismatch("damaged position of a loader", where=where, seen="names that are no text")


def _check_keys(value: Mapping[str, Any], wanted: Mapping[str, Any], where: str) -> None:
    wrong = sorted(str(key) for key in value if key not in wanted)
    wrong += [key for key, kind in wanted.items() if not isinstance(value.get(key, ...), kind)]
    wrong += [key for key in _COUNTS if type(value.get(key, 0)) is not int or value.get(key, 0) < 0]
    if wrong:
        raise StateMismatch("damaged position of a loader", where=where, seen=f"wrong: {', '.join(wrong)}")


def say_other_workers(position: Position, live: Mapping[str, Any]) -> None:
    """Warn when the samples to come will be augmented by other draws than in the run before."""
    said = _other_workers(position, live)
    if said:
        warn_after(said)
    say_read_ahead(position, live)


def _other_workers(position: Position, live: Mapping[str, Any]) -> str:
    """What follows from another number of workers, or from workers that stay for the next epoch or don't."""
    stored, follows = position["kind"], "the epochs to come have other random draws"
    if position["pass"] is not None and stored.get("workers") != live["workers"]:
        follows = "the rest of this epoch has the same samples, but other random draws in their augmentation"
    for name, option in (("workers", "num_workers"), ("persistent", "persistent_workers")):
        before = stored.get(name, live[name])
        if before != live[name]:
            return f"loader.{option} is {live[name]}, {before} in the checkpoint: {follows}"
    return ""


def say_not_whole(too_many: str) -> None:
    """Warn that not all around the loader could be looked into."""
    warn(
        f"dataset and samplers hold over {too_many}, too many to look into: one that draws from a "
        "generator of its own, or counts, may go on otherwise in a resumed run; the epoch's batches are fetched again"
    )


def current(position: Mapping[str, Any]) -> Position:
    """The position with what one of before lacks."""
    inside, epoch = position.get("pass"), position.get("epoch")
    changed = inside.get("changed") if isinstance(inside, Mapping) else None
    left = [changed] if isinstance(changed, str) and changed and isinstance(epoch, int) and epoch else []
    return {"unrecorded": left, **position}


def say_unrecorded(position: Position) -> None:
    """Warn of what earlier epochs left somewhere where it isn't recorded."""
    paths = position["unrecorded"]
    if paths:
        warn_after(
            f"fetching changes {', '.join(paths)}, which isn't recorded: what earlier epochs left there is missing now, "
            "so the samples to come may be others, unless it is a cache or made anew each epoch; give the "
            "object state_dict and load_state_dict, or keep it in plain attributes (numbers, text)"
        )


def say_left_here(paths: Iterable[str]) -> None:
    """Warn of what fetching changed in this process, when a position is set in it: it stays."""
    if paths:
        warn_after(
            f"fetching has changed {', '.join(sorted(paths))} in this process, which isn't recorded, so it doesn't go "
            "back to what it was: the samples to come may be others, unless it is a cache or made anew each epoch; make the "
            "dataset and its DataLoader anew, or give the object state_dict and load_state_dict"
        )


def _shape(state: object) -> str:
    return str(sorted(map(str, state))) if isinstance(state, Mapping) else type(state).__name__
