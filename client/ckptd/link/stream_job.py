"""What the thread that streams is given and gives back: where to, what, and what came of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from ckptd.disk.rootdir import DaemonRecord
from ckptd.errors import CkptdError
from ckptd.link.outgoing import Outgoing
from ckptd.link.route import Route, stream_route
from ckptd.link.wire import Attached
from ckptd.snapshot.slots import Slot

__all__ = ["PAUSE_S", "Failed", "Job", "Place"]

PAUSE_S: Final = 0.1  #: after a failure; twice as long after the next


@dataclass(frozen=True, slots=True)
class Place:
    """Where to stream to, as the attachment to a daemon says.

    Attributes:
        record: The daemon.
        attached_by: By which way.
        attached: What it said.
    """

    record: DaemonRecord
    attached_by: Route
    attached: Attached = field(repr=False)

    def route(self) -> Route:
        """The way for streams, looked up at each connection: what can't be looked at now may be fine a moment later.

        Raises:
            NoDaemon: It can't be used now.
        """
        return stream_route(self.attached_by, self.attached)


@dataclass(frozen=True, slots=True)
class Failed:
    """A snapshot that no daemon takes, and why."""

    snapshot: int
    error: CkptdError


@dataclass(eq=False, slots=True)
class Job:
    """A snapshot to stream.

    Attributes:
        over: It was withdrawn; nothing of it is sent any more.
        may_be_there: The daemon may have all of it.
    """

    snapshot: int
    generation: int
    slot: Slot
    outgoing: Outgoing
    over: bool = False
    may_be_there: bool = False
    refusals: int = 0
    pause_s: float = PAUSE_S
