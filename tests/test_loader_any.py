"""Any length, batch size, sampler and number of workers, cut anywhere, once or twice: the run goes on the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from ckptd import ResumableLoader
from loader_samplers import CUSTOM
from loader_trace import Augmented, WithOwnGenerators, loader, plain, position, resume, seed, train


class Long(WithOwnGenerators):
    def __init__(self, length: int) -> None:
        super().__init__()
        self.length = length

    def __len__(self) -> int:
        return self.length


SAMPLERS = [None, "shuffle", "generator", *CUSTOM]


def make(length: int, batch: int | None, drop_last: bool, sampler: Any, **options: Any) -> ResumableLoader:
    if sampler == "shuffle" or sampler == "generator":
        options["shuffle"] = True
        sampler = None if sampler == "shuffle" else torch.Generator().manual_seed(2)
        options["generator"] = sampler
    elif sampler is not None:
        length = len(Augmented())
        options["sampler"] = sampler()
    return loader(Long(length), batch, drop_last=drop_last and batch is not None, **options)


def assert_cuts(build: Any, steps: int, first: int, second: int) -> None:
    seed()
    running = build()
    if not len(running):
        return
    positions = [position(running)]
    whole = list(train(running, steps, lambda _: positions.append(position(running))))
    first = min(first, steps - 1)
    resumed = resume(build, positions[first])
    seen = list(train(resumed, min(second, steps - first)))
    assert seen == whole[first : first + len(seen)]
    again = resume(build, position(resumed))
    rest = steps - first - len(seen)
    assert list(train(again, rest)) == whole[first + len(seen) :] if rest else True
    assert plain(position(again)[0]["now"]) == plain(positions[steps][0]["now"])


lengths, batches = st.integers(1, 12), st.one_of(st.none(), st.integers(1, 5))


@pytest.mark.slow
@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(lengths, batches, st.booleans(), st.sampled_from(SAMPLERS), st.integers(0, 14), st.integers(1, 5))
@example(1, 1, True, "shuffle", 0, 1)
def test_any_loader_goes_on_after_two_cuts(
    length: int, batch: int | None, drop_last: bool, sampler: Any, first: int, second: int
) -> None:
    assert_cuts(lambda: make(length, batch, drop_last, sampler), 15, first, second)


@pytest.mark.slow
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.integers(2, 12), batches, st.booleans(), st.sampled_from(SAMPLERS), st.integers(1, 6), st.integers(1, 3),
    st.sampled_from([1, 2]), st.integers(1, 3), st.booleans(),
)  # fmt: skip
def test_any_loader_with_workers_goes_on_after_two_cuts(
    length: int, batch: int | None, drop_last: bool, sampler: Any, first: int, second: int,
    workers: int, prefetch: int, persistent: bool,
) -> None:  # fmt: skip
    options = {"num_workers": workers, "prefetch_factor": prefetch, "persistent_workers": persistent}
    assert_cuts(lambda: make(length, batch, drop_last, sampler, **options), 8, first, second)
