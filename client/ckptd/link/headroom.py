"""How much larger a slot is made than what must fit into it."""

from __future__ import annotations

from typing import Final

from ckptd.limits import MIB

_LEAST_BYTES: Final = 2 * MIB
_SHARE: Final = 256


def with_headroom(size: int) -> int:
    """`size` and what a state may grow by before its slots must be made anew: 2 MiB and 0.4 % of it.

    A history that grows by a line with each step would otherwise have new slots made at each snapshot, and every
    page of them touched. Twice of this, and all else, stays below 1.02 times two states and 32 MiB.
    """
    return size + _LEAST_BYTES + size // _SHARE
