"""Stored optimizer state whose parameter names differ from the live ones only by what wrappers add to names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckptd.tensors.module_names import match_text
from ckptd.tensors.optim import SHAPES, TIES, is_torch_form, live_names


def by_live_names(optimizer: Any, names: Mapping[int, str], stored: Any) -> Any:
    """stored by the live names where only `module.` and `_orig_mod.` in the text differ; else as it is.

    Args:
        optimizer: The live one.
        names: `ckptd.tensors.optim.name_parameters(state)`.
        stored: Any stored state; see `ckptd.tensors.module_names.match_text`.
    """
    if not is_torch_form(stored):
        return stored
    theirs = [name for group in stored["param_groups"] for name in group["params"]]
    live = [name for row in live_names(optimizer, names) for name in row]
    new = match_text(live, theirs)
    if not new:
        return stored
    renamed = {
        key: {new.get(name, name): value for name, value in stored[key].items()}
        for key in ("state", SHAPES, TIES)
        if isinstance(stored.get(key), Mapping)
    }
    groups = [
        {**group, "params": [new[name] for name in group["params"]]} for group in stored["param_groups"]
    ]
    return {**stored, **renamed, "param_groups": groups}
