from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptd_daemon.series.policy import RetentionPolicy
from ckptd_daemon.series.retention import Candidate, Verdict, best_first, decide
from ckptd_daemon.series.standings import Standings

LAST_2 = RetentionPolicy(keep_last=2)


def verified(sequence: int, **fields: object) -> Candidate:
    given: dict[str, object] = {"name": f"step-{sequence * 100:09d}", "sequence": sequence, "verified": True}
    return Candidate(**(given | fields))  # type: ignore[arg-type]


def kept(verdicts: list[Verdict]) -> set[str]:
    return {v.name for v in verdicts if v.keep}


def sequences_kept(candidates: list[Candidate], policy: RetentionPolicy, **more: object) -> set[int | None]:
    names = kept(decide(candidates, policy, **more))  # type: ignore[arg-type]
    return {c.sequence for c in candidates if c.name in names}


def test_the_last_k_are_those_with_the_highest_sequence_not_the_last_in_spelling() -> None:
    steps = [9, 10, 99, 100, 1000, 10000]
    candidates = [verified(i, name=f"step-{step:09d}") for i, step in enumerate(steps, 1)]
    random.Random(3).shuffle(candidates)
    assert kept(decide(candidates, LAST_2)) == {"step-000001000", "step-000010000"}


def test_a_rewound_run_keeps_the_new_lower_step_and_lets_the_abandoned_ones_go() -> None:
    old = [verified(i) for i in range(1, 4)]
    abandoned = [verified(i, on_line=False) for i in range(4, 8)]
    new = verified(8, name="step-000000400.2")
    assert sequences_kept([*old, *abandoned, new], RetentionPolicy(keep_last=1)) == {8}


def test_abandoned_ones_stay_until_the_new_line_has_a_verified_checkpoint() -> None:
    old = [verified(i) for i in range(1, 4)]
    abandoned = [verified(i, on_line=False) for i in range(4, 8)]
    new = verified(8, name="step-000000400.2", verified=False)
    assert sequences_kept([*old, *abandoned, new], RetentionPolicy(keep_last=1)) == {3, 4, 5, 6, 7, 8}


def test_abandoned_ones_of_an_earlier_fork_go_while_those_of_the_newest_stay() -> None:
    line = [verified(1), verified(2), verified(5), verified(9, verified=False)]
    earlier, newest = verified(3, on_line=False), verified(6, on_line=False)
    assert sequences_kept([*line, earlier, newest], LAST_2) == {2, 5, 6, 9}


def test_an_abandoned_one_goes_even_when_it_was_never_verified() -> None:
    assert sequences_kept([verified(1, on_line=False, verified=False), verified(2)], LAST_2) == {2}


def test_the_last_valid_one_stays_while_its_successors_are_stalled() -> None:
    good, stalled, queued = verified(1), verified(2, verified=False), verified(3, verified=False)
    verdicts = decide([good, stalled, queued], RetentionPolicy(keep_last=1))
    assert kept(verdicts) == {good.name, stalled.name, queued.name}
    assert verdicts[1].reasons == ("newer than the newest verified one",)


def test_unverified_ones_fill_no_place_of_the_last_k() -> None:
    candidates = [verified(1), verified(2), verified(3), verified(4, verified=False)]
    assert sequences_kept(candidates, LAST_2) == {2, 3, 4}


def test_an_older_unverified_one_waits_for_its_check_since_it_may_be_the_best() -> None:
    policy = RetentionPolicy(keep_last=1, keep_best=1, monitor="loss", mode="min")
    waiting = verified(1, verified=False, metrics={"loss": 0.1})
    candidates = [waiting, verified(2, metrics={"loss": 0.5}), verified(3, metrics={"loss": 0.7})]
    verdicts = decide(candidates, policy)
    assert kept(verdicts) == {c.name for c in candidates}
    assert verdicts[0].reasons == ("not verified yet",)


@pytest.mark.parametrize("missing", [1, 2, 3])
def test_nothing_verified_means_nothing_removed(missing: int) -> None:
    candidates = [verified(i, verified=False) for i in range(1, missing + 1)]
    assert all(v.keep for v in decide(candidates, RetentionPolicy(keep_last=1)))


def test_nothing_at_all_is_removed_while_a_decision_is_unreadable() -> None:
    candidates = [*(verified(i) for i in range(1, 9)), verified(9, on_line=False)]
    verdicts = decide(
        candidates, RetentionPolicy(keep_last=1), unreadable=["decisions/0001-birth.json: not JSON"]
    )
    assert all(v.keep for v in verdicts)
    assert "decisions/0001-birth.json" in verdicts[0].reasons[0]


