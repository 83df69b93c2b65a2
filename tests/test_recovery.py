from __future__ import annotations

from pathlib import Path

from ckptd.disk.rootdir import Root
from ckptd_daemon.core.recovery import runs_on_disk


def test_a_link_to_a_run_elsewhere_is_no_run_of_the_root(tmp_path: Path) -> None:
    root = Root.open(tmp_path / "root", create=True)
    for run in (root.path / "mine", tmp_path / "elsewhere"):
        (run / "step-000000001").mkdir(parents=True)
    (root.path / "link").symlink_to(tmp_path / "elsewhere")
    assert runs_on_disk(root) == ["mine"]
