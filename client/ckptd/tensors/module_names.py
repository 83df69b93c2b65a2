# ruff: noqa: TID253
"""Names of a module's tensors without what wrappers add, so that wrapping or compiling changes no checkpoint.

DataParallel and DistributedDataParallel put `module.` before every name, torch.compile `_orig_mod.`, at the
top or at any submodule. What is a wrapper is decided by its type, as torch.distributed.checkpoint.state_dict
does it, never by text: an attribute that a user called `module` (also AveragedModel's) keeps its name.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Final

import torch

#: What wrappers add, for checkpoints of others, where only the text is left.
_PREFIXES: Final = frozenset({"module", "_orig_mod"})


def named_parameters(module: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """module.named_parameters() by canonical names."""
    canonical = Canonical(module)
    return ((canonical.name(name), parameter) for name, parameter in module.named_parameters())


def canonical_state_dict(module: torch.nn.Module) -> Any:
    """module.state_dict() by canonical names, its `_metadata` too.

    A state of another kind than torch's, from an overridden state_dict(), is given as it is.
    """
    return Canonical(module).rename(module.state_dict())


class Canonical:
    """The canonical names of one module, as it is wrapped and compiled now."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._paths: dict[str, str] = {}
        if any(_wrapped_as(part) for part in module.modules()):
            _add_paths(module, "", "", self._paths)

    def name(self, name: str) -> str:
        """The canonical form of a parameter's, buffer's or extra state's name."""
        path = name
        while self._paths:
            path, _, _ = path.rpartition(".")
            if path in self._paths:
                rest = name[len(path) + 1 :] if path else name
                return _joined(self._paths[path], rest)
            if not path:
                break
        return name

    def back(self, stored: Mapping[Any, Any], raw: Collection[str]) -> OrderedDict[Any, Any]:
        """A stored state by the names that the module has now, for its load_state_dict().

        Args:
            stored: By canonical names, or by names that differ from those only by prefixes; see match_text.
            raw: The names that the module's state_dict() has now.
        """
        raw_of = {self.name(name): name for name in raw}
        text = match_text(raw_of, stored) or {}
        names = {name: text.get(name, name) for name in stored}
        renamed = OrderedDict((raw_of.get(names[name], names[name]), item) for name, item in stored.items())
        metadata = getattr(stored, "_metadata", None)
        if isinstance(metadata, Mapping) and not text:
            paths = {**{path: path for path in metadata}, **self._paths}
            renamed._metadata = OrderedDict(  # type: ignore[attr-defined]
                (path, metadata[below]) for path, below in paths.items() if below in metadata
            )
        return renamed

    def rename(self, state: Any) -> Any:
        """A state_dict() of the module with canonical names; as it is when two would be one."""
        if not self._paths or type(state) not in (dict, OrderedDict):
            return state
        renamed = type(state)(
            (self.name(key) if isinstance(key, str) else key, item) for key, item in state.items()
        )
        if len(renamed) != len(state):
            return state
        metadata = getattr(state, "_metadata", None)
        if metadata is not None:
            # A wrapper's own entry has the name of what it wraps, which comes later and is the one to keep.
            renamed._metadata = OrderedDict(
                (self._paths.get(path, path), item) for path, item in metadata.items()
            )
        return renamed


def _add_paths(module: torch.nn.Module, path: str, canonical: str, paths: dict[str, str]) -> None:
    """Fill paths: each submodule's path (below wrappers) → the same without the wrappers."""
    paths[path] = canonical
    wrapped = _wrapped_as(module)
    for name, child in module._modules.items():
        if child is not None:
            below = canonical if name == wrapped else _joined(canonical, name)
            _add_paths(child, _joined(path, name), below, paths)


def _wrapped_as(module: torch.nn.Module) -> str | None:
    """The attribute under which a wrapper holds what it wraps; None when module is no wrapper."""
    if isinstance(module, (torch.nn.DataParallel, torch.nn.parallel.DistributedDataParallel)):
        return "module"
    # Importing the compiler takes seconds; without it nothing is compiled.
    compiler = sys.modules.get("torch._dynamo.eval_frame")
    kind = getattr(compiler, "OptimizedModule", None)
    return "_orig_mod" if kind is not None and isinstance(module, kind) else None


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def match_text(live: Collection[str], stored: Collection[Any]) -> dict[str, str] | None:
    """Stored name → live name, where they differ by the wrappers' prefixes in the text; else None.

    For checkpoints that were not made by ckptd. The names as they are come first: the prefixes count only
    where without them every name finds exactly one, or where no name is found as it is.
    """
    wanted = set(live)
    if wanted == set(stored) or not all(isinstance(name, str) for name in stored):
        return None
    ours, theirs = _by_bare_name(live), _by_bare_name(stored)
    if ours is None or theirs is None or not (ours.keys() & theirs.keys()):
        return None
    if ours.keys() != theirs.keys() and not wanted.isdisjoint(stored):
        return None
    return {name: ours.get(bare, name) for bare, name in theirs.items()}


def _by_bare_name(names: Collection[str]) -> dict[str, str] | None:
    """Name without prefixes → name; None when two would have the same."""
    bare = {".".join(part for part in name.split(".") if part not in _PREFIXES): name for name in names}
    return bare if len(bare) == len(names) else None
