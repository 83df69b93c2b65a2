# ruff: noqa: TID253
"""A state as one line per value: captured as for a snapshot, then every value spelled out or hashed."""

from __future__ import annotations

import hashlib
import json
import os
from collections import OrderedDict
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import numpy
import torch

from ckptd.loop.loader import ResumableLoader
from ckptd.proof.elements import number
from ckptd.proof.trace import Leaf
from ckptd.snapshot import keypath
from ckptd.snapshot.descriptor import TensorSpec
from ckptd.snapshot.keypath import Path
from ckptd.snapshot.values import SCALARS, PackedNumbers, TensorRef
from ckptd.tensors.capture import Captured, capture, copy_into, has_state_dict
from ckptd.tensors.generator_state import GENERATORS
from ckptd.tensors.gradients import Gradients
from ckptd.tensors.tags import MARKER

_LONG: Final = 16  # a list of more numbers than this is one value
_TEXT: Final = 120
_SHOWN_BYTES: Final = 32
_PARALLEL_BYTES: Final = 32 * 1024 * 1024
_WITH_KEYS: Final = frozenset({"dict", "odict", "defaultdict", "counter"})


class LeafReader:
    """Reads states; the memory it copies tensors into is kept for the next one."""

    def __init__(self) -> None:
        self._buffer = numpy.empty(0, dtype=numpy.uint8)

    def read(self, state: Mapping[Any, Any], *, rng: bool = True) -> tuple[dict[str, Leaf], memoryview]:
        """Every value of the state by its key, and the bytes of its tensors, valid until the next call.

        Raises:
            UnstorableState: As for a snapshot.
        """
        captured = capture(state, rng=rng)
        if self._buffer.nbytes < captured.data_bytes:
            self._buffer = numpy.empty(captured.data_bytes, dtype=numpy.uint8)
        data = self._buffer[: captured.data_bytes]
        copy_into(captured, data)
        view = data.data
        walk = _Walk(captured, view)
        walk.visit_items(captured.state.items(), ())
        return walk.leaves, view


def kinds_of(state: Mapping[Any, Any]) -> dict[str, str]:
    """Component → what it is; see Trace.kinds."""
    return {str(name): _kind(value) for name, value in state.items()} | {"rng": "rng"}


def _kind(value: Any) -> str:
    if isinstance(value, torch.nn.Module):
        return "module"
    if isinstance(value, torch.optim.Optimizer):
        return "optimizer"
    if isinstance(value, ResumableLoader):
        return "loader"
    if isinstance(value, Gradients):
        return "gradients"
    if isinstance(value, GENERATORS):
        return "generator"
    if has_state_dict(value) and callable(getattr(value, "get_last_lr", None)):
        return "scheduler"
    return "data"


class _Walk:
    """Over one captured tree. Children follow their container, whose own line tells its type and length."""

    def __init__(self, captured: Captured, data: memoryview) -> None:
        self.leaves: dict[str, Leaf] = {}
        self._rows, self._data = captured.tensors, data
        self._hashes = _hashes_of(captured, data)

    def visit_items(self, items: Any, path: Path) -> None:
        for key, item in items:
            self.visit(item, (*path, key))

    def visit(self, value: Any, path: Path) -> None:
        if isinstance(value, TensorRef):
            self._put(path, self._tensor(value.index))
        elif isinstance(value, PackedNumbers):
            unit = "floats" if value.typecode == "d" else "ints"
            self._put(path, Leaf(f"list of {len(value.data) // 8} {unit}", _hash(value.data)))
        elif isinstance(value, dict):
            self._dict(value, path)
        elif isinstance(value, (list, tuple)):
            self._sequence(value, path)
        else:
            self._put(path, plain_leaf(value))

    def _put(self, path: Path, leaf: Leaf) -> None:
        self.leaves[json.dumps(keypath.to_json(path))] = leaf

    def _dict(self, value: dict[Any, Any], path: Path) -> None:
        tag = value.get(MARKER)
        if tag is None:
            self._put(path, Leaf(f"{type(value).__name__} of {len(value)}"))
            self.visit_items(value.items(), path)
        elif tag == "ndarray":
            data = self._tensor(value["data"].index)
            text = f"ndarray {value['dtype']}{value['shape']}"
            self._put(path, Leaf(text, data.digest, "", data.offset, data.nbytes))
        elif tag in _WITH_KEYS:
            self._put(path, Leaf(f"{tag} of {len(value['items'])}"))
            self.visit_items(value["items"], path)
        elif isinstance(value.get("items"), list):
            self._put(path, Leaf(f"{tag} of {len(value['items'])}"))
            self.visit_items(enumerate(value["items"]), path)
        elif _holds_tensor(value):
            self._put(path, Leaf(str(tag)))
            self.visit_items(((key, item) for key, item in value.items() if key != MARKER), path)
        else:
            self._put(path, Leaf(str(tag), _hash(_spell(value).encode())))

    def _sequence(self, value: Any, path: Path) -> None:
        name = type(value).__name__
        if len(value) > _LONG and SCALARS.issuperset(map(type, value)):
            self._put(path, Leaf(f"{name} of {len(value)} values", _hash(_spell(value).encode())))
        else:
            self._put(path, Leaf(f"{name} of {len(value)}"))
            self.visit_items(enumerate(value), path)

    def _tensor(self, index: int) -> Leaf:
        row = self._rows[index]
        owner = index if row.alias_of is None else row.alias_of
        value = None if row.shape else number(row.dtype, self._data[row.offset : row.offset + row.nbytes])
        text = _look(row) if value is None else f"{row.dtype} {value!r}"
        tie = "" if owner == index else f", tied to {keypath.show(self._rows[owner].path)}"
        return Leaf(text + tie, self._hashes[owner], row.dtype, row.offset, row.nbytes)


