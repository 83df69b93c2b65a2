from __future__ import annotations

import pytest

from ckptd.errors import InvalidArgument
from ckptd_daemon.series.policy import RetentionPolicy, parse_duration_s, parse_monitor


def test_the_default_keeps_the_last_five() -> None:
    assert RetentionPolicy() == RetentionPolicy(keep_last=5, keep_best=0, monitor=None, mode=None)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"keep_last": 0}, "keep nothing"),
        ({"keep_last": 0, "monitor": "loss", "mode": "min"}, "keep nothing"),
        ({"keep_best": 1}, "which metric"),
        ({"monitor": "loss"}, "min or max"),
        ({"keep_best": 1, "monitor": "loss"}, "min or max"),
        ({"mode": "min"}, "which metric"),
        ({"monitor": "loss", "mode": "lower"}, "unknown mode"),
        ({"monitor": "", "mode": "min"}, "name of a metric"),
        ({"monitor": 3, "mode": "min"}, "name of a metric"),
        ({"keep_last": -1}, "number of checkpoints"),
        ({"keep_last": True}, "number of checkpoints"),
        ({"keep_last": 2.0}, "number of checkpoints"),
        ({"keep_last": "2"}, "number of checkpoints"),
        ({"keep_best": 10**12, "monitor": "loss", "mode": "min"}, "number of checkpoints"),
    ],
)
def test_an_impossible_policy_is_refused_with_its_reason(fields: dict[str, object], says: str) -> None:
    with pytest.raises(InvalidArgument, match=says) as caught:
        RetentionPolicy(**fields)  # type: ignore[arg-type]
    assert caught.value.exit_code == 2


def test_a_monitor_is_a_name_with_min_or_max() -> None:
    assert parse_monitor("val_loss:min") == ("val_loss", "min")
    assert parse_monitor("eval:acc:max") == ("eval:acc", "max")
    for text in ("val_loss", "val_loss:", ":min", "val_loss:low", "", "val_loss:MIN"):
        with pytest.raises(InvalidArgument, match="needs min or max"):
            parse_monitor(text)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 90), ("90s", 90), ("10m", 600), ("1.5h", 5400), ("2d", 172_800), (" 6 h ", 21_600)],
)
def test_durations(text: str, seconds: float) -> None:
    assert parse_duration_s(text) == seconds


@pytest.mark.parametrize("text", ["", "h", "-5", "5 parsecs", "nan", "inf", "1e3", "5GB5", "٣s"])
def test_nonsense_quantities_are_refused(text: str) -> None:
    with pytest.raises(InvalidArgument):
        parse_duration_s(text, where="--x")
