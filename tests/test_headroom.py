"""How much larger a slot is than what must fit into it."""

from __future__ import annotations

import pytest

from ckptd.limits import KIB, MIB
from ckptd.link.headroom import with_headroom


@pytest.mark.parametrize("size", [1, 300 * MIB, 80_000 * MIB])
def test_a_state_that_never_grew_costs_no_share_of_it(size: int) -> None:
    assert with_headroom(size, grew=False) == size + 256 * KIB


def test_one_that_grew_gets_room_by_its_size() -> None:
    assert with_headroom(256 * MIB, grew=True) == (256 + 2 + 1) * MIB
