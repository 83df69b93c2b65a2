from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ckptd.disk.verification import check
from ckptd.names import parse_work_folder
from faulty_disk import latest, names
from snapshots import Writer

CRASH_POINTS = (
    "before-temp", "after-temp", "after-file", "before-index", "after-index", "after-folder-sync",
    "after-rename", "after-run-sync",
)  # fmt: skip
VISIBLE_AFTER = ("after-rename", "after-run-sync")


@pytest.fixture
def writer(tmp_path: Path) -> Writer:
    return Writer(tmp_path / "root")


# --- killed at every point ------------------------------------------------------------------------

KILLED = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from snapshots import Writer, descriptor, sharded
writer = Writer(Path(sys.argv[2]))
make = {"single": descriptor, "sharded": sharded}[sys.argv[3]]
changes = {"client_id": "ef" * 16, "base_sequence": int(sys.argv[4])} if len(sys.argv) > 4 else {}
writer.commit(200, make=make, **changes)
"""


def killed_at(writer: Writer, point: str, *args: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(Path(__file__).parent), str(writer.root.path), *args],
        env=os.environ | {"CKPTD_CRASH_AT": point}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == -signal.SIGKILL, f"{point} was not reached: {done.stderr}"


@pytest.mark.parametrize("layout", ["single", "sharded"])
@pytest.mark.parametrize("point", CRASH_POINTS)
def test_killed_at_any_point_the_previous_is_intact_and_this_one_absent_or_whole(
    writer: Writer, point: str, layout: str
) -> None:
    first = writer.commit(100)
    before = {file.name: file.read_bytes() for file in first.path.iterdir()}
    killed_at(writer, point, layout)
    assert {file.name: file.read_bytes() for file in first.path.iterdir()} == before
    found = [name for name in names(writer.run_dir) if name.startswith("step-")]
    assert found == (["step-000000100", "step-000000200"] if point in VISIBLE_AFTER else ["step-000000100"])
    assert all(check(writer.run_dir / name).ok for name in found)
    assert latest(writer) == found[-1]
    others = set(names(writer.run_dir)) - set(found) - {"decisions"}
    assert all(parse_work_folder(name) for name in others)  # the next start removes these
    again = writer.commit(200)
    assert check(again.path).ok
    assert latest(writer) == again.name


@pytest.mark.parametrize("point", CRASH_POINTS)
def test_killed_while_it_forks_the_line_is_the_old_one_or_the_new_one(writer: Writer, point: str) -> None:
    for step in (100, 300, 400):
        writer.commit(step)
    killed_at(writer, point, "single", "1")
    if point not in VISIBLE_AFTER:
        assert latest(writer) == "step-000000400"
        return
    assert latest(writer) == "step-000000200"
    (writer.run_dir / "step-000000200" / "index.json").write_bytes(b"damaged")
    assert latest(writer) == "step-000000100"  # along its own line, not to an abandoned one
