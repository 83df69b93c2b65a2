"""Runs scripts/trials/decoders.py for each decoder, from bytes that are right."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Final

from part import Findings, say

from ckptd.disk.commit import write_checkpoint_folder
from ckptd.format.plan import plan_checkpoint
from ckptd.format.records import index_to_bytes
from ckptd.link import wire
from ckptd.snapshot.descriptor_codec import encode
from ckptd.snapshot.slots import Slot
from snapshots import descriptor
from test_records import INDEX

_MOST_S: Final = 10  # for one input
_MOST_MIB: Final = 2048
_LONGEST: Final = 20_000


def fuzz(findings: Findings, folder: Path, seconds: float) -> None:
    """Each decoder for its share of the time."""
    if importlib.util.find_spec("atheris") is None:
        findings.not_tried["coverage-guided fuzzing"] = "atheris isn't installed (pip install atheris)"
        return
    seeds = _seeds(folder)
    for name, right in seeds.items():
        say(f"fuzzing {name}")
        corpus = folder / "corpus" / name
        corpus.mkdir(parents=True)
        for number, data in enumerate(right):
            (corpus / str(number)).write_bytes(data)
        done = subprocess.run(
            [
                sys.executable, str(Path(__file__).with_name("decoders.py")), name, str(corpus),
                f"-max_total_time={max(1, round(seconds / len(seeds)))}", f"-timeout={_MOST_S}",
                f"-rss_limit_mb={_MOST_MIB}", f"-max_len={_LONGEST}", f"-artifact_prefix={folder}/",
            ], capture_output=True, text=True, errors="replace", env=dict(os.environ), check=False,
        )  # fmt: skip
        if done.returncode != 0:
            findings.fault(f"{name}: {done.stderr[-1500:]}", f"decoders.py {name} on what lies in {folder}")
        findings.tried[f"fuzzed {name}"] += 1


def _seeds(folder: Path) -> dict[str, list[bytes]]:
    mine = "a" * 32
    slot = Slot.create(folder / "slot", 8192)
    page = (folder / "slot").read_bytes()[:4096]
    slot.close()
    (folder / "slot").unlink()
    requests: tuple[wire.Request, ...] = (
        wire.Reserve(id=1, client_id=mine, slot_bytes=2, slots=2), wire.Status(id=1),
        wire.Drain(id=5, run="d", verified=True), wire.Skipped(id=1, client_id=mine, count=1, steps=[1]),
    )  # fmt: skip
    write_checkpoint_folder(folder / "made", descriptor(1), memoryview(bytes(512)))
    archive = (folder / "made" / "ckpt.pt").read_bytes()
    frame = wire.StreamFrame(id=2, snapshot=1, generation=1, offset=0, sha256=bytes(32))
    return {
        "requests": [wire.encode(message) for message in requests], "streams": [wire.encode(frame)],
        "slot-header": [page], "descriptor": [encode(descriptor(1))], "index": [index_to_bytes(INDEX)],
        "table": [plan_checkpoint(descriptor(1)).table], "settings": [b"[policy]\nkeep_last = 5\n[staging]\n"],
        "archive": [archive], "archive-v1": [archive],
    }  # fmt: skip
