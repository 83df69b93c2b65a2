"""A client whose bounds are short for a moment: only what is to run into them does, however loaded the machine is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

import ckptd


@contextmanager
def impatient(
    client: ckptd.Client, busy_timeout_s: float = 0.3, *, start_timeout_s: float | None = None
) -> Iterator[None]:
    """Meanwhile snapshot() waits for a slot, and restore() for earlier snapshots, for no longer than this.

    With `start_timeout_s`: and both, and close(), no longer than that for a daemon that is gone.
    """
    parts: Any = client
    with pytest.MonkeyPatch.context() as patch:
        options = replace(parts._options, busy_timeout_s=busy_timeout_s)
        patch.setattr(parts._recorder, "_options", options)
        patch.setattr(parts._restoration, "_timeout_s", busy_timeout_s)
        if start_timeout_s is not None:
            patch.setattr(parts._writer, "_start_timeout_s", start_timeout_s)
            patch.setattr(parts._writer._search, "_start_timeout_s", start_timeout_s)
        yield
