"""What the daemon was told of who waits in this process: then it writes and verifies at normal priority.

Small snapshots are written whatever the priority, and before such a word could do anything but disturb that: of them it
is said once they take long, because something else is in their way.
"""

from __future__ import annotations

from typing import Final

from ckptd.disk.priority import have_step_forward
from ckptd.limits import LARGE_FROM_BYTES
from ckptd.link import wire
from ckptd.link.session import Session

PATIENCE_S: Final = 0.02


class Hurrying:
    """Not safe for use by several threads at once.

    Args:
        session: The attachment.
        client_id: Of whoever waits.
    """

    def __init__(self, session: Session, client_id: str) -> None:
        self._session, self._client_id = session, client_id
        self._told = [0, 0]  # the newest snapshots that the daemon was told we wait for, and for their proof
        self._any_large = False

    def staged(self, slot_bytes: int) -> None:
        """A snapshot lies in a slot of this size."""
        self._any_large |= slot_bytes >= LARGE_FROM_BYTES

    def forgotten(self) -> None:
        """Another daemon is there now, which was told nothing."""
        self._told = [0, 0]

    def say(self, pushed: int, proof_of: int, waited_s: float) -> None:
        """Say what isn't said yet.

        Args:
            pushed: The newest snapshot on its way; 0 for none.
            proof_of: The one that is to be verified; 0 for none.
            waited_s: Since when somebody waits for them.
        """
        if waited_s < PATIENCE_S and not self._any_large:
            return
        if pushed and (record := self._session.record) is not None:
            have_step_forward(record.pid)
        for verified, newest in ((False, pushed), (True, proof_of)):
            if newest > self._told[verified]:
                request = wire.Hurry(id=0, client_id=self._client_id, snapshot=newest, verified=verified)
                if self._session.send(request) is not None:
                    self._told[verified] = newest
