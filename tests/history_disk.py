"""What a history sees of a run on disk, by its files alone: nothing of the product has a say in it."""

from __future__ import annotations

import hashlib
import json
import random
from pathlib import Path
from typing import Any

import torch


def listed(run_dir: Path, *, whole: bool = False) -> list[dict[str, Any]]:
    """The checkpoints there, by their indexes alone; whole: with their contents, and whether every hash is right."""
    found = []
    for folder in sorted(run_dir.glob("step-*")):
        try:
            index = json.loads((folder / "index.json").read_bytes())
        except (OSError, ValueError):
            continue  # it went meanwhile, or somebody damaged it
        if not _is_sealed(index):
            continue
        found.append(
            {
                "name": folder.name, "sequence": index["sequence"], "client": index["client_id"],
                "snapshot": index["snapshot"], "identity": int(index["metrics"]["identity"]), "step": index["step"],
            } | (_contents(folder, index) if whole else {})
        )  # fmt: skip
    return found


def _is_sealed(index: dict[str, Any]) -> bool:
    """Whether the index says what it said when it was written."""
    rest = {key: value for key, value in index.items() if key != "index_sha256"}
    text = json.dumps(rest, sort_keys=True, indent=2) + "\n"
    return hashlib.sha256(text.encode()).hexdigest() == index.get("index_sha256")


def _contents(folder: Path, index: dict[str, Any]) -> dict[str, Any]:
    """Every number in its tensors, and whether each file has its hash."""
    whole, numbers = True, set[int]()
    for shard in index["shards"]:
        data = (folder / shard["path"]).read_bytes()
        if hashlib.sha256(data).hexdigest() != shard["sha256"]:
            whole = False
            continue
        payload = torch.load(folder / shard["path"], weights_only=True)
        tensors = payload["tensors"] if "tensors" in payload else payload["model"]
        numbers.update(int(value) for tensor in tensors.values() for value in tensor.unique().tolist())
    return {"whole": whole, "contents": sorted(numbers)}


def flip(path: Path, chance: random.Random) -> None:
    """Change one bit of a file."""
    with path.open("r+b") as file:
        at = chance.randrange(path.stat().st_size)
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1 << chance.randrange(8)]))
