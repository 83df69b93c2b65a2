"""How much larger a slot is made than what must fit into it."""

from __future__ import annotations

from typing import Final

from ckptd.limits import KIB, MIB

_LEAST_BYTES: Final = 256 * KIB
_GREW_BYTES: Final = 2 * MIB
_SHARE: Final = 256


def with_headroom(size: int, *, grew: bool) -> int:
    """`size` and what a state may grow by before its slots must be made anew: 256 KiB; once it grew, 2 MiB and 0.4 %.

    A history that grows by a line with each step would otherwise have new slots made at each snapshot, and every
    page of them touched. Most states never outgrow what was foreseen of them, and theirs stay small.

    Args:
        size: In bytes.
        grew: It is more than was foreseen, and so it will be again.
    """
    return size + (_GREW_BYTES + size // _SHARE if grew else _LEAST_BYTES)
