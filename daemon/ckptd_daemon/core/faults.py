"""What went wrong with a snapshot, as the error that it keeps and its client hears."""

from __future__ import annotations

import logging
from typing import Final

from ckptd.disk.save_error import save_error
from ckptd.disk.verification import Report
from ckptd.errors import (
    CheckpointGone,
    CkptdError,
    CorruptCheckpoint,
    NoSpace,
    OutcomeUnknown,
    ProtocolError,
    SaveFailed,
    UnstorableState,
)

log = logging.getLogger(__name__)

#: The slot's content is to blame: trying again is no use.
HOPELESS: Final = (ProtocolError, UnstorableState)


def as_ours(error: Exception) -> CkptdError:
    """The error of a failed write as a client is told it."""
    if isinstance(error, (*HOPELESS, NoSpace, SaveFailed, OutcomeUnknown)):
        return error
    what = "the snapshot could not be written"
    if isinstance(error, CkptdError):
        return SaveFailed(what, where=error.where, seen=str(error), todo=error.todo or "see the daemon's log")
    if not isinstance(error, (OSError, MemoryError)):
        log.error("daemon.fault", exc_info=error)
    return save_error(error, what)


def fault(verdict: str, report: Report) -> CkptdError | None:
    """What a verdict of the verifier says against a checkpoint; None when it is proved."""
    where = str(report.path)
    if verdict == "corrupt":
        faults = "; ".join(report.faults)
        return CorruptCheckpoint("bytes on disk are not what was committed", where=where, seen=faults)
    if verdict == "gone":
        return CheckpointGone("it was removed before it could be verified", where=where)
    return None
