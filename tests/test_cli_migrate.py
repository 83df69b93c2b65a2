"""`ckptd migrate`: one path in, one path out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ckptd_daemon.cli import main
from test_v1 import write_sharded, write_single

Capsys = pytest.CaptureFixture[str]


@pytest.mark.parametrize("write", [write_single, write_sharded])
def test_it_prints_the_new_folder_which_verifies(tmp_path: Path, capsys: Capsys, write: object) -> None:
    write(tmp_path / "old")  # type: ignore[operator]
    code = main.main(["migrate", str(tmp_path / "old"), "--out", str(tmp_path / "new")])
    assert (code, *capsys.readouterr()) == (0, f"{tmp_path / 'new'}\n", "")
    assert main.main(["verify", str(tmp_path / "new"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["checkpoints"][0]["state"] == "valid"


def test_an_old_one_is_never_valid_as_it_is(tmp_path: Path, capsys: Capsys) -> None:
    write_sharded(tmp_path / "old")
    assert main.main(["verify", str(tmp_path / "old")]) == 4
    assert "unhashed" in capsys.readouterr().err


def test_what_isnt_there_is_nothing_there(tmp_path: Path, capsys: Capsys) -> None:
    assert main.main(["migrate", str(tmp_path / "none")]) == 3
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and str(tmp_path / "none") in err


def test_a_taken_place_is_refused_and_left_alone(tmp_path: Path, capsys: Capsys) -> None:
    write_single(tmp_path / "old")
    (tmp_path / "new").mkdir()
    assert main.main(["migrate", str(tmp_path / "old"), "--out", str(tmp_path / "new")]) == 2
    assert capsys.readouterr().out == "" and list((tmp_path / "new").iterdir()) == []
