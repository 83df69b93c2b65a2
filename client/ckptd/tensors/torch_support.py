# ruff: noqa: TID253
"""What ckptd needs to know about the installed torch: that it is new enough, and its dtypes by name."""

from __future__ import annotations

from typing import Final

import torch

from ckptd.errors import UnsupportedTorch

OLDEST: Final = (2, 6)


def check_torch(version: str = torch.__version__) -> None:
    """Refuse a torch older than 2.6, the first whose weights_only loader is trustworthy.

    Raises:
        UnsupportedTorch: It is older, or its version can't be read.
    """
    parts = str(version).split("+", 1)[0].split(".")
    readable = len(parts) >= 2 and parts[0].isdecimal() and parts[1].isdecimal()
    if readable and (int(parts[0]), int(parts[1])) >= OLDEST:
        return
    raise UnsupportedTorch(
        "torch is too old",
        seen=str(version),
        wanted="2.6 or newer",
        todo="install a newer torch: pip install 'torch>=2.6'",
    )


check_torch()


def _dtype_names() -> dict[torch.dtype, str]:
    found = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    return {dtype: str(dtype).removeprefix("torch.") for dtype in found}


#: Every dtype of this torch with the name the format knows it by.
NAME_OF_DTYPE: Final = _dtype_names()
DTYPE_BY_NAME: Final = {name: dtype for dtype, name in NAME_OF_DTYPE.items()}

#: A dtype of the same width whose copies only move bits; some dtypes have no copy of their own.
BITS_BY_ITEMSIZE: Final = {
    1: torch.uint8,
    2: torch.int16,
    4: torch.int32,
    8: torch.int64,
    16: torch.complex128,
}
