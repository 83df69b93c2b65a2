"""Workers of a DataLoader that die in a test: only who waits for one of them is told."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest
from torch.utils.data._utils.signal_handling import _set_SIGCHLD_handler


@pytest.fixture
def deaf_to_children() -> Iterator[None]:
    """torch's handler of SIGCHLD raises wherever the main thread is by then, in the test itself too."""
    _set_SIGCHLD_handler()
    of_torch = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGCHLD, of_torch)
