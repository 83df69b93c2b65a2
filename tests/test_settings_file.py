from __future__ import annotations

import os
from pathlib import Path

import pytest

from ckptd.errors import InvalidArgument
from ckptd_daemon.series.budget import Budget
from ckptd_daemon.series.policy import RetentionPolicy
from ckptd_daemon.series.settings_file import (
    Settings,
    read_settings,
    settings_from_toml,
    settings_path,
    settings_to_toml,
    write_settings,
)

LOSS = RetentionPolicy(keep_last=3, keep_best=2, monitor="val_loss", mode="min")


def test_no_file_means_the_defaults(tmp_path: Path) -> None:
    assert read_settings(tmp_path) == Settings()
    assert Settings().policy_for("any") == RetentionPolicy()


@pytest.mark.timeout(100)
def test_a_pipe_in_its_place_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    settings_path(tmp_path).parent.mkdir()
    os.mkfifo(settings_path(tmp_path))
    with pytest.raises(InvalidArgument, match=r"ckptd\.toml: not a regular file"):
        read_settings(tmp_path)


def test_what_is_written_is_read_back_equal(tmp_path: Path) -> None:
    settings_path(tmp_path).parent.mkdir()
    settings = Settings(
        policy=LOSS, runs={"gpt": RetentionPolicy(keep_last=1), "a.b-c": LOSS},
        budget=Budget(max_client_bytes=5 * 10**9), max_write_rate=50_000_000, scrub_every_s=0,
    )  # fmt: skip
    write_settings(tmp_path, settings)
    assert read_settings(tmp_path) == settings
    assert [p.name for p in settings_path(tmp_path).parent.iterdir()] == ["ckptd.toml"]


def test_a_run_takes_from_the_general_policy_what_it_does_not_say() -> None:
    settings = settings_from_toml(
        b"[policy]\nkeep_last = 7\n[runs.gpt]\nkeep_best = 1\nmonitor = 'a'\nmode = 'max'\n", where="f"
    )
    assert settings.policy_for("gpt") == RetentionPolicy(keep_last=7, keep_best=1, monitor="a", mode="max")
    assert settings.policy_for("other") == RetentionPolicy(keep_last=7)


def test_a_run_never_takes_half_a_metric_from_the_general_policy() -> None:
    with pytest.raises(InvalidArgument, match="min or max"):
        settings_from_toml(b"[policy]\nmonitor='loss'\nmode='min'\n[runs.gpt]\nmonitor='acc'\n", where="f")


def test_a_run_keeps_its_metric_through_a_round_trip_when_the_general_policy_has_one() -> None:
    settings = Settings(policy=LOSS, runs={"gpt": RetentionPolicy(keep_last=2)})
    assert settings_from_toml(settings_to_toml(settings), where="f") == settings


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[policy]\nkeep_lsat = 3\n", "policy.keep_lsat"),
        ("[runs.gpt]\nkeep = 3\n", "runs.gpt.keep"),
        ("[retention]\n", "retention"),
        ("policy = 3\n", "not a table"),
        ("[runs]\ngpt = 3\n", "not a table"),
        ("[policy]\nkeep_last = 0\n", "keep nothing"),
        ("[policy]\nkeep_last = '3'\n", "number of checkpoints"),
        ("[policy]\nkeep_best = 1\n", "which metric"),
        ("[runs.Upper]\n", "not a run name"),
        ("[staging]\nmax_bytes = 3\n", "staging.max_bytes"),
        ("[staging]\nmax_staged_bytes = 0\n", "number of bytes"),
        ("[staging]\nmax_client_bytes = '5GB'\n", "number of bytes"),
        ("[writing]\nrate = 3\n", "writing.rate"),
        ("[writing]\nmax_write_rate = 999_999\n", "[writing] max_write_rate"),
        ("[writing]\nmax_write_rate = '5MB'\n", "[writing] max_write_rate"),
        ("[scrub]\nevery = 3600\n", "scrub.every"),
        ("[scrub]\nevery_s = 3599\n", "[scrub] every_s"),
        ("[scrub]\nevery_s = '7d'\n", "[scrub] every_s"),
        ("scrub = 0\n", "not a table"),
        ("keep_last = = 3", "not a TOML file"),
        ("\udcff", "not a TOML file"),
    ],
)
def test_what_the_file_gets_wrong_is_refused_by_name(tmp_path: Path, text: str, says: str) -> None:
    path = settings_path(tmp_path)
    path.parent.mkdir()
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(InvalidArgument) as caught:
        read_settings(tmp_path)
    assert says in str(caught.value)


def test_a_settings_file_that_is_a_folder_is_an_error_not_the_defaults(tmp_path: Path) -> None:
    settings_path(tmp_path).mkdir(parents=True)
    with pytest.raises(InvalidArgument, match="can't be read"):
        read_settings(tmp_path)
