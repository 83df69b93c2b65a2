"""Moving a corrupt checkpoint out of the run, where nothing offers it and nobody deletes it.

Only the run's own are moved, by what their index says now. The rest stays where it is: it was put there by
somebody, who may want to know.
"""

from __future__ import annotations

from pathlib import Path

from ckptd.disk import durable
from ckptd.errors import CorruptCheckpoint
from ckptd.format.records import read_index
from ckptd.names import QUARANTINE_DIR, quarantine_folder


def quarantine(path: Path, run_id: str) -> Path | None:
    """Move the checkpoint at path to its run's quarantine, durably, if it provably belongs to this run.

    Returns:
        Where it lies now; None when it isn't provably this run's own (its index can't be read, or has another
        run_id), and stays.

    Raises:
        FileNotFoundError: It is gone.
        OSError: It can't be moved and stays; the quarantine may be a link, which would take it out of the root.
    """
    try:
        index = read_index(path)
    except CorruptCheckpoint:
        return None
    except FileNotFoundError:
        if path.is_dir():
            return None  # only its index is gone
        raise
    if index.run_id != run_id:
        return None
    folder = path.parent / QUARANTINE_DIR
    durable.make_real_dir(folder)
    target = folder / quarantine_folder(path.name, index.sequence)
    durable.rename_new(path, target)
    return target
