from __future__ import annotations

import os
from pathlib import Path
from typing import NoReturn

import pytest

from ckptd.disk import entry
from ckptd.disk.entry import read_entry


@pytest.mark.parametrize("owner", ["we", "another"])
def test_a_folder_closed_to_us_is_in_doubt_only_where_it_is_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: str
) -> None:
    def refused(path: Path) -> NoReturn:
        raise PermissionError(13, "Permission denied", str(path))

    (tmp_path / "step-000000001").mkdir()
    monkeypatch.setattr(entry, "open_folder", refused)
    if owner == "another":
        us = os.geteuid()
        monkeypatch.setattr(os, "geteuid", lambda: us + 1)
    found = read_entry(tmp_path / "step-000000001")
    assert found is not None
    assert (found.not_ours, found.is_in_doubt) == (owner == "another", owner == "we")
