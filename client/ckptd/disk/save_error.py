"""The error of ours for whatever kept a checkpoint from being written."""

from __future__ import annotations

from pathlib import Path

from ckptd.errors import NO_SPACE, CkptdError, NoSpace, SaveFailed


def save_error(error: Exception, what: str, where: str | Path = "") -> CkptdError:
    """Ours as it is; of the system's NoSpace when there is no room, else SaveFailed, with the path that it names.

    Args:
        error: Whatever it was.
        what: What could not be done.
        where: For an error that names no path.
    """
    if isinstance(error, CkptdError):
        return error
    if not isinstance(error, OSError):
        seen = f"{type(error).__name__}: {error}"
        return SaveFailed(
            what, where=str(where), seen=seen, todo="see what the machine has left, and save again"
        )
    place, seen = str(error.filename or where), error.strerror or str(error)
    if error.errno in NO_SPACE:
        return NoSpace(what, where=place, seen=seen, todo="free some space, or keep fewer checkpoints")
    return SaveFailed(what, where=place, seen=seen, todo="check the disk and how it is mounted")
