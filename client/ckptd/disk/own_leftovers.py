"""What this process made, or found at its start, under a temporary name and could not remove: tried again while it lives.

A removal fails for want of descriptors or by an I/O error, often with what made the write fail. Only the very
paths that were noted are touched, so nobody else's work is, whoever holds the root's lock.
"""

from __future__ import annotations

import logging
import threading
from pathlib import Path

log = logging.getLogger(__name__)

_left: set[Path] = set()
_changing = threading.Lock()


def note(path: Path) -> None:
    """This path, of a name that nobody else ever makes, is to be removed later."""
    with _changing:
        _left.add(path)


def unlink_quietly(path: Path) -> None:
    """Remove such a file now, if it can be. The error that led here says more than one here."""
    try:
        path.unlink()
    except FileNotFoundError:
        return
    except OSError:
        note(path)


def any_left(below: Path) -> bool:
    """Whether something below that folder is still to be removed."""
    with _changing:
        return any(path.is_relative_to(below) for path in _left)


def remove(below: Path) -> None:
    """Try again to remove what was left below that folder; what can't be stays noted, without a word.

    Below a root the caller holds its lock.
    """
    from ckptd.disk import durable  # which notes here what it couldn't remove itself

    with _changing:
        wanted = [path for path in _left if path.is_relative_to(below)]
    for path in wanted:
        try:
            durable.remove_tree(path)
        except OSError:
            continue
        log.info("leftover.removed path=%s", path)
        with _changing:
            _left.discard(path)
