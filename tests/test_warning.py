"""When a CheckpointWarning is said, and where it points to."""

from __future__ import annotations

import warnings

import pytest

from ckptd.errors import CheckpointWarning
from ckptd.warning import HeldBack, warn, warn_after


def test_what_is_to_be_said_after_is_said_when_the_outermost_is_done() -> None:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with HeldBack():
            with HeldBack():
                warn_after("one")
            warn_after("two")
            warn("at once")
            assert [str(one.message) for one in said] == ["at once"]
        warn_after("outside")
    assert [str(one.message) for one in said] == ["at once", "one", "two", "outside"]
    assert {one.filename for one in said} == {__file__}


def test_an_error_meanwhile_says_nothing_and_holds_nothing_back_later() -> None:
    with pytest.raises(ZeroDivisionError), HeldBack():
        warn_after("never said")
        raise ZeroDivisionError
    with pytest.warns(CheckpointWarning, match="said"):
        warn_after("said")
