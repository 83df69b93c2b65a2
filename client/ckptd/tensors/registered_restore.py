"""Restoring instances of registered dataclasses: a mutable one in place, a frozen one made anew for its parent."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ckptd.snapshot.keypath import Path
from ckptd.tensors.registered_tags import build, fields_of, unbuilt_in


def plan_fields(
    live: Any,
    stored: Any,
    path: Path,
    plan: Callable[[Any, Any, Path], Callable[[], Any]],
) -> Callable[[], Any] | None:
    """The write that brings a live instance to a stored one of the same class; None when stored isn't one.

    Args:
        live: An instance of a registered dataclass.
        stored: What was loaded.
        path: Its key path.
        plan: Plans one field.
    """
    now, then = fields_of(live), fields_of(stored)
    if now is None or then is None or type(stored) is not type(live):
        return None
    writes = {name: plan(now[name], then[name], (*path, name)) for name in then}

    def write() -> Any:
        values = {name: write() for name, write in writes.items()}
        if type(live).__dataclass_params__.frozen:
            return build(type(live), values)
        for name, value in values.items():
            object.__setattr__(live, name, value)
        return live

    return write


def faults_of_classes(components: Mapping[Any, Any]) -> Iterator[tuple[Path, str]]:
    """Key path and reason of everything in components that the classes registered here can't hold."""
    for path, found in unbuilt_in(components, ()):
        yield path, f"is a {found.class_name}, which {found.reason}"
