"""The same with real processes: a daemon, a verifier and a trainer live through all of it; scripts/torture has more."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ckptd_places import daemon_of, places
from daemon_parts import eventually
from failing_daemon import Trainer, trainer_of
from nth_call import KINDS

__all__ = ["places"]

pytestmark = pytest.mark.slow

#: When, whose, which, the first and each how-many-th call after it, and whether all that follow fail too.
SWEEPS = (
    ("serving", "daemon", "open", 2, 4, False),
    ("serving", "daemon", "write", 1, 2, False),
    ("serving", "daemon", "fsync", 1, 3, True),
    ("serving", "daemon", "rename", 1, 2, False),
    ("serving", "daemon", "unlink", 1, 2, True),
    ("serving", "daemon", "close", 3, 7, False),
    ("serving", "daemon", "change", 2, 5, True),
    ("serving", "verifier", "open", 1, 2, False),
    ("serving", "verifier", "list", 2, 4, True),
    ("attaching", "client", "open", 4, 9, False),
    ("attaching", "client", "mmap", 1, 1, True),
    ("attaching", "daemon", "allocate", 1, 1, False),
    ("attaching", "daemon", "mmap", 1, 1, True),
)


@pytest.fixture
def trainer(places: Path, tmp_path: Path) -> Iterator[Trainer]:
    with trainer_of(places, tmp_path / "orders") as trainer:
        yield trainer


def test_a_daemon_and_its_trainer_live_through_every_failing_call(trainer: Trainer) -> None:
    record = daemon_of(trainer.root)
    for when, who, kind, first, every, lasting in SWEEPS:
        rounds = 0
        for number in range(first, 200, every):
            how = KINDS[kind][number % len(KINDS[kind])]
            met, wrong = trainer.round(when, who, kind, number, how, lasting=lasting)
            assert wrong == [], f"{when}: {how} from call {number} of {kind} of the {who}"
            if not met:
                break
            rounds += 1
        assert rounds > 0, f"{when}: no {kind} of the {who} was met"
    assert daemon_of(trainer.root) == record
    eventually(lambda: trainer.left_over() == [])