def _hashes_of(captured: Captured, data: memoryview) -> dict[int, str]:
    """Row → hash, of the rows that aren't aliases; in parallel where that is worth it (hashing frees the GIL)."""
    owners = [index for index, row in enumerate(captured.tensors) if row.alias_of is None]
    rows = [captured.tensors[index] for index in owners]
    pieces = (data[row.offset : row.offset + row.nbytes] for row in rows)
    if captured.data_bytes < _PARALLEL_BYTES:
        return dict(zip(owners, map(_hash, pieces), strict=True))
    with ThreadPoolExecutor(len(os.sched_getaffinity(0)), "ckptd-hash") as pool:
        return dict(zip(owners, pool.map(_hash, pieces), strict=True))


def _look(row: TensorSpec) -> str:
    return f"{row.dtype}{list(row.shape)}"


def plain_leaf(value: Any) -> Leaf:
    """The line of a value without parts. Bytes that nobody reads, such as a generator's state, are only counted."""
    if isinstance(value, (bytes, bytearray)) and len(value) > _SHOWN_BYTES:
        return Leaf(f"{len(value)} bytes", _hash(value))
    text = _spell(value)
    return Leaf(text) if len(text) <= _TEXT else Leaf(text[:_TEXT] + "…", _hash(text.encode()))


def exact_number(value: Any) -> str:
    """A loss as text, every bit of it: a Python or NumPy number, or a tensor of one element.

    Raises:
        TypeError, ValueError, RuntimeError: It is none of those.
    """
    if isinstance(value, torch.Tensor):
        value = value.detach().item()
    elif isinstance(value, numpy.generic):
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(type(value).__name__)
    return repr(value)


def hash_of(tensor: torch.Tensor) -> str:
    """Hash of what a dense tensor shows, its dtype and shape aside."""
    plain = tensor.detach().cpu().contiguous().reshape(-1)
    return _hash(plain.view(torch.uint8).numpy().data) if plain.numel() else _hash(b"")


def _hash(data: bytes | bytearray | memoryview) -> str:
    return hashlib.sha256(data).hexdigest()[:32]


def _spell(value: Any) -> str:
    """repr(), with sets and dicts in an order that doesn't depend on the process."""
    if isinstance(value, (set, frozenset)):
        return f"{type(value).__name__}({', '.join(sorted(map(repr, value)))})"
    if isinstance(value, (dict, OrderedDict)):
        return f"{{{', '.join(f'{key!r}: {_spell(item)}' for key, item in value.items())}}}"
    if isinstance(value, (list, tuple)):
        return f"{type(value).__name__}({', '.join(map(_spell, value))})"
    return repr(value)


def _holds_tensor(value: Any) -> bool:
    if isinstance(value, (dict, list, tuple)):
        return any(map(_holds_tensor, value.values() if isinstance(value, dict) else value))
    return isinstance(value, TensorRef)
