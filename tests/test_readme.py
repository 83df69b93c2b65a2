"""What the README and the recipe tell a reader to type works as it stands there."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import ckptd
from ckptd_places import end_daemon, places

__all__ = ["places"]

HERE = Path(__file__).parent.parent
README = (HERE / "README.md").read_text("utf-8")
RESUMING = (HERE / "docs" / "resuming.md").read_text("utf-8")
RECIPE = (HERE / "outputs" / "skill-checkpoint-save-resume.md").read_text("utf-8")

#: What the snippets take for granted: a model and what belongs to it, tiny.
GIVEN = """
import torch
from torch.utils.data import DataLoader
torch.manual_seed(0)
data = torch.randn(12, 4)
loader = DataLoader(data, batch_size=2, shuffle=True)
model = torch.nn.Linear(4, 1)
opt = torch.optim.AdamW(model.parameters())
sched = torch.optim.lr_scheduler.StepLR(opt, 2)
total, val, loss = 5, 0.5, torch.tensor(1.0)
"""


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.M | re.S)


def commands(text: str) -> list[list[str]]:
    lines = [line for block in blocks(text, "sh") for line in block.splitlines()]
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def test_the_two_commands_for_a_fresh_machine_are_there_and_ci_runs_them() -> None:
    named = [words[0] for words in commands(README) if words[0].startswith("scripts/")]
    ci = (HERE / ".ci" / "run").read_text("utf-8")
    assert named == ["scripts/demo", "scripts/check"]
    for name in named:
        assert os.access(HERE / name, os.X_OK) and f"\n{name}\n" in ci + "\n"


def test_every_file_the_map_names_is_there() -> None:
    named = re.findall(r"`([\w/]+\.py)`", (HERE / "ARCHITECTURE.md").read_text("utf-8"))
    roots = [
        HERE,
        HERE / "client",
        HERE / "client/ckptd",
        HERE / "daemon/ckptd_daemon",
        HERE / "client/ckptd/tensors",
    ]
    assert len(named) > 50
    assert [
        name
        for name in named
        if not any(
            (root / name).is_file()
            for root in [*roots, HERE / "client/ckptd/disk", HERE / "daemon/ckptd_daemon/verify"]
        )
    ] == []


@pytest.mark.slow
def test_every_ckptd_command_of_the_readme_works_in_its_order(places: Path, tmp_path: Path) -> None:
    typed = [words for words in commands(README) if words[0] == "ckptd"]
    root = tmp_path / "checkpoints"
    try:
        for at, words in enumerate(typed):
            done = subprocess.run(
                [sys.executable, "-m", "ckptd_daemon.cli.main", *words[1:]],
                cwd=tmp_path, capture_output=True, text=True, timeout=250,
            )  # fmt: skip
            assert done.returncode == 0, (words, done.stderr)
            if at == 0:
                with ckptd.Client(root, run="gpt", daemon="attach") as client:
                    client.snapshot(1, {"train": ckptd.TrainState(step=1)}).wait("verified")
            if words[1] == "latest":
                assert done.stdout == f"{root / 'gpt' / 'step-000000001'}\n"
    finally:
        end_daemon(root)
    assert {words[1] for words in typed} >= {
        "start",
        "status",
        "list",
        "latest",
        "show",
        "verify",
        "drain",
        "stop",
    }


@pytest.mark.slow
@pytest.mark.parametrize("text", [README, RECIPE], ids=["readme", "recipe"])
def test_the_snippet_of_a_training_loop_trains_saves_and_resumes(
    text: str, places: Path, tmp_path: Path
) -> None:
    (snippet,) = [block for block in blocks(text, "python") if "ckptd.Client" in block]
    snippet = snippet.replace("DataLoader(...)", "loader").replace("loss = ...", "loss = 1.0")
    script = tmp_path / "script.py"
    script.write_text(f"{GIVEN}\n{snippet}\nprint('from', resumed.step if resumed else 0)\n", "utf-8")
    try:
        for expected in ("from 0", "from 5"):
            done = subprocess.run(
                [sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, timeout=250
            )
            assert done.returncode == 0, done.stderr
            assert done.stdout.strip() == expected
    finally:
        end_daemon(tmp_path / "checkpoints")


@pytest.mark.slow
def test_the_snippet_of_the_page_on_resuming_runs(tmp_path: Path) -> None:
    (snippet,) = blocks(RESUMING, "python")
    script = tmp_path / "script.py"
    script.write_text(snippet, "utf-8")
    done = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, timeout=250
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "one").is_dir()
