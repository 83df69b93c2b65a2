"""How far each stream may send: in bytes, so that what has arrived and isn't taken in stays bounded.

Pure: what streams there are is handed in. A client that stopped in mid-stream keeps what it was granted for a
moment only, so that it can't keep the others from theirs.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from ckptd.limits import MAX_CREDIT_ALL_BYTES, MAX_CREDIT_BYTES, MAX_FRAME_BYTES

UNUSED_S: Final = 2.0  #: so long granted and not used: it goes to others who wait


@dataclass(eq=False)
class Account:
    """One stream's.

    Attributes:
        total: Bytes to come in; 0 while there is no memory to receive them in.
        arrived: Bytes that are here, those still to be checked included.
        have: Bytes taken in.
        upto: Bytes it may send.
        active_at: When it was granted some, sent some, or lost some again (monotonic seconds).
    """

    total: int = 0
    arrived: int = 0
    have: int = 0
    upto: int = 0
    active_at: float = 0.0

    @property
    def out(self) -> int:
        return self.upto - self.have

    @property
    def starved(self) -> bool:
        return self.arrived < self.total and self.upto <= self.arrived


def grant(accounts: Iterable[Account], now: float) -> list[Account]:
    """Raise what streams may send as far as the bounds allow; returns whose changed.

    Those with the least come first, and of those who have waited longest.
    """
    ordered = sorted(accounts, key=lambda account: (account.out, account.active_at))
    left = MAX_CREDIT_ALL_BYTES - sum(max(0, account.out) for account in ordered)
    changed = []
    for account in ordered:
        most = min(account.total, account.have + MAX_CREDIT_BYTES)
        upto = min(most, account.upto + left)
        if upto < most:  # whole frames only
            upto = account.have + (upto - account.have) // MAX_FRAME_BYTES * MAX_FRAME_BYTES
        if upto > account.upto:
            left -= upto - account.upto
            account.upto, account.active_at = upto, now
            changed.append(account)
    return changed


def revoke(accounts: Iterable[Account], now: float) -> list[Account]:
    """While somebody has nothing, take back what others have had for long and not used; returns whose changed."""
    known = list(accounts)
    if not any(account.starved for account in known):
        return []
    idle = [one for one in known if one.upto > one.arrived and now - one.active_at >= UNUSED_S]
    for account in idle:
        account.upto, account.active_at = account.arrived, now
    return idle
