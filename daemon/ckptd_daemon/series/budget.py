"""How many bytes of snapshots may be staged at once: by all clients of a root, and by each of them. Pure.

What memory has is another bound (ckptd.snapshot.room). This one is set by whoever shares the machine out, so that
one client can't have everything.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Final

from ckptd.errors import InvalidArgument, OverBudget

MOST_BYTES: Final = 2**62


@dataclass(frozen=True, kw_only=True)
class Budget:
    """Bytes of slots that may exist at once.

    Attributes:
        max_staged_bytes: Of all clients together, those included whose snapshots are still being written; None
            (default): as many as memory has.
        max_client_bytes: Of each client; None (default): likewise.
    """

    max_staged_bytes: int | None = None
    max_client_bytes: int | None = None

    def __post_init__(self) -> None:
        for one in fields(self):
            value = getattr(self, one.name)
            if value is not None and (
                isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= MOST_BYTES
            ):
                raise InvalidArgument("not a number of bytes", where=one.name, seen=repr(value)[:100],
                                      wanted=f"an int from 1 to {MOST_BYTES}, or none")  # fmt: skip

    def check(self, asked: str, wanted: int, *, held: int, held_by_all: int) -> None:
        """Whether a client may have `wanted` bytes more.

        Args:
            asked: What for, in words.
            wanted: How many more.
            held: What this client has and goes on having.
            held_by_all: The same of all clients, this one included.

        Raises:
            OverBudget: It may not; nothing was made.
        """
        bounds = (
            ("max_client_bytes", self.max_client_bytes, held, "this client"),
            ("max_staged_bytes", self.max_staged_bytes, held_by_all, "all clients"),
        )
        for name, most, has, who in bounds:
            if most is not None and has + wanted > most:
                flag = "--" + name.replace("_", "-")
                raise OverBudget(
                    f"more than the budget for staged snapshots: {asked}", where=name,
                    seen=f"{wanted} bytes more, {who} {'has' if who == 'this client' else 'have'} {has}",
                    wanted=f"at most {most} in all",
                    todo=f"use fewer slots, or raise it: ckptd start {flag}, or [staging] in .ckptd/ckptd.toml",
                )  # fmt: skip


#: Flags of `ckptd start` and of the daemon, as the fields.
BUDGET_FLAGS: Final = tuple(one.name.replace("_", "-") for one in fields(Budget))
