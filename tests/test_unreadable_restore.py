from __future__ import annotations

import errno
from pathlib import Path

import pytest
import torch

import ckptd
from ckptd.errors import CheckpointWarning, ReadFailed
from unreadable_disk import unreadable


@pytest.fixture
def root(tmp_path: Path) -> Path:
    with ckptd.Client(tmp_path / "root", daemon="off") as client:
        for step in (1, 2):
            client.snapshot(step, {"w": torch.full((4,), float(step))})
    return tmp_path / "root"


@pytest.mark.parametrize("file", ["index.json", "ckpt.pt"])
def test_a_newest_one_that_cannot_be_read_now_is_passed_over_and_never_called_corrupt(
    root: Path, file: str
) -> None:
    state = {"w": torch.zeros(4)}
    with ckptd.Client(root, daemon="off") as client:
        with (
            unreadable(errno.EIO, root / "default" / "step-000000002", name=file),
            pytest.warns(CheckpointWarning, match="can't be read now: Input/output error"),
        ):
            resumed = client.restore(state)
        assert resumed is not None
        assert (resumed.step, float(state["w"][0])) == (1, 1.0)
        assert "corrupt" not in resumed.passed_over[0].reason


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENOMEM])
def test_a_restore_short_of_the_machine_falls_back_to_nothing_older(root: Path, number: int) -> None:
    state = {"w": torch.zeros(4)}
    with ckptd.Client(root, daemon="off") as client:
        with (
            unreadable(number, root / "default" / "step-000000002", name="ckpt.pt"),
            pytest.raises(ReadFailed),
        ):
            client.restore(state)
        assert float(state["w"][0]) == 0.0


@pytest.mark.filterwarnings("ignore::ckptd.errors.CheckpointWarning")
def test_that_none_can_be_read_now_is_no_failed_check(root: Path) -> None:
    with (
        ckptd.Client(root, daemon="off") as client,
        unreadable(errno.EIO, root / "default"),
        pytest.raises(ReadFailed, match="no checkpoint can be read now"),
    ):
        client.restore({"w": torch.zeros(4)})
