"""ckptd: checkpointing for PyTorch training that can be trusted.

Importing this package imports neither torch nor numpy; each public name is loaded when first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_WHERE = {
    "Client": "ckptd.client",
    "Ticket": "ckptd.ticket",
    "Cadence": "ckptd.cadence",
    "CheckpointWarning": "ckptd.errors",
    "TrainState": "ckptd.train_state",
    "ResumableLoader": "ckptd.loader",
    "Sharding": "ckptd.descriptor",
    "atomic_save": "ckptd.atomic",
    "atomic_write_json": "ckptd.durable",
    "capture_rng_state": "ckptd.rng",
    "restore_rng_state": "ckptd.rng",
    "latest_valid": "ckptd.series",
    "load": "ckptd.loading",
    "save": "ckptd.saving",
    "verify": "ckptd.verification",
    "migrate_v1_to_v2": "ckptd.migrate",
}

__all__ = ["__version__", *_WHERE]  # noqa: PLE0604 - names are served by __getattr__


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'ckptd' has no attribute {name!r}")
    value = getattr(importlib.import_module(_WHERE[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
