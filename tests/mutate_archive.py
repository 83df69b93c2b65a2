"""Run by test_hostile_archive.py in a process of its own: loads changed files until one ends it, or none does."""

from __future__ import annotations

import random
import sys
import warnings
from pathlib import Path
from typing import Any

import torch

from ckptd.errors import CkptdError
from ckptd.tensors.loading import load
from ckptd.tensors.saving import save
from hostile_archives import plant
from test_v1 import write_single


def touch_all(value: Any) -> None:
    """Read every byte that was loaded: what lies outside its record would end the process here."""
    if isinstance(value, torch.Tensor):
        value.detach().contiguous().flatten()[-1:].tolist()
        if value.numel() < 10**6:
            value.detach().clone()
    elif isinstance(value, dict):
        for item in value.values():
            touch_all(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            touch_all(item)


def mutated(data: bytes, rng: random.Random) -> bytes:
    out = bytearray(data)
    for _ in range(rng.choice([1, 1, 2, 8])):
        at = rng.randrange(len(out))
        kind = rng.randrange(4)
        if kind == 0:
            out[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            out[at] = rng.choice([0, 1, 0x7F, 0x80, 0xFF])
        elif kind == 2:
            out[at : at + 4] = rng.choice([b"\xff\xff\xff\x7f", b"\0\0\0\0", b"\xff\xff\xff\xff"])[
                : len(out) - at
            ]
        else:
            source = rng.randrange(len(out))
            length = rng.randrange(1, 40)
            out[at : at + length] = out[source : source + length].ljust(length, b"\0")[: len(out) - at]
    return bytes(out)


def main(folder: Path, count: int) -> None:
    warnings.simplefilter("ignore")
    rng = random.Random(1)
    torch.manual_seed(1)
    state = {
        "m": {"w": torch.randn(3, 2), "f8": torch.ones(4).to(torch.float8_e5m2)},
        "n": [1.5, 2, (3,), b"x"],
    }
    v2, v1 = save(folder / "v2", state, step=7, rng=False), write_single(folder / "v1")
    originals = {path: (path / "ckpt.pt").read_bytes() for path in (v2, v1)}
    refused = 0
    for number in range(count):
        path = (v2, v1)[number % 2]
        plant(path, "ckpt.pt", mutated(originals[path], rng))
        try:
            touch_all(load(path))
        except CkptdError:
            refused += 1
    print(f"{count} files, {refused} refused")


main(Path(sys.argv[1]), int(sys.argv[2]))
