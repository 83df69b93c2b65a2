from __future__ import annotations

from typing import Any

import pytest

from ckptd.disk.decisions import Fork
from ckptd.disk.lineage import Position, head_of, line_of, next_position, place
from ckptd.format.records import CheckpointIndex, Lineage

RUN_ID = "ab" * 16


def index(
    sequence: int, lineage: Lineage | None = None, *, client: str = "a", snapshot: int = 1
) -> CheckpointIndex:
    return CheckpointIndex(
        run="default", run_id=RUN_ID, client_id=client * 32, snapshot=snapshot,
        sequence=sequence, parent=None, step=sequence * 100, saved_at=0.0,
        lineage=lineage or ((1, sequence),), run_seconds=0.0,
        layout="single", num_shards=0, shards=(), meta_sha256=None, meta_bytes=None,
        tensors_sha256="", tensors_bytes=0,
    )  # fmt: skip


def chain(*sequences: int, **more: Any) -> list[CheckpointIndex]:
    return [index(sequence, **more) for sequence in sequences]


def following(
    own: list[CheckpointIndex], sequence: int, *, forks: tuple[Fork, ...] = (), base: int | None = None,
    since: int = 0, known: set[int] | None = None, begins: bool = False,
) -> Position:  # fmt: skip
    """Where client b's next snapshot goes."""
    seen = {each.sequence for each in own} | {fork.sequence for fork in forks} | (known or set())
    return next_position(
        own, forks, line_of(own, forks, (), ()), seen, run_id=RUN_ID, sequence=sequence, client_id="b" * 32,
        base_sequence=base, base_snapshot=since, begins_line=begins,
    )  # fmt: skip


def on(
    own: list[CheckpointIndex], forks: tuple[Fork, ...] = (), moved: tuple[int, ...] = (),
    names: tuple[str, ...] = (), upto: int = 12,
) -> list[int]:  # fmt: skip
    line = line_of(own, forks, moved, names)
    return [sequence for sequence in range(1, upto) if sequence in line]


# --- placing --------------------------------------------------------------------------------------


def test_the_first_checkpoint_begins_a_line_without_a_fork() -> None:
    assert following([], 1) == Position(RUN_ID, 1, None, ((1, 1),), forks=False)


def test_restoring_nothing_goes_on_from_the_head() -> None:
    assert following(chain(1, 2, 3), 4) == Position(RUN_ID, 4, 3, ((1, 4),), forks=False)


def test_restoring_the_head_goes_on_too() -> None:
    assert following(chain(1, 2, 3), 4, base=3) == Position(RUN_ID, 4, 3, ((1, 4),), forks=False)


def test_a_sequence_that_never_came_to_be_leaves_no_gap_in_the_line() -> None:
    assert following(chain(1, 2, 3), 7, base=3) == Position(RUN_ID, 7, 3, ((1, 7),), forks=False)


def test_committing_after_an_older_one_was_restored_forks() -> None:
    assert following(chain(*range(1, 8)), 8, base=3) == Position(RUN_ID, 8, 3, ((1, 3), (8, 8)), forks=True)


def test_the_next_one_of_the_same_client_goes_on_from_its_own_last() -> None:
    own = [*chain(*range(1, 8)), index(8, ((1, 3), (8, 8)), client="b")]
    forks = (Fork(8, 3, "step-000000400"),)
    assert following(own, 9, forks=forks, base=3) == Position(RUN_ID, 9, 8, ((1, 3), (8, 9)), forks=False)


def test_a_client_that_restores_the_same_one_again_begins_another_line() -> None:
    own = [*chain(*range(1, 8)), index(8, ((1, 3), (8, 8)), client="b", snapshot=1)]
    again = following(own, 9, forks=(Fork(8, 3, "step-000000400"),), base=3, since=1)
    assert again == Position(RUN_ID, 9, 3, ((1, 3), (9, 9)), forks=True)


def test_going_on_from_a_checkpoint_that_was_deleted_keeps_its_line() -> None:
    own = [index(1), index(7), index(9, ((1, 4), (8, 9)))]
    assert following(own, 10, base=3).lineage == ((1, 3), (10, 10))
    assert following(own, 10, base=8).lineage == ((1, 4), (8, 8), (10, 10))


def test_a_deleted_parent_whose_line_no_index_tells_is_found_by_the_forks() -> None:
    forks = (Fork(8, 3, "step-000000400"),)
    position = following([index(2)], 12, forks=forks, base=9, known={9})
    assert position.lineage == ((1, 3), (8, 12))


def test_an_abandoned_one_can_be_gone_back_to() -> None:
    own = [*chain(*range(1, 8)), index(8, ((1, 3), (8, 8)))]
    position = following(own, 9, forks=(Fork(8, 3, "step-000000400"),), base=6)
    assert position == Position(RUN_ID, 9, 6, ((1, 6), (9, 9)), forks=True)


def test_whoever_goes_on_after_a_fork_that_never_happened_records_a_newer_one() -> None:
    void = (Fork(8, 3, "step-000000400"),)
    position = following(chain(*range(1, 8)), 9, forks=void, base=7)
    assert position == Position(RUN_ID, 9, 7, ((1, 7), (9, 9)), forks=True)
    # so that the void fork can't take over when this checkpoint fails
    assert on(chain(*range(1, 8)), (*void, Fork(9, 7, "step-000000800")), moved=(9,)) == [
        1,
        2,
        3,
        4,
        5,
        6,
        7,
        9,
        10,
        11,
    ]


