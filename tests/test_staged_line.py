"""Where snapshots go whose predecessor was restored from a slot and may never have become a checkpoint."""

from __future__ import annotations

import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from ckptd.disk.decisions import Fork
from ckptd.disk.lineage import Position, head_of, line_of, next_position
from ckptd.disk.staged_line import Accepted, bases_of_last, becomes_head
from ckptd.errors import ProtocolError
from ckptd.limits import MAX_BASES
from ckptd.snapshot.descriptor import Descriptor
from ckptd.snapshot.descriptor_codec import decode, encode
from snapshots import RUN_ID, descriptor
from test_lineage import index


class Run:
    """A run as it is on disk, its truth beside it: from which state each snapshot was really trained on."""

    def __init__(self) -> None:
        self.own: list[Any] = []
        self.forks: list[Fork] = []
        self.known: set[int] = set()
        self.truth: dict[int, int | None] = {}
        self.waiting: list[Accepted] = []
        self.sequence = 0

    @property
    def line(self) -> Any:
        return line_of(self.own, self.forks, (), ())

    def series(self) -> Any:
        seen = {one.sequence for one in self.own} | {fork.sequence for fork in self.forks} | self.known
        return SimpleNamespace(
            own=self.own, head=head_of(self.own, self.line), known_sequences=seen, entries=()
        )

    def accept(self, d: Descriptor, trained_from: int | None) -> int:
        self.sequence += 1
        self.truth[self.sequence] = trained_from
        self.waiting.append(Accepted(self.sequence, d))
        return self.sequence

    def position(self, one: Accepted) -> Position:
        d, series = one.descriptor, self.series()
        return next_position(
            self.own, self.forks, self.line, series.known_sequences, run_id=RUN_ID, sequence=one.sequence,
            client_id=d.client_id, base_sequence=d.base_sequence, base_snapshot=d.base_snapshot,
            base_before=d.base_before, begins_line=d.begins_line,
        )  # fmt: skip

    def write(self, one: Accepted, *, fails: bool, records_fork: bool) -> None:
        position = self.position(one)
        if position.forks and (not fails or records_fork):
            self.forks.append(Fork(one.sequence, position.parent, f"step-{one.sequence:09d}"))
        if not fails:
            d = one.descriptor
            made = index(one.sequence, position.lineage, client=d.client_id[0], snapshot=d.snapshot)
            self.own.append(replace(made, client_id=d.client_id, parent=position.parent))

    def ancestors(self, sequence: int | None) -> set[int]:
        """The checkpoints that were really on the way to it."""
        on_disk, found = {one.sequence for one in self.own}, set[int]()
        while sequence is not None:
            found |= {sequence} & on_disk
            sequence = self.truth[sequence]
        return found


class Trainer:
    """Restores the newest there is, from a slot if it waits in one, or an older one; then saves."""

    def __init__(self, run: Run, client: str, rng: random.Random) -> None:
        self.run, self.client, self.snapshot = run, client, 0
        self.base: int | None = None
        self.before: tuple[int, ...] = ()
        self.begins = False
        head = head_of(run.own, run.line)
        if run.waiting:
            bases = bases_of_last(run.series(), run.waiting)
            assert bases is not None and becomes_head(run.series(), run.waiting[-1])
            self.base, self.before = run.waiting[-1].sequence, bases
        elif head is not None:
            on_line = [one.sequence for one in run.own if one.sequence in run.line]
            self.base = rng.choice([head.sequence, head.sequence, rng.choice(on_line)])
            self.begins = rng.random() < 0.1
        self.state = None if self.begins else self.base

    def save(self) -> None:
        self.snapshot += 1
        base = None if self.begins else self.base
        d = descriptor(
            self.snapshot, client_id=self.client, snapshot=self.snapshot, base_sequence=base,
            base_before=self.before if base is not None else (), begins_line=self.begins,
        )  # fmt: skip
        self.state = self.run.accept(decode(encode(d)), self.state)


@pytest.mark.parametrize("seed", range(300))
def test_whatever_is_never_written_the_line_is_what_was_really_trained_on(seed: int) -> None:
    rng, run = random.Random(seed), Run()
    for number in range(rng.randint(2, 8)):
        trainer = Trainer(run, f"{number + 1:032x}", rng)
        for _ in range(rng.randint(1, 3)):
            trainer.save()
            if rng.random() < 0.5:
                write_all(run, rng)
    write_all(run, rng)


def write_all(run: Run, rng: random.Random) -> None:
    for one in run.waiting:
        run.write(one, fails=rng.random() < 0.5, records_fork=rng.random() < 0.5)
        head = head_of(run.own, run.line)
        if head is not None:
            on_line = {each.sequence for each in run.own if each.sequence in run.line}
            assert on_line == run.ancestors(head.sequence)
    run.waiting.clear()


def accepted(*clients: str) -> list[Accepted]:
    return [
        Accepted(number, descriptor(number, client_id=client * 32, snapshot=number))
        for number, client in enumerate(clients, 1)
    ]


def test_with_too_many_in_a_row_the_place_can_not_be_told() -> None:
    run = Run()
    assert bases_of_last(run.series(), accepted(*("a" * (MAX_BASES + 1)))) == tuple(range(MAX_BASES, 0, -1))
    assert bases_of_last(run.series(), accepted(*("a" * (MAX_BASES + 2)))) is None


def test_only_what_is_the_newest_of_all_becomes_the_head() -> None:
    (last,) = accepted("a")
    run = Run()
    assert becomes_head(run.series(), last)
    run.known = {1}  # its own temporary folder
    assert becomes_head(run.series(), last)
    for change in (
        {"known": {2}},
        {"own": [index(2, client="b")]},
        {"own": [index(1, client="a", snapshot=1)]},
    ):
        other = Run()
        other.__dict__.update(change)
        assert not becomes_head(other.series(), last), change
    series = run.series()
    series.entries = (SimpleNamespace(is_in_doubt=True),)
    assert not becomes_head(series, last)


@pytest.mark.parametrize(
    "changes",
    [
        {"base_before": (1,)},
        {"base_sequence": 3, "base_before": (3,)},
        {"base_sequence": 3, "base_before": (1, 2)},
        {"base_sequence": 3, "base_before": (2, -1)},
        {"base_sequence": 100, "base_before": tuple(range(MAX_BASES + 1, 0, -1))},
    ],
)
def test_bases_that_can_not_be_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ProtocolError, match="base_before"):
        decode(encode(descriptor(1, **changes)))


def test_bases_come_back() -> None:
    d = descriptor(1, base_sequence=9, base_before=(7, 0))
    assert decode(encode(d)).base_before == (7, 0)
