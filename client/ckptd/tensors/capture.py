# ruff: noqa: TID253
"""From live objects to a plain tree and a table of tensors: the state at the moment of the call.

Capturing changes nothing and draws from no generator. What can't be stored exactly is refused by key path,
before anything is sent or written.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy
import torch

from ckptd.errors import InvalidArgument, UnstorableState
from ckptd.format.storage_types import DTYPE_NAMES
from ckptd.snapshot import keypath
from ckptd.snapshot.descriptor import TensorSpec
from ckptd.snapshot.keypath import Path
from ckptd.snapshot.values import SCALARS, DeviceValue, DtypeValue, PackedNumbers, SizeValue
from ckptd.tensors import tags
from ckptd.tensors.advice import advice, has_method
from ckptd.tensors.collector import collector_held
from ckptd.tensors.copy_threads import CopyThreads
from ckptd.tensors.copying import copy_tensors
from ckptd.tensors.module_names import canonical_state_dict
from ckptd.tensors.nesting import check_depth
from ckptd.tensors.number_lists import pack_numbers
from ckptd.tensors.optim import held_optimizer, name_parameters, optimizer_to_plain
from ckptd.tensors.plain_keys import check_element, check_key
from ckptd.tensors.rng import packed_rng_state
from ckptd.tensors.tensor_rows import TensorRows

#: Top-level names that the files use themselves.
RESERVED_NAMES: Final = frozenset({"schema", "wall_saved_at", "step", "rng", tags.MARKER})

_PACK_FROM_ITEMS: Final = 64


@dataclass(frozen=True, slots=True)
class Captured:
    """A state, captured but not yet copied.

    Attributes:
        state: The plain tree (ckptd.snapshot.values), by component name, "rng" among them.
        tensors: The rows its TensorRefs point to.
        sources: The live tensors, without a graph: one per row that isn't an alias, in the order of the rows.
        data_bytes: Length of the region all offsets lie in.
    """

    state: dict[Any, Any]
    tensors: tuple[TensorSpec, ...]
    sources: list[torch.Tensor]
    data_bytes: int


def capture(state: Mapping[Any, Any], *, rng: bool = True) -> Captured:
    """Take the state as it is now: everything but the tensors' bytes, which `copy_into` copies.

    Between the two calls no tensor of the state may change.

    Args:
        state: Component name → module, optimizer, object with `state_dict` and `load_state_dict`, generator,
            tensor or plain data, nested up to 100 levels. A list, tuple, dict, set or object counts as one, a
            deque, namedtuple or registered dataclass as two, any other kind of dict as three.
        rng: Whether to store the global generators as component "rng". They are read first.

    Raises:
        UnstorableState: Something can't be stored exactly, or a component has a reserved name;
            the error names its key path.
        InvalidArgument: state is not a mapping.
    """
    _check_top(state)
    with collector_held():
        random_state = packed_rng_state() if rng else None
        walker = _Walker(state)
        plain = {check_key(name, ()): walker.store(value, (name,)) for name, value in state.items()}
        if random_state is not None:
            plain["rng"] = walker.store(random_state, ("rng",))
        return Captured(plain, tuple(walker.table.rows), walker.table.sources, walker.table.data_bytes)


def copy_into(
    captured: Captured, buffer: memoryview | numpy.ndarray, threads: CopyThreads | None = None
) -> None:
    """Copy the tensors to their offsets in buffer, one copy each.

    Args:
        captured: What `capture` returned.
        buffer: At least `captured.data_bytes` writeable bytes. No reference to it outlives the call.
        threads: Who helps with what is large. None: nobody.

    Raises:
        InvalidArgument: The buffer is too small or read-only. Nothing was copied.
    """
    copy_tensors(captured.tensors, captured.sources, buffer, threads)


def _check_top(state: Any) -> None:
    if not isinstance(state, Mapping):
        raise InvalidArgument(
            "the state is not a dict", where="state", seen=tags.type_name(state), wanted="name → object"
        )
    for name in state:
        if isinstance(name, str) and name in RESERVED_NAMES:
            raise UnstorableState(
                "a reserved name", where=keypath.show((name,)), wanted=f"none of {', '.join(sorted(RESERVED_NAMES))}",
                todo="rename the component (RNG and step are stored by themselves)",
            )  # fmt: skip


class _Walker:
    """One walk over one state. Each `_store_*` takes a value of its type and gives the plain form."""

    def __init__(self, state: Mapping[Any, Any]) -> None:
        self.table = TensorRows()
        self._state = state
        self._names: dict[int, str] | None = None
        self._open: set[int] = set()
        self._depth = 1  # the state's own
        self._giver: Path | None = None  # of the object whose state_dict() is being stored

    def store(self, value: Any, path: Path) -> Any:
        kind = type(value)
        if kind in SCALARS:
            return value
        if isinstance(value, torch.Tensor):
            return self.table.add(value, path)
        levels = self._enter(value, path)
        try:
            handler = _HANDLERS.get(kind)
            return handler(self, value, path) if handler else self._store_other(value, path)
        finally:
            self._depth -= levels
            self._open.discard(id(value))

    def _enter(self, value: Any, path: Path) -> int:
        """Note that value is being stored; how many levels it takes."""
        if id(value) in self._open:
            raise UnstorableState(
                "the state contains itself", where=keypath.show(path), seen=tags.type_name(value),
                todo="store it without that reference, or only an index or name in its place",
            )  # fmt: skip
        levels = check_depth(value, self._depth, path)
        self._depth += levels
        self._open.add(id(value))
        return levels

    def _store_dict(self, value: dict[Any, Any], path: Path) -> Any:
        if tags.MARKER in value:
            return tags.encode_dict(value, path, self.store)
        return {check_key(key, path): self.store(item, (*path, key)) for key, item in value.items()}

    def _store_ordered_dict(self, value: OrderedDict[Any, Any], path: Path) -> Any:
        extra = [name for name, held in vars(value).items() if name != "_metadata" or held is None]
        if extra:
            raise UnstorableState(
                "an OrderedDict with attributes", where=keypath.show(path), seen=", ".join(sorted(extra)),
                todo="store them as items, or delete them before the snapshot",
            )  # fmt: skip
        if tags.MARKER in value:
            return tags.encode_dict(value, path, self.store)
        plain = OrderedDict(
            (check_key(key, path), self.store(item, (*path, key))) for key, item in value.items()
        )
        if hasattr(value, "_metadata"):
            plain._metadata = self.store(value._metadata, (*path, "_metadata"))  # type: ignore[attr-defined]
        return plain

    def _store_list(self, value: list[Any], path: Path) -> Any:
        packed = pack_numbers(value) if len(value) >= _PACK_FROM_ITEMS else None
        return packed or [self.store(item, (*path, index)) for index, item in enumerate(value)]

    def _store_packed(self, value: PackedNumbers, path: Path) -> Any:
        return value  # as packed_rng_state() gives it

    def _store_tuple(self, value: tuple[Any, ...], path: Path) -> Any:
        return tuple(self.store(item, (*path, index)) for index, item in enumerate(value))

    def _store_set(self, value: set[Any], path: Path) -> Any:
        return {check_element(item, path) for item in value}

    def _store_size(self, value: torch.Size, path: Path) -> Any:
        return SizeValue(tuple(value))

    def _store_dtype(self, value: torch.dtype, path: Path) -> Any:
        name = str(value).removeprefix("torch.")
        if name not in DTYPE_NAMES:
            raise UnstorableState(
                "a dtype that no archive names", where=keypath.show(path), seen=str(value), todo="store str(value)"
            )  # fmt: skip
        return DtypeValue(name)

    def _store_device(self, value: torch.device, path: Path) -> Any:
        return DeviceValue(str(value))

    def _store_other(self, value: Any, path: Path) -> Any:
        if has_state_dict(value):
            return self._store_object(value, path)
        tagged = tags.encode(value, path, self.store)
        if tagged is None:
            raise UnstorableState(
                "can't be stored", where=keypath.show(path), seen=tags.type_name(value), todo=advice(value)
            )
        return tagged

    def _store_object(self, value: Any, path: Path) -> Any:
        if self._giver is not None:  # its load_state_dict() would get a dict where this was
            raise UnstorableState(
                "an object with a state of its own inside what a state_dict() returned", where=keypath.show(path),
                seen=f"{tags.type_name(value)}, given by {keypath.show(self._giver)}", wanted="plain data and tensors",
                todo="put it into the state as a component of its own and leave it out of state_dict()",
            )  # fmt: skip
        given = _state_dict_of(value, partial(self._given_by, value, path), path)
        self._giver = path
        try:
            return self.store(given, path)
        finally:
            self._giver = None

    def _given_by(self, value: Any, path: Path) -> Any:
        if held_optimizer(value) is not None:  # an optimizer, or an object that wraps one and gives its state
            if self._names is None:
                self._names = name_parameters(self._state)
            return optimizer_to_plain(value, self._names, path)
        return canonical_state_dict(value) if isinstance(value, torch.nn.Module) else value.state_dict()


_HANDLERS: Final[dict[type, Callable[[_Walker, Any, Path], Any]]] = {
    dict: _Walker._store_dict,
    OrderedDict: _Walker._store_ordered_dict,
    list: _Walker._store_list,
    PackedNumbers: _Walker._store_packed,
    tuple: _Walker._store_tuple,
    set: _Walker._store_set,
    torch.Size: _Walker._store_size,
    torch.dtype: _Walker._store_dtype,
    torch.device: _Walker._store_device,
}


def has_state_dict(value: Any) -> bool:
    """Whether value is an object that gives and takes a state of its own."""
    if isinstance(value, type):
        return False
    return has_method(value, "state_dict") and has_method(value, "load_state_dict")


def _state_dict_of(value: Any, call: Callable[[], Any], path: Path) -> Any:
    try:
        return call()
    except UnstorableState:
        raise
    except Exception as error:
        raise UnstorableState(
            "state_dict() failed", where=keypath.show(path), seen=f"{type(error).__name__}: {error}"
        ) from error
