"""Whether a checkpoint is valid: by its mark, else by reading it, each state of each only once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ckptd.disk.entry import MACHINE_ERRORS, Entry, cannot_read
from ckptd.disk.verification import Report, check, stat_signature
from ckptd.errors import CheckpointGone, ReadFailed


class Proof:
    """For one question.

    Args:
        wait: Read what has no mark; False takes it for not valid.
        on_progress: Told in words what is being read.

    Attributes:
        unread: Those that nothing can be said of now.
    """

    def __init__(self, wait: bool, on_progress: Callable[[str], None] | None) -> None:
        self.wait, self._on_progress = wait, on_progress
        self.unread: list[Entry] = []
        self._reports: dict[tuple[Path, str], Report] = {}

    def fault(self, entry: Entry) -> str:
        """Why it isn't valid; "" when it is. Raises CheckpointGone when it vanished."""
        if entry.status != "committed":
            if entry.status == "unreadable":
                self.unread.append(entry)
            return entry.reason or entry.status
        if entry.verified:
            return ""
        if not self.wait:
            return "not verified yet"
        try:
            report = self._report(entry.path)
        except OSError as error:
            if error.errno in MACHINE_ERRORS:
                raise
            self.unread.append(entry)
            return str(error) if isinstance(error, ReadFailed) else cannot_read(error)
        if report.gone:
            raise CheckpointGone("the checkpoint is not there any more", where=str(entry.path))
        return "; ".join(report.faults)

    def _report(self, path: Path) -> Report:
        known = self._reports.get((path, stat_signature(path)))
        if known is None:
            if self._on_progress is not None:
                self._on_progress(f"verifying {path.name}")
            known = check(path, uncached=True)
            self._reports[path, known.stat_signature] = known
        return known
