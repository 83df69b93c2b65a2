"""The example script, as a process: its losses with a kill in mid-epoch are those without."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"
SMALL = ["--steps", "14", "--corpus-bytes", "8000", "--width", "32", "--layers", "1", "--threads", "1"]


def command(out: Path, *flags: str) -> list[str]:
    return [sys.executable, str(SCRIPTS / "train_gpt.py"), *SMALL, "--out-losses", str(out), *flags]


def train(out: Path, *flags: str) -> dict[str, Any]:
    subprocess.run(command(out, *flags), check=True, timeout=250, capture_output=True)
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def kill_after(step: int, *flags: str, out: Path) -> int:
    with subprocess.Popen(command(out, *flags), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith(f"step {step}/"):
                process.kill()
                break
        return process.wait(60)


@pytest.mark.slow
def test_a_trainer_killed_in_mid_epoch_goes_on_with_the_same_losses(tmp_path: Path) -> None:
    whole = train(tmp_path / "whole.json")
    for number in range(20):
        root, out = tmp_path / f"root-{number}", tmp_path / f"killed-{number}.json"
        saving = ("--root", str(root), "--daemon", "off", "--ckpt-every-steps", "4", "--shards", "2")
        if kill_after(9, *saving, out=out) == -9 and not out.exists():
            break  # else it was at its end when its signal came: a step takes a few milliseconds
    again = train(tmp_path / "again.json", *saving)
    assert again["resumed"]["step"] in (8, 12)
    assert 0 < again["resumed"]["batch_in_epoch"] < again["batches_per_epoch"]
    assert again["losses"] == whole["losses"]


@pytest.mark.slow
def test_the_corpus_is_the_standard_library_and_the_same_every_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    read_corpus = importlib.import_module("train_gpt").read_corpus
    assert read_corpus(5000) == read_corpus(9000)[:5000]
    with pytest.raises(SystemExit, match="wanted"):
        read_corpus(10**12)
