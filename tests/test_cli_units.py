from __future__ import annotations

import pytest

from ckptd.errors import InvalidArgument
from ckptd_daemon.cli import units


@pytest.mark.parametrize("text", ["", "-1", "1.0", "x", "1" * 10, "٣"])
def test_what_is_no_count_is_refused_naming_the_flag(text: str) -> None:
    with pytest.raises(InvalidArgument, match=r"--keep-last: not a count"):
        units.parse_count(text, "--keep-last")


def test_a_count_below_the_least_is_refused() -> None:
    assert units.parse_count("1", "--keep-last", least=1) == 1
    with pytest.raises(InvalidArgument):
        units.parse_count("0", "--keep-last", least=1)


@pytest.mark.parametrize(
    ("count", "shown"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (86 * 2**20, "86.0 MiB"), (2**60, "1024.0 PiB")],
)
def test_bytes_are_shown_with_a_unit(count: int, shown: str) -> None:
    assert units.show_bytes(count) == shown


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(0.84, "0.8s"), (42, "42s"), (59.7, "1m00s"), (190, "3m10s"), (18120, "5h02m"), (183600, "2d03h")],
)
def test_seconds_are_shown_in_two_units_at_most(seconds: float, shown: str) -> None:
    assert units.show_seconds(seconds) == shown


def test_times_are_shown_in_utc_and_impossible_ones_not_at_all() -> None:
    assert units.show_utc(1_700_000_000.9) == "2023-11-14T22:13:20Z"
    assert units.show_utc(None) == ""
    assert units.show_utc(1e300) == ""
    assert units.show_utc(float("nan")) == ""


@pytest.mark.parametrize(
    ("text", "count"),
    [("0", 0), ("1000", 1000), ("5GB", 5 * 10**9), ("1.5 kB", 1500), ("512MiB", 512 * 2**20), ("2gib", 2**31), ("7b", 7)],
)  # fmt: skip
def test_sizes_count_by_1000_or_with_an_i_by_1024(text: str, count: int) -> None:
    assert units.parse_bytes(text, "--max-staged-bytes") == count


@pytest.mark.parametrize("text", ["", "-1", "5 G B", "1e9", "5XB", "ib", "1ib", "٣", "1_000", "9" * 16])
def test_what_is_no_size_is_refused_with_where_it_was_given(text: str) -> None:
    with pytest.raises(InvalidArgument, match="CKPTD_MAX_STAGED_BYTES"):
        units.parse_bytes(text, "CKPTD_MAX_STAGED_BYTES")
