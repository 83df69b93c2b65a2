"""Counts, sizes and times as the command line reads and shows them; `policy` reads durations. Pure."""

from __future__ import annotations

import datetime as dt
import re

from ckptd.errors import InvalidArgument
from ckptd.snapshot.sizes import show_bytes

__all__ = ["parse_bytes", "parse_count", "show_bytes", "show_seconds", "show_utc"]


def parse_count(text: str, where: str, *, least: int = 0) -> int:
    """A whole number of at least `least`.

    Raises:
        InvalidArgument: Anything else.
    """
    if not re.fullmatch(r"[0-9]{1,9}", text.strip(), re.ASCII) or int(text) < least:
        raise InvalidArgument(
            "not a count", where=where, seen=repr(text), wanted=f"a whole number of {least} or more"
        )
    return int(text)


def parse_bytes(text: str, where: str) -> int:
    """Bytes from "5GB", "512 MiB" or "1000": kB, MB, GB, TB count by 1000, KiB, MiB, GiB, TiB by 1024.

    Raises:
        InvalidArgument: Anything else.
    """
    match = re.fullmatch(
        r"([0-9]{1,15}(?:\.[0-9]{1,6})?) ?([kmgt]?)(i?)b?", text.strip(), re.ASCII | re.IGNORECASE
    )
    if match is None or (match[3] and not match[2]):
        raise InvalidArgument(
            "not a size", where=where, seen=repr(text), wanted="a size such as 5GB or 512MiB"
        )
    return int(float(match[1]) * (1024 if match[3] else 1000) ** " kmgt".index(match[2].lower() or " "))


def show_seconds(seconds: float) -> str:
    """`0.8s`, `42s`, `3m10s`, `5h02m`, `2d03h`."""
    if seconds < 10:
        return f"{seconds:.1f}s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole // 60 % 60:02d}m"
    return f"{whole // 86400}d{whole // 3600 % 24:02d}h"


def show_utc(unix_seconds: float | None) -> str:
    """ISO 8601 in UTC with seconds, "" for None and for what no calendar can show."""
    if unix_seconds is None:
        return ""
    try:
        moment = dt.datetime.fromtimestamp(unix_seconds, dt.UTC)
    except (ValueError, OverflowError, OSError):
        return ""
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ")
