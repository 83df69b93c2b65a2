"""Bytes in words."""

from __future__ import annotations

__all__ = ["show_bytes", "show_slots"]


def show_bytes(count: int) -> str:
    """`512 B`, `1.5 KiB`, `86.0 MiB`."""
    value, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB", "PiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{count} B" if unit == "B" else f"{value:.1f} {unit}"


def show_slots(count: int, bytes_each: int) -> str:
    """`2 slots of 1.2 GiB`."""
    return f"{count} slot{'' if count == 1 else 's'} of {show_bytes(bytes_each)}"
