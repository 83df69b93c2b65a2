"""What lies in a run's quarantine: checkpoints that failed their check and were moved out of the way."""

from __future__ import annotations

from pathlib import Path

from ckptd.disk.series_entries import Entry, list_quarantine, quarantined_entry


def read_quarantine(run_dir: Path) -> list[tuple[int, Entry]]:
    """(sequence, entry) of each, by sequence; those of abandoned lines too.

    Raises:
        OSError: The run's folder is there and can't be read.
    """
    held = sorted(list_quarantine(run_dir))
    return [(sequence, quarantined_entry(run_dir, folder)) for sequence, folder in held]


def count_quarantined(run_dir: Path) -> int:
    """How many there are; 0 also when that can't be told. For a remark beside an answer."""
    try:
        return len(list_quarantine(run_dir))
    except OSError:
        return 0
