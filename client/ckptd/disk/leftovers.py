"""What a crash left in a root: temporary and trash folders and files.

They are removed under the root's lock only, never by age, and after somebody has seen which sequences they carry.
"""

from __future__ import annotations

import logging
import os
import stat
from pathlib import Path

from ckptd.disk import durable, own_leftovers
from ckptd.names import DECISIONS_DIR, QUARANTINE_DIR, parse_work_folder

log = logging.getLogger(__name__)


def sweep(folder: Path) -> None:
    """Remove what has a temporary or trash name in this folder, whatever it is by now; nothing below it.

    What can't be removed is said in the log, and tried again later. No folder, or a link to one, is fine.
    """
    for path in entries(folder):
        if parse_work_folder(path.name) is not None:
            try:
                durable.remove_tree(path)
            except OSError as error:
                log.warning("leftover.not_removed path=%s error=%s", path, error)
                own_leftovers.note(path)


def sweep_run(run_dir: Path) -> None:
    """Sweep every folder of a run in which such names are made."""
    for folder in (run_dir, run_dir / DECISIONS_DIR, run_dir / QUARANTINE_DIR):
        sweep(folder)


def entries(folder: Path) -> list[Path]:
    """What lies in a folder, by name; nothing when it can't be listed, or is a link."""
    try:
        if not stat.S_ISDIR(os.lstat(folder).st_mode):
            return []
        return sorted(folder.iterdir())
    except OSError:
        return []
