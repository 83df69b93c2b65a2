"""A sequence is given once, also when its checkpoint was deleted by hand or damaged, and processes are killed."""

from __future__ import annotations

import os
import shutil
from itertools import count
from pathlib import Path

import pytest

import ckptd
from ckptd.names import INDEX_FILE
from killing import Killing
from made_series import Made, flip_byte

NEWEST = "step-000000003"
ANOTHER_CLIENT = "d" * 32


@pytest.fixture
def made(tmp_path: Path) -> Made:
    return three(tmp_path / "root")


def three(root: Path) -> Made:
    """Three checkpoints; index.json knows of the first alone, recent.json of all."""
    made = Made(root)
    for step in (1, 2, 3):
        made.commit(step)
        made.catalogue.write_index()
    return made


def lose(made: Made, how: str) -> None:
    if how == "deleted by hand":
        shutil.rmtree(made.dir / NEWEST)
    else:
        flip_byte(made.dir / NEWEST / INDEX_FILE)


HOW = pytest.mark.parametrize("how", ["deleted by hand", "its index damaged"])


@HOW
@pytest.mark.parametrize("starts", [1, 2, 3])
def test_starts_without_a_commit_do_not_give_the_newest_ones_sequence_again(
    made: Made, how: str, starts: int
) -> None:
    lose(made, how)
    for _ in range(starts):
        made.reopen()
    assert made.commit(4, client_id=ANOTHER_CLIENT).index.sequence == 4


def test_what_a_client_restored_keeps_its_place_in_the_line_though_it_was_deleted_and_the_daemon_started_anew(
    made: Made,
) -> None:
    lose(made, "deleted by hand")
    made.reopen()
    made.reopen()
    next_one = made.commit(4, base=3, client_id=ANOTHER_CLIENT)
    assert (next_one.index.parent, next_one.index.lineage) == (3, ((1, 4),))


@HOW
def test_nor_does_a_client_without_a_daemon_that_saved_nothing(made: Made, how: str) -> None:
    lose(made, how)
    with ckptd.Client(root=made.root.path, run=made.run, daemon="off"):
        pass
    assert Made(made.root.path).commit(4, client_id=ANOTHER_CLIENT).index.sequence == 4


@HOW
def test_nor_does_a_start_after_one_that_was_killed_at_any_call(tmp_path: Path, how: str) -> None:
    for number in count(1):
        made = three(tmp_path / str(number))
        lose(made, how)
        if not killed_at(number, made):
            break
        made.reopen()
        assert made.catalogue.highest_sequence == 3, f"killed at call {number}"
    assert number > 5


def killed_at(number: int, made: Made) -> bool:
    """Have a daemon start in another process, to be killed at its call of this number; False: there are fewer."""
    if (pid := os.fork()) == 0:
        Killing(number, [str(made.dir)])
        made.reopen()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) != 0
