"""Which versions made a checkpoint."""

from __future__ import annotations

import functools
import platform

import ckptd


@functools.cache
def _fixed() -> tuple[tuple[str, str], ...]:
    import numpy
    import torch

    return (
        ("ckptd", ckptd.__version__),
        ("numpy", str(numpy.__version__)),
        ("python", platform.python_version()),
        ("torch", str(torch.__version__)),
    )


def versions() -> dict[str, str]:
    """Name → version of this package, NumPy, Python and torch."""
    return dict(_fixed())
