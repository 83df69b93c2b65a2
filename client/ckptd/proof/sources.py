"""Numbers that no seed decides: which functions of a job take them from the clock or the operating system. Pure."""

from __future__ import annotations

import dis
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
    time: tuple(
        clock + unit
        for clock in ("time", "perf_counter", "monotonic", "process_time", "thread_time")
        for unit in ("", "_ns")
    ),
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
    for source in dict.fromkeys(_named_in(code, names)):
        yield f"{source} in {code.co_qualname}()"
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from sources_in(inner, names)


def _named_in(code: types.CodeType, names: Mapping[str, Any]) -> Iterator[str]:
    # co_names alone doesn't tell `time.sleep(…); job.time` from `time.time`: an attribute is loaded right after its module.
    module: Any = None
    for step in dis.get_instructions(code):
        if step.opname == "EXTENDED_ARG":  # belongs to the next
            continue
        if step.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            if isinstance(module, types.ModuleType) and step.argval in _SOURCES.get(module, ()):
                yield f"{module.__name__}.{step.argval}"
            module = None
        else:
            module = names.get(step.argval) if step.opname in ("LOAD_GLOBAL", "LOAD_NAME") else None
            if id(module) in _NAMES:
                yield _NAMES[id(module)]
