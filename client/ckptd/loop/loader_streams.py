# ruff: noqa: TID253
"""Global generators that the fetches of a pass have to themselves, so that a training loop's draws can't move them."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from ckptd.loop.loader_memory import Record


class Streams:
    """Stands in for the global generators of Python, NumPy and torch's CPU while a pass fetches.

    As in a worker process, what the dataset draws doesn't move the training loop's generators, nor the other way
    round; so a pass that is fetched again draws the same again.

    Args:
        start: Everything's memory just before the pass. What it draws is decided by where the global generators
            stood then, and
        epoch: which pass it is.
        whose: What draws from them, if not the fetches.
    """

    def __init__(self, start: Record, epoch: int, *whose: str) -> None:
        seed = hashlib.sha256(repr((sorted(start["globals"].items()), epoch, *whose)).encode()).digest()
        self._python = random.Random(seed).getstate()
        self._numpy = np.random.RandomState(list(seed)).get_state()
        self._torch = (
            torch.Generator().manual_seed(int.from_bytes(seed[:8], "little", signed=True)).get_state()
        )

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Within it the global generators are these; what they come to is kept for the next time."""
        python, numpy, of_torch = random.getstate(), np.random.get_state(), torch.get_rng_state()
        self._set()
        try:
            yield
        finally:
            self._python, self._numpy, self._torch = (
                random.getstate(), np.random.get_state(), torch.get_rng_state()
            )  # fmt: skip
            random.setstate(python)
            np.random.set_state(numpy)
            torch.set_rng_state(of_torch)

    def _set(self) -> None:
        random.setstate(self._python)
        np.random.set_state(self._numpy)
        torch.set_rng_state(self._torch)
