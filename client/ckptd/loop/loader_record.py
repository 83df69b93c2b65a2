"""The records in a position, which came from a disk: their form, and their generators' states, tried on others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from ckptd.errors import StateMismatch
from ckptd.loop.loader_rng import kind_of, try_state
from ckptd.snapshot.values import SCALARS

_DRAWS: Final = ("globals", "generators")
_OWN: Final = ("generators", "values", "states")
_ALL: Final = ("globals", *_OWN)
_PARTS: Final = frozenset({*_ALL, "contents"})
_GLOBALS: Final = {"python": "python", "numpy": "legacy", "torch": "torch cpu"}


class NotARecord(Exception):
    """What is wrong with it."""


def own_records(position: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Those of the objects in this process, each with where it is.

    Raises:
        StateMismatch: One isn't what a Memory gives, or one of a worker isn't.
    """
    yield "now", _checked(position["now"], _OWN, "now")
    yield "birth", _checked(position["birth"], _ALL, "birth")
    _check_all(position["workers"], "workers")
    for name in ("pass", "over"):
        of = position[name]
        if of is not None:
            yield f"{name}.start", _checked(of["start"], _ALL, f"{name}.start")
            for part in ("first", "last"):
                yield f"{name}.{part}", _checked(of[part], _DRAWS, f"{name}.{part}")
            for part in ("workers", "workers_at_start"):
                _check_all(of[part], f"{name}.{part}")
            yield from _proofs(of.get("proofs", []), position["kind"], of["workers"], f"{name}.proofs")


def _check_all(records: Any, where: str) -> None:
    for record in records or ():
        _checked(record, _ALL, where, optional=False)


def _proofs(proofs: Any, kind: Mapping[str, Any], workers: Any, where: str) -> Iterator[tuple[str, Any]]:
    count = len(workers) if workers is not None else 1
    for proof in proofs:
        fits = isinstance(proof, dict) and proof.keys() == {"worker", "print", "before"}
        if not (fits and type(proof["worker"]) is int and 0 <= proof["worker"] < count):
            raise _damaged(where, "a proof of no worker")
        if type(proof["print"]) not in (int, type(None)):
            raise _damaged(where, "a check number that is none")
        before = _checked(proof["before"], (), where)
        if workers is None:
            yield where, before
    if workers is not None and len(workers) != kind.get("workers"):
        raise _damaged(where, f"{len(workers)} workers of {kind.get('workers')}")


def _checked(record: Any, needed: tuple[str, ...], where: str, *, optional: bool = True) -> Any:
    """The record; an empty one for None.

    Raises:
        StateMismatch: It is none.
    """
    if record is None and optional:
        return {}
    try:
        _check(record, needed)
    except NotARecord as fault:
        raise _damaged(where, str(fault)) from None
    return record


def _check(record: Any, needed: tuple[str, ...]) -> None:
    if not isinstance(record, dict) or not _PARTS.issuperset(record) or not record.keys() >= set(needed):
        raise NotARecord("no record of a loader's objects")
    for part, entries in record.items():
        if not isinstance(entries, dict) or not all(type(name) is str for name in entries):
            raise NotARecord(f"{part} that are no dict of names")
    if not all(type(value) in SCALARS for value in record.get("values", {}).values()):
        raise NotARecord("a value that isn't plain")
    if "globals" in record and record["globals"].keys() != _GLOBALS.keys():
        raise NotARecord("other global generators")
    for part in _DRAWS:
        for name, state in record.get(part, {}).items():
            _check_state(name, state, _GLOBALS[name] if part == "globals" else "")


def _check_state(name: str, state: Any, kind: str) -> None:
    try:
        try_state(state)
    except (ValueError, TypeError, LookupError, ArithmeticError, RuntimeError, MemoryError) as fault:
        raise NotARecord(f"a state that no generator takes: {name}: {str(fault)[:80]}") from fault
    if not kind_of(state).startswith(kind):
        raise NotARecord(f"the state of another generator: {name}")


def _damaged(where: str, seen: str) -> StateMismatch:
    return StateMismatch("damaged position of a loader", where=f"loader: {where}", seen=seen)
