from __future__ import annotations

import pytest

from ckptd import TrainState
from ckptd.errors import StateMismatch


def test_what_was_given_comes_back_into_the_same_list() -> None:
    stored = TrainState(step=7, epoch=1, batch_in_epoch=2, losses=[0.5, 0.25]).state_dict()
    live = TrainState(losses=[9.0])
    losses = live.losses
    live.load_state_dict(stored)
    assert live == TrainState(step=7, epoch=1, batch_in_epoch=2, losses=[0.5, 0.25])
    assert live.losses is losses


def test_a_stored_history_does_not_follow_the_live_one() -> None:
    train = TrainState(losses=[1.0])
    stored = train.state_dict()
    train.losses.append(2.0)
    assert stored["losses"] == [1.0]


@pytest.mark.parametrize(
    "change",
    [{"step": -1}, {"step": True}, {"epoch": 1.0}, {"losses": "abc"}, {"losses": ["a"]}, {"more": 1}],
)
def test_another_form_is_refused_and_changes_nothing(change: dict[str, object]) -> None:
    train = TrainState(step=3, losses=[1.0])
    with pytest.raises(StateMismatch):
        train.load_state_dict(train.state_dict() | change)
    assert train == TrainState(step=3, losses=[1.0])


def test_a_missing_counter_is_refused() -> None:
    with pytest.raises(StateMismatch, match="epoch"):
        TrainState().load_state_dict({"step": 1})
