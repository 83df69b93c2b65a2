"""tensors.json: where in which file each tensor's bytes lie."""

from __future__ import annotations

import json
from typing import Any, Final

TABLE_SCHEMA: Final = "ckpt.v2-tensors"


def canonical_table(table: Any) -> bytes:
    """The only accepted bytes of a tensor table: sorted keys, no spaces, one newline at the end.

    It is compact, unlike the index: a row per tensor with line breaks is four times as long and fifty times as slow.
    """
    return (json.dumps(table, sort_keys=True, separators=(",", ":"), allow_nan=False) + "\n").encode()
