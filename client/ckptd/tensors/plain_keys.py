"""Keys of dicts and elements of sets: which ones come back exactly, and are found again."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from ckptd.errors import UnstorableState
from ckptd.snapshot import keypath
from ckptd.snapshot.keypath import Path
from ckptd.snapshot.tree_columns import MAX_INT_BYTES, signed_bytes
from ckptd.tensors.advice import advice_for_key


def check_key(key: Any, path: Path) -> Any:
    """Return a dict's key, or raise UnstorableState when no file can hold it exactly.

    A NaN is refused too: it is equal to no key, so that none of a live dict would ever be it.
    """
    if type(key) is str:
        return key
    if not keypath.is_key(key):
        wanted = "str, int, bool, float, None, bytes or a tuple of those"
        raise _refused("a dict key that can't be stored", key, path, wanted, advice_for_key(key))
    for part in _parts(key):
        if type(part) is float and math.isnan(part):
            raise _refused("a dict key that is never found again", key, path, "a key equal to itself",
                           "use a string like 'nan', or None")  # fmt: skip
        _check_length(part, key, path)
    return key


def check_element(item: Any, path: Path) -> Any:
    """Return an element of a set, or raise UnstorableState when no file can hold it exactly."""
    if not keypath.is_key(item) and type(item) is not complex:
        wanted = "str, int, bool, float, complex, None, bytes or a tuple of those"
        raise _refused("a set element that can't be stored", item, path, wanted, advice_for_key(item))
    for part in _parts(item):
        _check_length(part, item, path)
    return item


def _parts(key: Any) -> Iterator[Any]:
    if type(key) is tuple:
        for part in key:
            yield from _parts(part)
    else:
        yield key


def _check_length(part: Any, key: Any, path: Path) -> None:
    if type(part) is int and signed_bytes(part) > MAX_INT_BYTES:
        wanted = f"an int of at most {MAX_INT_BYTES} bytes"
        raise _refused("a key with an integer too long", key, path, wanted, "store hex(value)")


def _refused(what: str, key: Any, path: Path, wanted: str, todo: str) -> UnstorableState:
    kind = f"{type(key).__module__}.{type(key).__qualname__}"
    return UnstorableState(
        what, where=keypath.show(path), seen=f"{kind} {keypath.text(key, 80)}", wanted=wanted, todo=todo
    )
