"""What lies below a folder in which somebody works: Path.rglob raises when a folder goes while it looks."""

from __future__ import annotations

import os
from pathlib import Path


def paths_below(folder: Path) -> list[Path]:
    """Every name below it, in order; what is below a folder that goes meanwhile is left out."""
    return sorted(Path(at, name) for at, folders, files in os.walk(folder) for name in (*folders, *files))
