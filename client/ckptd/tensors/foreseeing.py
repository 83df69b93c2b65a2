# ruff: noqa: TID253
"""How large a snapshot will be once training is under way: slots are made before the first optimizer step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch

from ckptd.limits import MAX_TREE_DEPTH
from ckptd.snapshot.descriptor import Descriptor
from ckptd.snapshot.descriptor_codec import encode
from ckptd.snapshot.slots import needed_bytes
from ckptd.tensors.capture import capture
from ckptd.tensors.gradients import Gradients, missing_gradients
from ckptd.tensors.registered_tags import branches_below
from ckptd.tensors.tensor_rows import most_bytes

#: In the descriptor, for one more tensor, and for what else an optimizer keeps of one more parameter.
_ROW_BYTES: Final = 256

#: What torch's own optimizers keep for a parameter: tensors of its size and dtype, by their options, and numbers, each a
#: tensor without dimensions.
_OWN: Final[dict[str, tuple[Callable[[Mapping[str, Any]], int], int]]] = {
    "SGD": (lambda group: int(bool(group["momentum"])), 0),
    "Adam": (lambda group: 2 + bool(group["amsgrad"]), 1),
    "AdamW": (lambda group: 2 + bool(group["amsgrad"]), 1),
    "RMSprop": (lambda group: 1 + bool(group["momentum"]) + bool(group["centered"]), 1),
    "NAdam": (lambda group: 2, 2),
    "RAdam": (lambda group: 2, 1),
    "Adamax": (lambda group: 2, 1),
    "Adadelta": (lambda group: 2, 1),
    "Rprop": (lambda group: 2, 1),
    "ASGD": (lambda group: 1, 3),
    "Muon": (lambda group: 1, 0),
}


@dataclass(slots=True)
class _ToCome:
    data_bytes: int = 0
    descriptor_bytes: int = 0

    def add(self, nbytes: int, count: int = 1) -> None:
        self.data_bytes += count * most_bytes(nbytes)
        self.descriptor_bytes += count * _ROW_BYTES


def foresee(state: Mapping[Any, Any]) -> int:
    """Bytes of a slot that holds a snapshot of this state, now and once training is under way.

    Optimizer state that doesn't exist yet is counted as what torch's own classes make of their options; of any other
    class as two fp32 tensors (Adam's moments) for each trained parameter, three with amsgrad. A gradient that a
    `Gradients` will store is one tensor like the parameter.

    Raises:
        UnstorableState, InvalidArgument: As for capture.
    """
    captured = capture(state)
    described = Descriptor(
        run="", client_id="", snapshot=1, step=0, saved_at=0.0, run_seconds=0.0, base_sequence=None,
        state=captured.state, tensors=captured.tensors, data_bytes=captured.data_bytes,
    )  # fmt: skip
    coming = _ToCome()
    for value in _growing(state, 0):
        if isinstance(value, Gradients):
            for parameter in missing_gradients(value):
                coming.add(parameter.nbytes)
        else:
            _add_moments(value, coming)
    return needed_bytes(
        captured.data_bytes + coming.data_bytes, len(encode(described)) + coming.descriptor_bytes
    )


def _add_moments(optimizer: torch.optim.Optimizer, coming: _ToCome) -> None:
    kind = type(optimizer)
    own = _OWN.get(kind.__name__) if kind is getattr(torch.optim, kind.__name__, None) else None
    for group in optimizer.param_groups:
        like_it, numbers = (own[0](group), own[1]) if own is not None else (2 + bool(group.get("amsgrad")), 1)
        for parameter in group["params"]:
            if parameter.requires_grad and not optimizer.state.get(parameter):
                itemsize = parameter.itemsize if own is not None else max(4, parameter.itemsize)
                coming.add(parameter.numel() * itemsize, like_it)
                coming.add(8, numbers)
                coming.descriptor_bytes += _ROW_BYTES


def _growing(value: Any, depth: int) -> Iterator[torch.optim.Optimizer | Gradients]:
    if isinstance(value, (torch.optim.Optimizer, Gradients)):
        yield value
    elif depth < MAX_TREE_DEPTH:
        for _, item in branches_below(value):
            yield from _growing(item, depth + 1)
