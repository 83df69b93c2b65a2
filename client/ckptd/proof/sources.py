"""Numbers that no seed decides: which functions of a job take them from the clock or the operating system. Pure."""

from __future__ import annotations

import os
import random
import secrets
import time
import types
import uuid
from collections.abc import Iterator, Mapping
from typing import Any, Final

#: Module → what in it gives another number in each run.
_SOURCES: Final[Mapping[types.ModuleType, tuple[str, ...]]] = {
    os: ("urandom", "getrandom", "getpid"),
    random: ("SystemRandom",),
    secrets: ("randbelow", "randbits", "choice", "token_bytes", "token_hex", "token_urlsafe", "SystemRandom"),
    time: ("time", "time_ns"),
    uuid: ("uuid1", "uuid4"),
}
_NAMES: Final = {
    id(getattr(module, name)): f"{module.__name__}.{name}"
    for module, names in _SOURCES.items()
    for name in names
    if hasattr(module, name)
}


def sources_in(code: types.CodeType, names: Mapping[str, Any]) -> Iterator[str]:
    """`os.urandom in augment()` for each that the code, or one written inside it, names; names are its globals."""
    for name in code.co_names:
        value = names.get(name)
        if isinstance(value, types.ModuleType):
            for source in _SOURCES.get(value, ()):
                if source in code.co_names:
                    yield f"{value.__name__}.{source} in {code.co_qualname}()"
        elif id(value) in _NAMES:
            yield f"{_NAMES[id(value)]} in {code.co_qualname}()"
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from sources_in(inner, names)
