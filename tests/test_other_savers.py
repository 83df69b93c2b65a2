"""What other ways of saving leave: that scripts/trials/others.py judges them rightly, and that its table is on the page."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from crash_states import State
from crash_trace import ROOT, Mark, Names, Op, Trace, Write

PLACE = Path(__file__).parent.parent
TRIALS = str(PLACE / "scripts" / "trials")


@pytest.fixture(scope="module")
def others() -> Iterator[Any]:
    before = set(sys.modules)
    sys.path.insert(0, TRIALS)
    try:
        import others

        yield others
    finally:
        sys.path.remove(TRIALS)
        for name in set(sys.modules) - before:
            if str(getattr(sys.modules[name], "__file__", "")).startswith(TRIALS):
                del sys.modules[name]


def test_the_page_has_a_row_for_each_tool_and_says_the_versions(others: Any) -> None:
    page = (PLACE / "docs" / "durability.md").read_text()
    table = page.partition(others.BEGIN)[2].partition(others.END)[0]
    assert others.into_page(page, table.strip("\n")) == page
    rows = [line for line in table.splitlines() if line.startswith("|")][2:]
    untried = table.partition("Not tried: ")[2]
    tried = [tool.about for tool in others.TOOLS.values() if tool.about not in untried]
    assert [row.split(" | ")[0] for row in rows] == [f"| {about}" for about in tried]
    assert "\nWith " in table and "torch 2." in table and "ckptd 0." in table
    (ours,) = [row for row in rows if row.startswith("| `ckptd start")]
    assert not {"older", "refused", "**lost**", "**wrong**"} & set(ours.split())


@pytest.mark.parametrize("page", ["nothing", "{end} {begin}", "{begin} {end} {end}"])
def test_a_page_without_one_place_for_the_table_is_left_alone(others: Any, page: str) -> None:
    with pytest.raises(ValueError, match="once each"):
        others.into_page(page.format(begin=others.BEGIN, end=others.END), "table")


@pytest.mark.parametrize(
    ("acked", "said", "word"),
    [
        (0, "none none", "fine"), (0, "error none", "refused"), (1, "1 1", "fine"), (1, "2 2", "fine"),
        (2, "1 1", "older"), (1, "error 1", "refused"), (2, "none 2", "refused"), (1, "error none", "lost"),
        (1, "none none", "lost"), (2, "wrong 2", "wrong"), (0, "wrong none", "wrong"),
    ],
)  # fmt: skip
def test_what_a_resume_got_is_judged_by_what_had_been_acknowledged(
    others: Any, acked: int, said: str, word: str
) -> None:
    told = tuple(Mark("acked", step) for step in range(1, acked + 1))
    assert others.outcome(State(0, "kill", {}, told), said) == word


@pytest.mark.parametrize(
    "name",
    [
        "TorchSaveOver",
        "TorchSave",
        "TorchSaveReplaced",
        "TorchSaveSynced",
        pytest.param("Ours", marks=pytest.mark.slow),
    ],
)
def test_each_way_resumes_what_it_saved_and_tells_a_damaged_one(
    others: Any, name: str, tmp_path: Path
) -> None:
    from other_tool import resumed

    tool = others.TOOLS[name]()
    tool.save(tmp_path)
    assert {path.name for path in tmp_path.glob(".told-*")} == {
        f".told-{what}-{step}" for what in ("begun", "acked") for step in (1, 2)
    }
    assert resumed(tool, tmp_path) == "2 2"
    for path in [*tmp_path.glob("*.pt"), *tmp_path.glob("root/r/step-*2/ckpt.pt")]:
        path.write_bytes(path.read_bytes()[:-100])
    assert resumed(tool, tmp_path) == ("1 1" if name == "Ours" else "error none")


def _saved(step: int) -> bytes:
    from other_tool import state_of

    buffer = io.BytesIO()
    torch.save(state_of(step), buffer)
    return buffer.getvalue()


@pytest.mark.slow
def test_a_file_replaced_without_a_sync_survives_a_kill_and_is_lost_in_a_power_cut(
    others: Any, tmp_path: Path
) -> None:
    ops: list[Op] = []
    for step in (1, 2):
        moved = Names(ROOT, (("ckpt.tmp", None), ("ckpt.pt", step)))
        made: list[Op] = [Names(ROOT, (("ckpt.tmp", step),)), Write(step, 0, _saved(step)), moved]
        ops += [Mark("begun", step), *made, Mark("acked", step)]
    found = others.judge("TorchSaveReplaced", Trace(ops), tmp_path / "state")
    assert found["kill"].keys() == {"fine"}
    assert found["ordered"]["lost"] and found["strict"]["lost"]


class Forgetful:
    """A loader of a tool that resumes step 1 whatever is there."""

    def __init__(self, name: str, folder: Path) -> None:
        self.says = lambda state: "1 1"

    def __enter__(self) -> Forgetful:
        return self

    def __exit__(self, *_: object) -> None:
        return


def test_a_tool_whose_whole_save_does_not_resume_proves_nothing(
    others: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(others, "Loader", Forgetful)
    with pytest.raises(RuntimeError, match="nothing was taken from it"):
        others.judge("TorchSaveOver", Trace([Mark("acked", 1), Mark("acked", 2)]), tmp_path)


def test_the_operations_of_a_real_save_are_recorded_where_fuse_is_to_be_had(
    others: Any, tmp_path: Path
) -> None:
    pytest.importorskip("mfusepy", exc_type=ImportError)
    try:
        trace = others.record("TorchSaveSynced", tmp_path / "watched")
    except OSError as error:
        pytest.skip(str(error))
    assert others.judge("TorchSaveSynced", trace, tmp_path / "state")["kill"].keys() == {"fine"}
