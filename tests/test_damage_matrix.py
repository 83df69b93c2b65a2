"""Corruption at rest: a sample of scripts/trials/damage.py in which all kinds, places and readers meet in pairs."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import ckptd
from ckptd.errors import CorruptCheckpoint
from ckptd_daemon.cli.main import main
from ckptd_places import places
from damage_scene import NEWEST, bound_by_rights

__all__ = ["places"]

TRIALS = str(Path(__file__).parent.parent / "scripts" / "trials")


@pytest.fixture(scope="module")
def damage() -> Iterator[Any]:
    sys.path.insert(0, TRIALS)
    try:
        import damage

        yield damage
    finally:
        sys.path.remove(TRIALS)
        for name in ("damage", "part"):
            sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def matrix(damage: Any) -> Iterator[Any]:
    with tempfile.TemporaryDirectory(prefix="ckptd-test-", dir="/dev/shm") as folder:
        yield damage.Matrix(Path(folder))


def test_every_pair_of_kind_place_and_reader_is_in_the_sample(damage: Any) -> None:
    sample = damage.pairwise()
    for reader in damage.damage_readers.READERS:
        assert {cell.kind for cell, by in sample if by == reader} == set(damage.damage_kinds.KINDS)
    assert {cell for cell, _ in sample} == set(damage.cells())


@pytest.mark.slow
@pytest.mark.parametrize("share", range(4))
def test_what_is_damaged_is_found_and_what_is_whole_is_read(damage: Any, matrix: Any, share: int) -> None:
    found = {}
    for at, (cell, reader) in enumerate(damage.pairwise()):
        if at % 4 == share and (faults := matrix.faults(cell, reader, at)):
            found[f"{reader}: {' / '.join(cell)}"] = faults
    assert found == {}


def test_a_whole_checkpoint_under_the_name_of_another_step_is_not_loaded(damage: Any, matrix: Any) -> None:
    with (
        matrix.scene(damage.Cell("sharded", "folder", "that of the step before"), 0) as scene,
        pytest.raises(
            CorruptCheckpoint, match=r"index\.json: the folder's name has another step: 2, wanted 3"
        ),
    ):
        ckptd.load(scene.newest)


@pytest.mark.slow
def test_damage_beside_the_checkpoints_costs_none_and_changes_no_answer(damage: Any, matrix: Any) -> None:
    found = {}
    for at, (place, kind) in enumerate(damage.beside_cells()):
        if at % 3 == 0 and (faults := matrix.faults_beside(place, kind, at)):
            found[f"{place} / {kind}"] = faults
    assert found == {}


@pytest.mark.slow
def test_a_daemons_verifier_finds_it_by_itself_and_moves_only_what_is_its_own(
    damage: Any, places: Path
) -> None:
    from damage_scrub import scrub

    cells = [
        damage.Cell("sharded", "model shard", "a bit"), damage.Cell("sharded", "optimizer shard", "swapped"),
        damage.Cell("sharded", "index.json", "a hash missing"), damage.Cell("single", "ckpt.pt", "that of the step before"),
        damage.Cell("sharded", "index.json", "that of another run"), damage.Cell("single", "tensors.json", "gone"),
        damage.Cell("sharded", "meta.pt", "something beside it"), damage.Cell("sharded", "folder", "a file in its place"),
    ]  # fmt: skip
    assert scrub(places.parent, cells, 2) == {}


def test_an_error_names_the_newest_valid_one_before_it(damage: Any, matrix: Any) -> None:
    with matrix.scene(damage.Cell("sharded", "model shard", "a bit"), 0) as scene:
        for ask in (ckptd.load, ckptd.verify):
            with pytest.raises(
                CorruptCheckpoint, match=r"; step 2 \(step-000000002\.2\) is the newest valid one"
            ):
                ask(scene.newest)
        (scene.newest.parent / "index.json").unlink()  # nothing is known to be valid then
        with pytest.raises(CorruptCheckpoint, match=r"; ckptd latest --root .* --run sharded finds"):
            ckptd.load(scene.newest)


def test_one_that_cannot_be_read_keeps_nobody_from_hearing_of_the_others(
    damage: Any, matrix: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    with matrix.scene(damage.Cell("sharded", "model shard", "no rights"), 0) as scene, bound_by_rights():
        code = main(["verify", "--all", "--root", str(scene.root), "--run", "sharded"])
        out = capsys.readouterr().out
    states = [line.split("\t")[1] for line in out.splitlines()]
    assert (code, states) == (1, ["valid", "valid", "valid", "unreadable"])
    assert f"{NEWEST}/model.shard-001.pt: can't be read now: Permission denied" in out