def test_foreign_corrupt_and_unreadable_ones_are_never_removed() -> None:
    odd = [
        verified(1, name="foreign", own=False),
        verified(2, name="failed", verified=False, failed="a shard is gone"),
        verified(3, name="failed-after-it-was-verified", failed="sha256 differs"),
        Candidate(name="no-index", sequence=None, own=False),
        Candidate(name="own-but-no-index", sequence=None),
    ]
    names = kept(decide([*odd, *(verified(i) for i in range(4, 9))], RetentionPolicy(keep_last=1)))
    assert names == {*(c.name for c in odd), "step-000000800"}


def test_a_foreign_one_with_a_high_sequence_is_not_the_newest_verified() -> None:
    assert sequences_kept(
        [verified(1), verified(2), verified(99, own=False)], RetentionPolicy(keep_last=1)
    ) == {2, 99}


def test_a_failed_newest_one_leaves_the_one_before_it_as_the_last_valid() -> None:
    candidates = [verified(1), verified(2), verified(3, failed="sha256 differs")]
    assert sequences_kept(candidates, RetentionPolicy(keep_last=1)) == {2, 3}


@pytest.mark.parametrize(
    ("values", "mode", "expected"),
    [
        ([5, 4, 3, 2, 1], "min", {4, 5}),  # improving: the best is the last
        ([1, 2, 3, 4, 5], "min", {1, 4, 5}),  # worsening: the first stays
        ([1, 2, 3, 2, 1], "max", {3, 4, 5}),
        ([1, 1, 1, 1, 1], "min", {4, 5}),  # tied: the newest of them
        ([1, 3, 1, 3, 3], "min", {3, 4, 5}),
        ([math.nan, 3, math.nan, math.nan, math.nan], "min", {2, 4, 5}),
        ([math.nan] * 5, "max", {4, 5}),
        ([math.inf, 2, 3, 4, 5], "min", {2, 4, 5}),
        ([math.inf, 2, 3, 4, 5], "max", {1, 4, 5}),
        ([None, None, 7, None, None], "min", {3, 4, 5}),
        ([None] * 5, "min", {4, 5}),
    ],
)
def test_the_best_by_a_metric_stays_beside_the_last_two(
    values: list[float | None], mode: str, expected: set[int]
) -> None:
    policy = RetentionPolicy(keep_last=2, keep_best=1, monitor="loss", mode=mode)  # type: ignore[arg-type]
    candidates = [verified(i, metrics={} if v is None else {"loss": v}) for i, v in enumerate(values, 1)]
    assert sequences_kept(candidates, policy) == expected


def test_the_best_one_stays_when_a_metric_is_watched_though_keep_best_is_zero() -> None:
    policy = RetentionPolicy(keep_last=1, monitor="loss", mode="min")
    assert sequences_kept([verified(i, metrics={"loss": float(i)}) for i in range(1, 5)], policy) == {1, 4}


def test_keep_best_alone_still_keeps_the_newest_verified_one() -> None:
    policy = RetentionPolicy(keep_last=0, keep_best=2, monitor="acc", mode="max")
    assert sequences_kept([verified(i, metrics={"acc": -float(i)}) for i in range(1, 6)], policy) == {1, 2, 5}


def test_an_abandoned_or_unverified_best_is_not_the_best() -> None:
    policy = RetentionPolicy(keep_last=1, keep_best=1, monitor="loss", mode="min")
    candidates = [
        verified(1, metrics={"loss": 3.0}),
        verified(2, metrics={"loss": 1.0}, on_line=False),
        verified(3, metrics={"loss": 5.0}),
        verified(4, metrics={"loss": 4.0}),
    ]
    assert sequences_kept(candidates, policy) == {1, 4}


def test_every_verdict_says_why() -> None:
    policy = RetentionPolicy(keep_last=1, keep_best=1, monitor="loss", mode="min")
    verdicts = decide([verified(i, metrics={"loss": float(i)}) for i in range(1, 4)], policy)
    assert verdicts == [
        Verdict("step-000000100", True, ("one of the best 1 by loss (min): 1",)),
        Verdict("step-000000200", False, ("not one of the last 1", "not one of the best 1 by loss (min)")),
        Verdict("step-000000300", True, ("the newest verified one", "one of the last 1")),
    ]


def test_best_first_prefers_the_newer_of_equals_and_leaves_out_nan() -> None:
    values = {1: 2.0, 2: 2.0, 3: math.nan, 4: 3.0}
    candidates = [verified(i, metrics={"m": v}) for i, v in values.items()]
    assert [c.sequence for c in best_first(candidates, "m", "min")] == [2, 1, 4]
    assert [c.sequence for c in best_first(candidates, "m", "max")] == [4, 2, 1]


