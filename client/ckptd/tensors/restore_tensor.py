# ruff: noqa: TID253
"""Whether a stored tensor can be written into a live one, and the write."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]

from ckptd.snapshot import keypath
from ckptd.snapshot.keypath import Path
from ckptd.tensors.generator_state import kind_of
from ckptd.tensors.restore_findings import Findings, Held, Write
from ckptd.tensors.restore_kinds import is_number
from ckptd.tensors.restore_number import as_shaped
from ckptd.tensors.shared_tensors import SharedTensors
from ckptd.tensors.tied_values import Target
from ckptd.tensors.torch_support import BITS_BY_ITEMSIZE


def plan_tensor(found: Findings, live: torch.Tensor, stored: Any, path: Path) -> Write:
    """The write of a tensor that isn't a module's: in place where it fits bit for bit.

    One that can't be written in place (another dtype with strict=False, expanded, an inference tensor) is replaced.
    One of one element takes a number that its dtype holds; None stands for every tensor.
    """
    if stored is None or (found.follows and not _is_like(live, stored)):
        return found.given(stored)
    if is_number(stored) and live.numel() == 1 and not isinstance(live, UninitializedTensorMixin):
        stored = as_shaped(found, live, stored, path)
        if stored is None:
            return lambda: live
    if not fits_shape(found, live, stored, path):
        found.held.append(Held(path, live))
        return lambda: live
    if live.dtype != stored.dtype or why_unwritable(live):
        return found.given(stored)
    write = _TensorWrite(live, stored, found.shared)
    found.targets.append(Target(path, live, stored, write.set_apart, arrived=write.arrived))
    return write


class _TensorWrite:
    """Copies stored into live, unless it is there already; once it is set apart it gives stored, on live's device."""

    def __init__(self, live: torch.Tensor, stored: torch.Tensor, shared: SharedTensors) -> None:
        self._live, self._stored, self._shared, self._apart = live, stored, shared, False
        self._arrived = False

    def set_apart(self) -> None:
        self._apart = True

    def arrived(self) -> None:
        self._arrived = True

    def __call__(self) -> torch.Tensor:
        live, stored = self._live, self._stored
        if self._apart:
            return self._shared.lend_on(live.device, stored)
        bits = BITS_BY_ITEMSIZE[live.itemsize]
        with torch.no_grad():
            if self._arrived:
                live.copy_(live)  # nothing but its version: a graph that saved it must see the change
            else:
                live.detach().view(bits).copy_(stored.detach().view(bits))
        return live


def _is_like(live: torch.Tensor, stored: Any) -> bool:
    return isinstance(stored, torch.Tensor) and (live.shape, live.dtype) == (stored.shape, stored.dtype)


def plan_module_tensor(
    found: Findings, live: torch.Tensor, stored: Any, path: Path, *, resized: bool = False,
    arrived: Callable[[], None] | None = None,
) -> bool:  # fmt: skip
    """Whether the module's own load will put stored into live; False leaves it alone, reported or refused.

    resized says that the module gives live the stored shape itself, before that; arrived is as in Target.
    """
    if not fits_shape(found, live, stored, path, any_shape=resized):
        return False
    reason = why_unwritable(live)
    if reason:
        found.problem(path, f"can't be written: the live tensor {reason}")
        return False
    if stored.is_complex() and not live.is_complex():
        found.warnings.append(
            f"{keypath.show(path)} is {stored.dtype} in the checkpoint, live {live.dtype}: its imaginary part is left out"
        )
        stored = stored.real
    if not (resized or isinstance(live, UninitializedTensorMixin)):
        found.targets.append(Target(path, live, stored, arrived=arrived))
    return True


def fits_shape(
    found: Findings, live: torch.Tensor, stored: Any, path: Path, *, any_shape: bool = False
) -> bool:
    """Whether stored is a tensor of live's shape (unless any will do) and dtype; notes what refuses the restore."""
    if not isinstance(stored, torch.Tensor):
        found.problem(path, f"is {kind_of(stored)} in the checkpoint, a tensor in the live state")
        return False
    if isinstance(live, UninitializedTensorMixin):
        return True
    if live.shape != stored.shape and not any_shape:
        found.reshaped_at(path, live, stored)
        return False
    if live.dtype != stored.dtype:
        found.differs(path, f"is {stored.dtype}, live {live.dtype}")
        return not found.strict
    return True


def why_unwritable(live: torch.Tensor) -> str:
    """Why writing into live would fail, or lose the values without a word; "" when it can be written."""
    if isinstance(live, UninitializedTensorMixin):
        return ""
    if live.is_meta:
        return "is on the meta device and has no memory: make it with to_empty(device=…) first"
    if live.is_inference():
        return "was made in inference mode: clone() it"
    if live.is_conj() or live.is_neg():
        return "is a lazily conjugated or negated view: clone() it"
    if any(stride == 0 and size > 1 for stride, size in zip(live.stride(), live.shape, strict=True)):
        return "is expanded, several of its elements share their memory: clone() it"
    return ""
