from __future__ import annotations

from pathlib import Path

from ckptd.disk import leftovers
from ckptd.names import work_folder


def test_what_a_link_leads_to_is_not_swept(tmp_path: Path) -> None:
    left = tmp_path / "elsewhere" / work_folder("tmp", 1)
    left.mkdir(parents=True)
    (tmp_path / "link").symlink_to(left.parent)
    leftovers.sweep(tmp_path / "link")
    assert left.exists()
    leftovers.sweep(left.parent)
    assert not left.exists()