_metrics = st.dictionaries(st.just("m"), st.floats(), max_size=1)
_candidates = st.lists(
    st.builds(
        Candidate, name=st.just(""), sequence=st.integers(1, 40) | st.none(), own=st.booleans(),
        on_line=st.booleans(), verified=st.booleans(),
        failed=st.sampled_from(["", "", "bad"]), metrics=_metrics,
    ),
    max_size=20, unique_by=lambda c: c.sequence if c.sequence is not None else object(),
)  # fmt: skip
_policies = st.builds(
    RetentionPolicy,
    keep_last=st.integers(1, 5),
    keep_best=st.integers(0, 3),
    monitor=st.just("m"),
    mode=st.sampled_from(["min", "max"]),
)


@settings(max_examples=300, deadline=None)
@given(_candidates, _policies)
def test_the_invariants_hold_for_any_series_and_policy(
    unnamed: list[Candidate], policy: RetentionPolicy
) -> None:
    candidates = [replace(c, name=f"n{i}") for i, c in enumerate(unnamed)]
    verdicts = decide(candidates, policy)
    assert [v.name for v in verdicts] == [c.name for c in candidates]
    assert all(v.reasons for v in verdicts)
    assert_kept_up_as_decided(candidates, policy)
    line = [
        c
        for c in candidates
        if c.own and c.on_line and c.verified and not c.failed and c.sequence is not None
    ]
    newest = max((c.sequence or 0 for c in line), default=None)
    for c, v in zip(candidates, verdicts, strict=True):
        if v.keep:
            continue
        assert c.own and c.sequence is not None and not c.failed  # never foreign, unreadable or failed
        assert newest is not None and c.sequence < newest  # never the last valid one nor anything newer
        assert c.verified or not c.on_line
    best = best_first(line, "m", policy.mode or "min")
    removed = {v.name for v in verdicts if not v.keep}
    assert not removed & {c.name for c in best[: max(1, policy.keep_best)]}
    stay = [c for c in line if c.name not in removed]
    assert len(stay) >= min(len(line), policy.keep_last)


@given(_candidates, _policies, st.randoms(use_true_random=False))
@settings(max_examples=100, deadline=None)
def test_the_order_of_the_listing_decides_nothing(
    unnamed: list[Candidate], policy: RetentionPolicy, rnd: random.Random
) -> None:
    candidates = [replace(c, name=f"n{i}") for i, c in enumerate(unnamed)]
    shuffled = candidates[:]
    rnd.shuffle(shuffled)
    assert kept(decide(candidates, policy)) == kept(decide(shuffled, policy))


@given(_candidates, _policies)
@settings(max_examples=100, deadline=None)
def test_deciding_again_after_removing_removes_nothing_more(
    unnamed: list[Candidate], policy: RetentionPolicy
) -> None:
    candidates = [replace(c, name=f"n{i}") for i, c in enumerate(unnamed)]
    rest = [c for c, v in zip(candidates, decide(candidates, policy), strict=True) if v.keep]
    assert all(v.keep for v in decide(rest, policy))


def assert_kept_up_as_decided(candidates: list[Candidate], policy: RetentionPolicy) -> None:
    """Whom the standings name is whom `decide` wouldn't keep, also when they came one by one and others left."""
    verdicts = [v for v in decide(candidates, policy) if not v.keep]
    standings = Standings(replace(c, verified=not c.verified) for c in candidates)
    assert standings.to_remove(policy) is not None
    for number, candidate in enumerate(candidates):
        standings.put(replace(candidate, name=f"other{number}"))
        standings.put(candidate)
        standings.drop(f"other{number}")
    asked = standings.to_remove(policy)
    assert sorted(asked, key=lambda v: v.name) == sorted(verdicts, key=lambda v: v.name)
    sequences = {c.name: c.sequence or 0 for c in candidates}
    assert [v.name for v in asked] == sorted((v.name for v in asked), key=sequences.__getitem__)
    assert standings.to_remove(policy, unreadable=["one"]) == []


def test_of_two_with_one_sequence_both_ways_keep_the_same() -> None:
    candidates = [verified(4, name=name) for name in ("step-000000003", "step-000000005", "step-000000004")]
    policy = RetentionPolicy(keep_last=1)
    assert kept(decide(candidates, policy)) == {"step-000000005"}  # which is the latest to whoever asks
    removed = [verdict.name for verdict in Standings(candidates).to_remove(policy)]
    assert removed == ["step-000000003", "step-000000004"]
