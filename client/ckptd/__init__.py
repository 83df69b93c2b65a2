"""ckptd: checkpointing for PyTorch training that can be trusted.

Importing this package imports neither torch nor numpy; each public name is loaded when first used.
"""

from __future__ import annotations

import importlib
import logging
from typing import TYPE_CHECKING, Any

from ckptd import errors as _errors

if TYPE_CHECKING:
    from ckptd.client import Client as Client
    from ckptd.disk.durable import atomic_write_json as atomic_write_json
    from ckptd.disk.series import latest_valid as latest_valid
    from ckptd.disk.verification import verify as verify
    from ckptd.errors import *  # noqa: F403 - every class of it, as below
    from ckptd.link.resumed import Resumed as Resumed
    from ckptd.link.ticket import Ticket as Ticket
    from ckptd.loop.cadence import Cadence as Cadence
    from ckptd.loop.loader import ResumableLoader as ResumableLoader
    from ckptd.loop.train_state import TrainState as TrainState
    from ckptd.proof.checking import check_resume as check_resume
    from ckptd.registered import register_type as register_type
    from ckptd.snapshot.descriptor import Sharding as Sharding
    from ckptd.tensors.atomic import atomic_save as atomic_save
    from ckptd.tensors.gradients import Gradients as Gradients
    from ckptd.tensors.loading import load as load
    from ckptd.tensors.migrate import migrate_v1_to_v2 as migrate_v1_to_v2
    from ckptd.tensors.rng import capture_rng_state as capture_rng_state
    from ckptd.tensors.rng import restore_rng_state as restore_rng_state
    from ckptd.tensors.saving import save as save

__version__ = "0.1.0"

# What a user must hear of is a CheckpointWarning or an error; log lines are for who sets logging up.
logging.getLogger(__name__).addHandler(logging.NullHandler())

# Where each public name lives; a module never has the name of a public function, or its import would hide it.
_WHERE = {
    "Client": "ckptd.client",
    "Ticket": "ckptd.link.ticket",
    "Resumed": "ckptd.link.resumed",
    "Cadence": "ckptd.loop.cadence",
    "TrainState": "ckptd.loop.train_state",
    "register_type": "ckptd.registered",
    "ResumableLoader": "ckptd.loop.loader",
    "check_resume": "ckptd.proof.checking",
    "Gradients": "ckptd.tensors.gradients",
    "Sharding": "ckptd.snapshot.descriptor",
    "atomic_save": "ckptd.tensors.atomic",
    "atomic_write_json": "ckptd.disk.durable",
    "capture_rng_state": "ckptd.tensors.rng",
    "restore_rng_state": "ckptd.tensors.rng",
    "latest_valid": "ckptd.disk.series",
    "load": "ckptd.tensors.loading",
    "save": "ckptd.tensors.saving",
    "verify": "ckptd.disk.verification",
    "migrate_v1_to_v2": "ckptd.tensors.migrate",
}
_SAID = (_errors.CkptdError, _errors.CheckpointWarning)
_WHERE |= {
    name: "ckptd.errors"
    for name, value in vars(_errors).items()
    if isinstance(value, type) and issubclass(value, _SAID)
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
