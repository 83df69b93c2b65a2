"""What a DataLoader's objects remember from one sample to the next: their generators, plain attributes, state_dicts.

Taken at one moment and put back at another, it makes the objects go on as they did from that moment.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Collection, Mapping
from typing import Any, Final, NamedTuple, TypeAlias

from ckptd.errors import StateMismatch
from ckptd.loop.loader_attributes import MAX_HOLDERS, Holder, is_same, recordable, walk
from ckptd.loop.loader_contents import Held, contents_of
from ckptd.loop.loader_first_use import has_place, place_of, undo
from ckptd.loop.loader_marks import Mark, Marker
from ckptd.loop.loader_rng import (
    OwnGenerator,
    is_generator,
    kind_of,
    new_generator,
    plain_globals,
    read_generator,
    read_globals,
    set_generator,
    set_globals,
    take_globals,
)
from ckptd.snapshot.values import SCALARS

_GLIMPSED: Final = 256  # attributes, and
_GLIMPSED_GENERATORS: Final = 8  # generators that are read before each batch

#: globals, generators: name → state of a generator; values: path → plain attribute that isn't what it was at
#: first; contents: the same of samplers' containers; states: path → state_dict.
Record: TypeAlias = dict[str, dict[str, Any]]

Spot: TypeAlias = tuple[int, Any]  #: a watched attribute: its holder's number and its name

MAX_GENERATORS: Final = 64
_HOOK = "__getitems__"  # ours, in a worker: no attribute of the user's


class Glimpse(NamedTuple):
    """A memory without state_dicts, made a record when one is wanted."""

    globals: tuple[Any, ...]
    own: Record

    def record(self) -> Record:
        return {**self.draws(), "values": self.own["values"]}

    def draws(self) -> Record:
        """As Memory.draws."""
        return {"globals": plain_globals(self.globals), "generators": self.own["generators"]}


class Memory:
    """The memory of the objects reached from named roots, and of the global generators.

    A plain attribute counts when it isn't what it was when this was made (a counter, an epoch), and keeps its
    type or was None; so a path or an option that a resumed script gives anew is left alone. An attribute of another kind
    is watched (loader_watch), not stored, unless a state_dict has it; of samplers containers of plain values are stored.

    Args:
        roots: name → object. None is skipped.
    """

    def __init__(self, roots: Mapping[str, Any]) -> None:
        self._holders, whole = walk(dict(roots))
        self._stateful = {
            holder.path: holder.of for holder in self._holders[1:]
            if has_state_dict(holder.of) and not _is_module(holder.of)
        }  # fmt: skip
        self._plain = [holder for holder in self._holders if holder.baseline]
        open_ones = [
            (number, holder) for number, holder in enumerate(self._holders)
            if not self._covered(holder.path) and not holder.is_long()
        ]  # fmt: skip
        self._watched = [one for one in open_ones if is_fetched(one[1].path) or is_sampler(one[1].path)]
        self._contents = contents_of(
            roots, [one for one in open_ones if is_sampler(one[1].path)], self._covered
        )
        self._contents.share(one for one in open_ones if is_fetched(one[1].path))
        self._at_first = {
            holder.at(name) for holder in self._holders for name, value in holder.items()
            if type(value) not in SCALARS and is_generator(value)
        }  # fmt: skip
        self.too_many = "" if whole else f"{MAX_HOLDERS} objects"
        if not self.too_many and len(self._generators(None)) > MAX_GENERATORS:
            self.too_many = f"{MAX_GENERATORS} generators"
        self._light = (
            sum(len(holder.items()) for holder in self._holders) <= _GLIMPSED
            and len(self._generators(None)) <= _GLIMPSED_GENERATORS
            and not any(path.startswith(("dataset", "collate_fn")) for path in self._stateful)
        )

    def _generators(self, most: int | None = MAX_GENERATORS) -> dict[str, OwnGenerator]:
        found: dict[int, tuple[str, OwnGenerator]] = {}
        for holder in self._holders:
            for name, value in holder.items():
                if type(value) not in SCALARS and is_generator(value) and self._records(holder, name):
                    found.setdefault(id(value), (holder.at(name), value))
        return dict(itertools.islice(found.values(), most))

    def _records(self, holder: Holder, name: Any) -> bool:
        """Whether a generator there can be put back in a new loader: one that a list came to hold can't."""
        return holder.at(name) in self._at_first or has_place(holder, name)

    def live(self, *, fetched: bool) -> dict[str, OwnGenerator]:
        """By path, each once, the generators that dataset and collate_fn hold, or that the others do."""
        found: dict[int, tuple[str, OwnGenerator]] = {}
        for holder in self._holders:
            if is_fetched(holder.path) == fetched:
                for name, value in holder.items():
                    if type(value) not in SCALARS and is_generator(value):
                        found.setdefault(id(value), (holder.at(name), value))
        return dict(found.values())

    def draws(self) -> Record:
        """Where every generator stands, global ones too."""
        own = {path: read_generator(generator) for path, generator in self._generators().items()}
        return {"globals": read_globals(), "generators": own}

    def glimpse(self) -> Glimpse | None:
        """What a fetch begins with, at little cost; None where there is much, or the dataset has a state_dict.

        Its owner may make a state_dict at a price: not before each batch.
        """
        if not self._light:
            return None
        own = {path: read_generator(generator) for path, generator in self._generators().items()}
        return Glimpse(take_globals(), {"generators": own, "values": self._values()})

    def own(self) -> Record:
        """All but the global generators."""
        own = {path: read_generator(generator) for path, generator in self._generators().items()}
        states = {path: copy.deepcopy(value.state_dict()) for path, value in self._stateful.items()}
        contents = self._contents.read()
        return {"generators": own, "values": self._values(), "contents": contents, "states": states}

    def _values(self) -> dict[str, Any]:
        values = {}
        for holder in self._plain:
            now = holder.now()
            for name, base in holder.baseline.items():
                value = now.get(name)
                if not is_same(value, base) and recordable(name, base, value):
                    values[holder.at(name)] = value
        return values

    def all(self) -> Record:
        """Everything."""
        return {"globals": read_globals(), **self.own()}

    def put(
        self, record: Record, *, values: bool = True, states: bool = True,
        leave: Record | None = None, rebound: Collection[str] = (),
    ) -> None:  # fmt: skip
        """Make the objects remember what they did when the record was taken.

        A state_dict is loaded first and plain attributes are set after it, so that what `load_state_dict`
        leaves for a later `iter()` to find is as it was too.

        Args:
            record: That of then.
            values: Whether plain attributes and contents are put back, and
            states: whether state_dicts are.
            leave: Another record: what of samplers couldn't be recorded in it stays as it is.
            rebound: The paths of what samplers keep that isn't changed in place: an iterator goes on with it.

        Raises:
            StateMismatch: A generator of the record has no place in these objects. Some may have been set.
        """
        if states:
            for path, state in record.get("states", {}).items():
                if path in self._stateful:
                    self._stateful[path].load_state_dict(copy.deepcopy(state))
        if values and "values" in record:
            self._put_values(record["values"])
        if values and "contents" in record:  # Positions of before lack it.
            self._contents.put(record["contents"], leave=(leave or {}).get("contents", {}), rebound=rebound)
        live = self._generators()
        if "generators" in record:
            new = live.keys() - record["generators"].keys() - self._at_first
            undo(self._holders, new)  # Their first use is still to come.
        for path, state in record.get("generators", {}).items():
            if path in live:
                set_generator(live[path], state)
            else:
                self._make_generator(path, state)
        if "globals" in record:
            set_globals(record["globals"])

    def _put_values(self, values: Mapping[str, Any]) -> None:
        for holder in self._holders:
            for name, base in holder.baseline.items():
                wanted, value = values.get(holder.at(name), base), holder.get(name)
                if type(value) in SCALARS and not is_same(value, wanted):
                    holder.set(name, wanted)

    def _make_generator(self, path: str, state: Any) -> None:
        holder, name = place_of(self._holders, path)
        if holder is None:
            raise StateMismatch(
                "a generator of the checkpoint has no place", where=f"loader: {path}", wanted=kind_of(state),
                todo="make the DataLoader as it was made for the checkpoint",
            )  # fmt: skip
        holder.set(name, new_generator(state))

    def check(self, record: Record, *, whole: bool = True) -> None:
        """Whether put would find a place for every generator of the record, and, if whole, a state for every generator.

        Raises:
            StateMismatch: No. Nothing was changed.
        """
        live, wanted = self._generators(), record.get("generators", {})
        kinds = {path: kind_of(read_generator(generator)) for path, generator in live.items()}
        stored = {path: kind_of(state) for path, state in wanted.items()}
        unplaced = [path for path in stored if path not in kinds and place_of(self._holders, path)[0] is None]
        other = [
            path for path in kinds
            if stored.get(path) != kinds[path] and (path in stored or (whole and path in self._at_first))
        ]  # fmt: skip
        if unplaced or other:
            raise StateMismatch(
                "the loader has other generators than the checkpoint",
                where="loader", seen=str(kinds), wanted=str(stored),
                todo="make the DataLoader as it was made for the checkpoint",
            )  # fmt: skip

    def check_contents(self, record: Record) -> None:
        """Whether put would take what samplers keep in containers.

        Raises:
            StateMismatch: No. Nothing was changed.
        """
        self._contents.check(record.get("contents", {}))

    def read_contents(self) -> None:
        """Find out what of that which samplers keep can't be recorded now: marks go by it."""
        self._contents.read()

    def held(self) -> Held:
        """The containers that samplers hold now."""
        return self._contents.held()

    def rebound(self, held: Held) -> list[str]:
        """The paths of those that samplers were given in the place of these."""
        return self._contents.rebound(held)

    def marks(self, marker: Marker, *, samplers_only: bool = False) -> dict[Spot, Mark]:
        """Of what is neither stored nor a generator.

        Args:
            marker: The one that made the marks to compare with.
            samplers_only: Whether to leave out what belongs to dataset and collate_fn.
        """
        found: dict[Spot, Mark] = {}
        for number, holder in self._watched:
            if samplers_only and is_fetched(holder.path):
                continue
            baseline = holder.baseline
            for name, value in holder.items():
                if name in baseline and (value is baseline[name] or recordable(name, baseline[name], value)):
                    continue
                if is_generator(value) and self._records(holder, name):
                    continue
                if name == _HOOK or self._contents.holds(number, name, value):
                    continue
                found[number, name] = marker.mark((number, name), value)
        return found

    def at(self, spot: Spot) -> str:
        """The path of a marked attribute."""
        return self._holders[spot[0]].at(spot[1])

    def _covered(self, path: str) -> bool:
        return any(path == of or path.startswith((f"{of}.", f"{of}[")) for of in self._stateful)


def is_fetched(path: str) -> bool:
    """Whether it belongs to what makes the samples, not their order."""
    return path.startswith(("dataset", "collate_fn"))


def is_sampler(path: str) -> bool:
    """Whether it belongs to what makes the order of the samples."""
    return path.startswith(("sampler", "batch_sampler"))


def has_state_dict(value: Any) -> bool:
    """Whether value gives and takes a state, as its class says."""
    give: Callable[..., Any] | None = getattr(type(value), "state_dict", None)
    return callable(give) and callable(getattr(type(value), "load_state_dict", None))


def _is_module(value: Any) -> bool:
    return hasattr(value, "_modules") and hasattr(value, "named_parameters")
