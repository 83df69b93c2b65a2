"""Every error ckptd raises, in one tree; each class owns the exit code of the command line.

An error says what is wrong, where, what was seen against what was wanted, and what to do about it,
and keeps those four as attributes, so that a caller can act on them without parsing the message.
"""

from __future__ import annotations

import errno
from typing import Any, ClassVar, Final

#: What the system says when there is no room.
NO_SPACE: Final = (errno.ENOSPC, errno.EDQUOT)


class CkptdError(Exception):
    """Base of all errors raised by ckptd.

    Attributes:
        what: What is wrong, a short clause.
        where: Path, endpoint, key path or argument it is wrong at; "" when there is none.
        seen: What was found; "" when there is nothing to show.
        wanted: What would have been right; "" when there is nothing to compare.
        todo: What the reader can do about it; "" when nothing but looking closer.
    """

    exit_code: ClassVar[int] = 1

    def __init__(
        self, what: str, *, where: str = "", seen: str = "", wanted: str = "", todo: str = ""
    ) -> None:
        self.what, self.where, self.seen, self.wanted, self.todo = what, where, seen, wanted, todo
        super().__init__(what)

    def __str__(self) -> str:
        text = f"{self.where}: {self.what}" if self.where else self.what
        if self.seen and self.wanted:
            text += f": {self.seen}, wanted {self.wanted}"
        elif self.seen or self.wanted:
            text += f": {self.seen or 'wanted ' + self.wanted}"
        return f"{text}; {self.todo}" if self.todo else text

    def __reduce__(self) -> tuple[object, ...]:
        fields = {"where": self.where, "seen": self.seen, "wanted": self.wanted, "todo": self.todo}
        return (_rebuild, (type(self), self.what, fields | self._more()))

    def _more(self) -> dict[str, Any]:
        """Fields of a class of its own, for copies and other processes."""
        return {}


def _rebuild(cls: type[CkptdError], what: str, fields: dict[str, Any]) -> CkptdError:
    return cls(what, **fields)


class CheckpointWarning(UserWarning):
    """Said through `warnings`: something about saving or resuming is not as asked, and training goes on."""


# --- exit code 1: it failed -----------------------------------------------------------------------


class SaveFailed(CkptdError):
    """A snapshot could not be made durable: an I/O error other than a full disk. Nothing is lost that was committed."""


class RootMoved(SaveFailed):
    """The root was moved, removed or replaced while it was in use. Nothing is written to what is at its path now."""


