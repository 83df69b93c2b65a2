# ruff: noqa: TID253
"""The samplers of torch's own, by exact class: what they do is known."""

from __future__ import annotations

from typing import Any, Final

from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

#: None of them changes what it holds; each draws in `iter()` or its first step only, or what it was given does.
TORCHS_SAMPLERS: Final[frozenset[Any]] = frozenset(
    {
        BatchSampler,
        DistributedSampler,
        RandomSampler,
        SequentialSampler,
        SubsetRandomSampler,
        WeightedRandomSampler,
    }
)