def test_a_foreign_checkpoint_that_was_restored_begins_a_line_of_this_run() -> None:
    assert following([], 51, base=50).parent is None


def test_a_warm_start_forks_from_nothing_in_a_run_that_has_checkpoints() -> None:
    assert following(chain(1, 2, 3), 4, begins=True) == Position(RUN_ID, 4, None, ((4, 4),), forks=True)


def test_a_warm_start_of_a_run_without_checkpoints_needs_no_fork() -> None:
    assert following([], 1, begins=True) == Position(RUN_ID, 1, None, ((1, 1),), forks=False)


def test_the_next_one_after_a_warm_start_goes_on_from_the_first_of_its_line() -> None:
    own = [*chain(1, 2, 3), index(4, ((4, 4),), client="b")]
    forks = (Fork(4, None, "step-000000400"),)
    assert following(own, 5, forks=forks, begins=True) == Position(RUN_ID, 5, 4, ((4, 5),), forks=False)


def test_a_client_that_starts_warm_in_the_middle_leaves_its_own_earlier_ones() -> None:
    own = chain(1, 2, 3, client="b")
    assert following(own, 4, since=1, begins=True) == Position(RUN_ID, 4, None, ((4, 4),), forks=True)


def test_after_a_warm_start_a_client_that_restores_nothing_goes_on_from_it() -> None:
    own = [*chain(1, 2, 3), index(4, ((4, 4),))]
    position = following(own, 5, forks=(Fork(4, None, "step-000000400"),))
    assert position == Position(RUN_ID, 5, 4, ((4, 5),), forks=False)


def test_a_warm_start_can_be_left_for_the_line_before_it() -> None:
    own = [*chain(1, 2, 3), index(4, ((4, 4),))]
    position = following(own, 5, forks=(Fork(4, None, "step-000000400"),), base=3)
    assert position == Position(RUN_ID, 5, 3, ((1, 3), (5, 5)), forks=True)


def test_a_retry_under_the_same_sequence_gets_the_same_place() -> None:
    own = chain(*range(1, 8))
    first = following(own, 8, base=3)
    assert following(own, 8, forks=(Fork(8, 3, "step-000000400"),), base=3) == first


def test_place_says_the_same_for_a_given_parent() -> None:
    assert place(None, 5, {1, 2}) == ((5, 5),)
    assert place(index(3), 4, {1, 2, 3}) == ((1, 4),)
    assert place(index(3), 8, {1, 2, 3, 5, 8}) == ((1, 3), (8, 8))


# --- the line -------------------------------------------------------------------------------------


def test_the_line_of_a_run_without_forks_is_all_of_it() -> None:
    assert on(chain(1, 2, 5), upto=6) == [1, 2, 3, 4, 5]
    assert on([], upto=4) == [1, 2, 3]


def test_after_a_fork_the_later_ones_are_abandoned() -> None:
    own = [*chain(*range(1, 8)), index(8, ((1, 3), (8, 8)))]
    assert on(own, (Fork(8, 3, "step-000000400"),), upto=9) == [1, 2, 3, 8]


def test_membership_survives_the_deletion_of_parents_and_of_decisions() -> None:
    assert on([index(2), index(5), index(8, ((1, 3), (8, 8)))], (), upto=9) == [1, 2, 3, 8]


@pytest.mark.parametrize(
    "traces",
    [{"moved": (8,)}, {"names": ("step-000000400",)}, {"moved": (9,)}],
    ids=["moved", "unreadable", "later"],
)
def test_a_new_line_whose_head_fails_falls_back_along_itself(traces: dict[str, Any]) -> None:
    own = chain(*range(1, 8))
    forks = (Fork(8, 3, "step-000000400"),)
    assert on(own, forks, **traces, upto=8) == [1, 2, 3]


def test_a_fork_that_was_only_recorded_changes_nothing() -> None:
    own = chain(*range(1, 8))
    assert on(own, (Fork(8, 3, "step-000000400"),), upto=8) == [1, 2, 3, 4, 5, 6, 7]


def test_forks_on_forks_fall_back_along_theirs() -> None:
    own = [*chain(1, 2, 3, 4), index(5, ((1, 2), (5, 5))), index(6, ((1, 2), (5, 6)))]
    forks = (Fork(5, 2, "step-000000500"), Fork(7, 5, "step-000000700"))
    assert on(own, forks, moved=(7,), upto=8) == [1, 2, 5, 7]
    assert on(chain(1, 2, 3, 4), forks, moved=(5, 7), upto=8) == [1, 2, 5, 7]


def test_a_line_that_began_from_nothing_has_nothing_else_on_it() -> None:
    assert on(chain(1, 2), (Fork(5, None, "step-000000500"),), moved=(5,), upto=7) == [5, 6]


def test_the_head_is_the_newest_of_the_line_and_none_without_one() -> None:
    own = [*chain(*range(1, 8)), index(8, ((1, 3), (8, 8)))]
    forks = (Fork(8, 3, "step-000000400"),)
    assert head_of(own, line_of(own, forks, (), ())) is own[-1]
    assert head_of(own[:-1], line_of(own[:-1], forks, (8,), ())) is own[2]
    assert head_of(chain(1, 2), line_of(chain(1, 2), (Fork(5, None, "step-5"),), (5,), ())) is None
