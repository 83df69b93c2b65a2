"""What goes to stdout and stderr: tables on a terminal, tab-separated lines to a pipe, JSON on request.

Names and reasons may come from a hostile disk, so control characters never reach a terminal as they are.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

_COLOURS: Final = {"green": "32", "red": "31", "yellow": "33", "dim": "2", "bold": "1"}


@dataclass(frozen=True, slots=True)
class Cell:
    """One field of a table.

    Attributes:
        plain: As a script wants it: raw bytes, UTC, no padding.
        shown: As a person wants it on a terminal; None when it is the same.
        colour: A name of _COLOURS, or "" for none.
    """

    plain: str
    shown: str | None = None
    colour: str = ""


def printable(text: str) -> str:
    """Text in one line, with every character that could move a terminal's cursor escaped."""
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape", "backslashreplace").decode() for c in text
    )


def table_is_shown() -> bool:
    """Whether a person reads what goes to stdout."""
    return sys.stdout.isatty()


def table(headers: Sequence[str], rows: Sequence[Sequence[Cell]]) -> str:
    """The rows as lines: aligned under headers on a terminal; without headers, tab-separated, to a pipe."""
    if not table_is_shown():
        return "".join("\t".join(printable(cell.plain) for cell in row) + "\n" for row in rows)
    return _aligned(headers, rows, colour="NO_COLOR" not in os.environ)


def _aligned(headers: Sequence[str], rows: Sequence[Sequence[Cell]], *, colour: bool) -> str:
    texts = [[printable(cell.plain if cell.shown is None else cell.shown) for cell in row] for row in rows]
    widths = [max([len(h), *(len(row[i]) for row in texts)]) for i, h in enumerate(headers)]
    lines = ["  ".join(h.ljust(w) for h, w in zip(headers, widths, strict=True)).rstrip()]
    for row, shown in zip(rows, texts, strict=True):
        padded = [text.ljust(width) for text, width in zip(shown, widths, strict=True)]
        padded[-1] = padded[-1].rstrip()
        lines.append(
            "  ".join(
                _paint(p, c.colour if colour else "") for p, c in zip(padded, row, strict=True)
            ).rstrip()
        )
    return "\n".join(lines) + "\n"


def _paint(text: str, colour: str) -> str:
    return f"\x1b[{_COLOURS[colour]}m{text}\x1b[0m" if colour else text


def emit(text: str) -> None:
    """Write text, which ends in a newline, to stdout."""
    sys.stdout.write(text)


def emit_json(schema: str, data: Mapping[str, Any]) -> None:
    """Write one strict JSON object to stdout; non-finite floats in it were tagged by the caller."""
    emit(json.dumps({"schema": schema, **data}, indent=2, allow_nan=False, ensure_ascii=True) + "\n")


def note(text: str) -> None:
    """Write one line for a person to stderr: progress, reasons, errors."""
    sys.stderr.write(f"ckptd: {printable(text)}\n")
    sys.stderr.flush()