class ReadFailed(CkptdError, OSError):
    """Something can't be read now: an I/O error, no descriptors, no memory. It says nothing about the checkpoints.

    Attributes:
        errno: The system's number for it; None when there is none.
    """

    def __init__(
        self, what: str, *, where: str = "", seen: str = "", wanted: str = "", todo: str = "",
        errno: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__(what, where=where, seen=seen, wanted=wanted, todo=todo)
        self.errno = errno

    def _more(self) -> dict[str, Any]:
        return {"errno": self.errno}


class UnstorableState(CkptdError, TypeError):
    """A leaf of the state can't be stored exactly; `where` is its key path. Nothing was sent or written."""


class StateMismatch(CkptdError, ValueError):
    """The checkpoint doesn't fit the live state (names, shapes, groups). The live state is untouched.

    Attributes:
        faults: Each thing that doesn't fit, all of them: `seen` may show only the first few. Empty when
            `seen` is the whole story.
        strict_only: Whether `strict=False` would take all of it.
    """

    def __init__(
        self, what: str, *, where: str = "", seen: str = "", wanted: str = "", todo: str = "",
        faults: tuple[str, ...] = (), strict_only: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(what, where=where, seen=seen, wanted=wanted, todo=todo)
        self.faults, self.strict_only = faults, strict_only

    def _more(self) -> dict[str, Any]:
        return {"faults": self.faults, "strict_only": self.strict_only}


class UnsupportedTorch(CkptdError):
    """The installed torch is older than 2.6, the first with a trustworthy weights_only loader."""


class ProtocolError(CkptdError, ValueError):
    """A message that isn't one of ours, or of another protocol version."""


class SlotsOutOfReach(CkptdError):
    """This process can't open the daemon's slots: it sees another /dev/shm. Nothing was copied."""


class ClientClosed(CkptdError):
    """The client was closed, or belongs to the parent of this forked process."""


class JobFailed(CkptdError):
    """A user's job failed by itself while check_resume ran it. Nothing of it is left running.

    Attributes:
        log: The last lines it wrote, its traceback among them.
    """

    log: str = ""


# --- exit code 2: usage ---------------------------------------------------------------------------


class InvalidArgument(CkptdError, ValueError):
    """An argument, flag, run name, step or policy that can't be right. Nothing was changed."""

    exit_code = 2


class BadRoot(InvalidArgument):
    """The root can't be used: a file, not writable, not ours."""


# --- exit code 3: nothing there -------------------------------------------------------------------


class NothingThere(CkptdError, LookupError):
    """There is no checkpoint (or no such run, step, selector). Never raised when there is one that fails its checks."""

    exit_code = 3


class CheckpointGone(NothingThere):
    """The checkpoint was deleted (by retention or by hand) before it was opened. Ask for the latest again."""


# --- exit code 4: corrupt, or none valid ----------------------------------------------------------


class CorruptCheckpoint(CkptdError, ValueError):
    """Bytes on disk are not what was committed: wrong hash, size, form; a missing file or hash."""

    exit_code = 4


class UnknownSchema(CorruptCheckpoint):
    """The schema string is none this version can read. `seen` is the string."""


class NoValidCheckpoint(CkptdError):
    """There are checkpoints and every one fails its checks. `seen` lists each with its reason."""

    exit_code = 4


class RestoreFailed(CkptdError):
    """No checkpoint could be restored.

    Attributes:
        state_touched: True when the live state was already partly overwritten: don't train on with it.
    """

    exit_code = 4

    def __init__(
        self,
        what: str,
        *,
        state_touched: bool = False,
        where: str = "",
        seen: str = "",
        wanted: str = "",
        todo: str = "",
    ) -> None:
        super().__init__(what, where=where, seen=seen, wanted=wanted, todo=todo)
        self.state_touched = state_touched

    def _more(self) -> dict[str, Any]:
        return {"state_touched": self.state_touched}


class RestoreTorn(RestoreFailed):
    """A checkpoint proved damaged or unreadable after a part of it was in the live state; `__cause__` says how.

    `state_touched` is True. Restoring another checkpoint whole makes the state right again.
    """

    exit_code = 4

    def __init__(
        self, what: str, *, where: str = "", seen: str = "", wanted: str = "", todo: str = ""
    ) -> None:
        super().__init__(what, state_touched=True, where=where, seen=seen, wanted=wanted, todo=todo)

    def _more(self) -> dict[str, Any]:
        return {}


# --- exit code 5: no daemon -----------------------------------------------------------------------


class NoDaemon(CkptdError):
    """No daemon serves this root, or it doesn't answer there."""

    exit_code = 5


# --- exit code 6: locked --------------------------------------------------------------------------


class RootLocked(CkptdError):
    """Another process holds the root's lock."""

    exit_code = 6


class RunTaken(RootLocked):
    """The run already has a live client."""


# --- exit code 7: timed out, or the outcome is unknown --------------------------------------------


class TimedOut(CkptdError, TimeoutError):
    """The bound the caller set has passed. What was asked may still happen."""

    exit_code = 7


class OutcomeUnknown(CkptdError):
    """Whether the snapshot is durable can't be told now (resolve it later by client and snapshot number)."""

    exit_code = 7


# --- exit code 8: no space ------------------------------------------------------------------------


class NoSpace(CkptdError):
    """The disk, the quota or the shared memory is too small. What was committed before is intact."""

    exit_code = 8


class SharedMemoryTooSmall(NoSpace):
    """The slots for this state don't fit into shared memory. Refused before anything was copied."""


class OverBudget(NoSpace):
    """More staged bytes than the root's budget allows. Refused before anything was made; `where` names the bound."""


#: Errors that may cross the wire by class name; everything else arrives as CkptdError.
BY_NAME: dict[str, type[CkptdError]] = {
    cls.__name__: cls
    for cls in (
        CkptdError, SaveFailed, ReadFailed, UnstorableState, StateMismatch, UnsupportedTorch, ProtocolError, ClientClosed,
        InvalidArgument, BadRoot, NothingThere, CheckpointGone, CorruptCheckpoint, UnknownSchema,
        NoValidCheckpoint, NoDaemon, RootLocked, RunTaken, TimedOut, OutcomeUnknown, NoSpace, SharedMemoryTooSmall,
        OverBudget, RootMoved,
    )
}  # fmt: skip
