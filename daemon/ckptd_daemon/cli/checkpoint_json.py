"""What one checkpoint's index says, as the JSON of `list` and `show`."""

from __future__ import annotations

from typing import Any

from ckptd.format.records import CheckpointIndex
from ckptd.format.strict_json import float_to_json
from ckptd_daemon.cli import units


def summary(index: CheckpointIndex) -> dict[str, Any]:
    """What a list shows of it."""
    return {
        "sequence": index.sequence,
        "parent": index.parent,
        "saved_at": units.show_utc(index.saved_at),
        "bytes": index.total_bytes,
        "metrics": {name: float_to_json(value) for name, value in sorted(index.metrics.items())},
    }


def whole(index: CheckpointIndex) -> dict[str, Any]:
    """All of it."""
    return {
        "run": index.run,
        "run_id": index.run_id,
        "client_id": index.client_id,
        "snapshot": index.snapshot,
        "step": index.step,
        **summary(index),
        "lineage": [list(pair) for pair in index.lineage],
        "run_seconds": index.run_seconds,
        "layout": index.layout,
        "world_size": index.world_size,
        "tags": list(index.tags),
        "versions": dict(sorted(index.versions.items())),
        "index_sha256": index.index_sha256,
        "files": [
            {"path": path, "component": component, "bytes": size, "num_params": params, "sha256": sha256}
            for path, component, size, params, sha256 in files(index)
        ],
    }


def files(index: CheckpointIndex) -> list[tuple[str, str, int, int | None, str]]:
    """(path, component, bytes, parameters, sha256) of every file the index names; meta.pt first."""
    listed: list[tuple[str, str, int, int | None, str]] = []
    if index.meta_sha256 is not None:
        listed.append(("meta.pt", "meta", index.meta_bytes or 0, None, index.meta_sha256))
    listed += [(s.path, s.component, s.bytes, s.num_params, s.sha256) for s in index.shards]
    listed.append(("tensors.json", "", index.tensors_bytes, None, index.tensors_sha256))
    return listed
