"""Where a generator's state says that it stands: NumPy and torch take any place, and read beyond their memory there."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any, Final

_WORDS: Final = 624  #: of a Mersenne twister
#: NumPy's bit generators: where each stands in its words, and the last of these places.
PLACES: Final = {
    "MT19937": ("pos", _WORDS), "Philox": ("buffer_pos", 4), "PCG64": ("", 0), "PCG64DXSM": ("", 0), "SFC64": ("", 0),
}  # fmt: skip


def check_numpy_place(state: Mapping[str, Any]) -> None:
    """Check the state of a NumPy bit generator, as its `state` gives it.

    Raises:
        ValueError, LookupError, TypeError: It stands at no place of its words, or isn't such a state.
    """
    variant = state["bit_generator"]
    key, end = PLACES[variant]
    if not key:
        return
    place = (state["state"] if variant == "MT19937" else state)[key]
    if type(place) is not int or not 0 <= place <= end:
        raise ValueError(f"{key} isn't between 0 and {end}")


def check_torch_place(state: bytes | bytearray) -> None:
    """Check the state of a torch.Generator of the CPU that torch took.

    Raises:
        ValueError: It stands beyond its words.
    """
    left, _, following = struct.unpack_from("=iiQ", state, 8)
    if not (left > 0 and left + following <= _WORDS + 1):  # torch doesn't compare the two with each other
        raise ValueError("a place beyond the state's end")
