from __future__ import annotations

import math
from pathlib import Path

import pytest

from ckptd.disk.rootdir import Root
from ckptd.errors import InvalidArgument
from ckptd_daemon.core.command import _settings
from ckptd_daemon.core.daemon_settings import DEFAULT_IDLE_EXIT_S, DaemonSettings
from ckptd_daemon.series.policy import RetentionPolicy
from ckptd_daemon.series.settings_file import read_settings


@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf])
@pytest.mark.parametrize("name", ["grace_s", "idle_exit_s"])
def test_a_time_that_cannot_be_is_refused(name: str, value: float) -> None:
    with pytest.raises(InvalidArgument, match=name):
        DaemonSettings(root=Path("x"), **{name: value})


def test_only_an_autostarted_daemon_leaves_when_idle_unless_it_is_asked_to() -> None:
    assert DaemonSettings(root=Path("x")).idles_for_s is None
    assert DaemonSettings(root=Path("x"), autostarted=True).idles_for_s == DEFAULT_IDLE_EXIT_S
    assert DaemonSettings(root=Path("x"), idle_exit_s=5).idles_for_s == 5


def test_the_flags_of_the_module_become_settings() -> None:
    args = ["--root", "x", "--autostarted", "--grace-s", "3", "--keep-best", "2", "--monitor", "val_loss:min"]
    settings = _settings(args)
    assert settings.policy == RetentionPolicy(keep_best=2, monitor="val_loss", mode="min")
    assert (settings.autostarted, settings.quiet, settings.grace_s) == (True, True, 3.0)
    assert _settings(["--root", "x"]).policy is None


@pytest.mark.parametrize(
    "flags",
    [
        [],
        ["--root"],
        ["--root", "x", "--keep-last", "two"],
        ["--root", "x", "--no-such"],
        ["--root", "x", "y"],
    ],
)
def test_other_flags_are_refused_and_named(flags: list[str]) -> None:
    with pytest.raises(InvalidArgument, match="not the daemon's flags") as refused:
        _settings(flags)
    assert " ".join(flags[2:]) in refused.value.seen


def test_a_policy_given_is_written_to_the_settings_of_all_runs_or_of_one(tmp_path: Path) -> None:
    root = Root.open(tmp_path, create=True)
    ours, theirs = RetentionPolicy(keep_last=3), RetentionPolicy(keep_last=9)
    DaemonSettings(root=tmp_path, policy=ours).into_file(root)
    DaemonSettings(root=tmp_path, policy=theirs, policy_run="gpt").into_file(root)
    kept = DaemonSettings(root=tmp_path).into_file(root)
    assert kept == read_settings(tmp_path)
    assert kept.policy_for("gpt") == theirs and kept.policy_for("other") == ours


def test_a_rate_given_is_written_to_the_settings_and_zero_takes_it_out(tmp_path: Path) -> None:
    root = Root.open(tmp_path, create=True)
    asked = _settings(["--root", str(tmp_path), "--max-write-rate", "50000000"])
    assert asked.into_file(root).max_write_rate == 50_000_000
    assert DaemonSettings(root=tmp_path).into_file(root) == read_settings(tmp_path)
    assert read_settings(tmp_path).max_write_rate == 50_000_000
    assert DaemonSettings(root=tmp_path, max_write_rate=0).into_file(root).max_write_rate is None
    assert read_settings(tmp_path).max_write_rate is None


def test_a_period_of_the_scrub_is_written_to_the_settings_and_zero_stays_there_as_never(
    tmp_path: Path,
) -> None:
    root = Root.open(tmp_path, create=True)
    assert DaemonSettings(root=tmp_path).into_file(root).scrub_every_s is None
    asked = _settings(["--root", str(tmp_path), "--scrub-every-s", "86400"])
    assert asked.into_file(root).scrub_every_s == 86_400
    assert DaemonSettings(root=tmp_path).into_file(root) == read_settings(tmp_path)
    DaemonSettings(root=tmp_path, scrub_every_s=0).into_file(root)
    assert read_settings(tmp_path).scrub_every_s == 0
    with pytest.raises(InvalidArgument, match="scrub_every_s"):
        DaemonSettings(root=tmp_path, scrub_every_s=60)


@pytest.mark.parametrize("rate", [1, -1])
def test_a_rate_at_which_nothing_would_ever_be_done_is_refused(rate: int) -> None:
    with pytest.raises(InvalidArgument, match="max_write_rate"):
        DaemonSettings(root=Path("x"), max_write_rate=rate)
