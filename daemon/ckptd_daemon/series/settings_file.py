"""`.ckptd/ckptd.toml`: the policy, for all runs of the root and per run. It lives at the root, not in flags.

    [policy]                 # every run that has no table of its own
    keep_last = 5

    [runs.gpt]               # this run; what isn't given comes from [policy]
    keep_best = 1
    monitor = "val_loss"     # "" for none
    mode = "min"

    [staging]                # all runs; without it, what memory has
    max_staged_bytes = 40_000_000_000
    max_client_bytes = 20_000_000_000

    [writing]                # all runs; without it, as fast as it goes
    max_write_rate = 50_000_000   # bytes per second

    [scrub]                  # all runs; without it, once a week
    every_s = 604_800        # within so many seconds every checkpoint is read again; 0 for never

The first start with flags writes it; a later start without flags goes on with what it says.
"""

from __future__ import annotations

import os
import stat
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Final

import tomli_w

from ckptd.disk import durable
from ckptd.disk.write_rate import check_rate
from ckptd.errors import InvalidArgument
from ckptd.names import SERVICE_DIR, check_run_name
from ckptd_daemon.series.budget import Budget
from ckptd_daemon.series.policy import RetentionPolicy
from ckptd_daemon.verify.rota import check_every

SETTINGS_FILE: Final = "ckptd.toml"
MAX_SETTINGS_BYTES: Final = 1024 * 1024
_POLICY_KEYS: Final = tuple(f.name for f in fields(RetentionPolicy))
_BUDGET_KEYS: Final = tuple(f.name for f in fields(Budget))
_RATE_KEY: Final = "max_write_rate"
_SCRUB_KEY: Final = "every_s"
_METRIC_KEYS: Final = ("monitor", "mode")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What the settings file says.

    Attributes:
        policy: For every run without a table of its own.
        runs: Per run, complete: what its table leaves out is already filled in from `policy`.
        budget: Bounds on staged bytes.
        max_write_rate: Bound on writing checkpoints in bytes per second; None for none.
        scrub_every_s: Seconds within which every checkpoint is read again, 0 for never; None for the default
            (`rota.check_every`).
    """

    policy: RetentionPolicy = field(default_factory=RetentionPolicy)
    runs: Mapping[str, RetentionPolicy] = field(default_factory=dict)
    budget: Budget = field(default_factory=Budget)
    max_write_rate: int | None = None
    scrub_every_s: int | None = None

    def policy_for(self, run: str) -> RetentionPolicy:
        """The policy of one run."""
        return self.runs.get(run, self.policy)


def settings_path(root: Path) -> Path:
    """Where the settings of the root at this path are."""
    return root / SERVICE_DIR / SETTINGS_FILE


def read_settings(root: Path) -> Settings:
    """The settings of the root at this path; the defaults when there is no file.

    Raises:
        InvalidArgument: The file can't be read, isn't TOML, has an unknown key or an impossible policy. A
            daemon must not start on it: it would remove checkpoints by a policy nobody wrote.
    """
    path = settings_path(root)
    try:
        with open(path, "rb", opener=_at_once) as file:
            data = (
                file.read(MAX_SETTINGS_BYTES + 1) if stat.S_ISREG(os.fstat(file.fileno()).st_mode) else None
            )
    except FileNotFoundError:
        return Settings()
    except OSError as error:
        raise InvalidArgument("the settings can't be read", where=str(path), seen=str(error)) from error
    if data is None:
        raise InvalidArgument(
            "not a regular file", where=str(path), todo="put the settings there, or remove it"
        )
    return settings_from_toml(data, where=str(path))


def _at_once(path: str, flags: int) -> int:
    """A descriptor; of a pipe too, for whose writer nobody would wait in vain."""
    return os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)


def settings_from_toml(data: bytes, *, where: str) -> Settings:
    """Settings out of the file's bytes; see read_settings."""
    if len(data) > MAX_SETTINGS_BYTES:
        raise InvalidArgument(
            "settings file too long", where=where, wanted=f"at most {MAX_SETTINGS_BYTES} bytes"
        )
    try:
        parsed = tomllib.loads(data.decode("utf-8"))
    except (ValueError, RecursionError) as error:  # also what isn't UTF-8, or an int of thousands of digits
        raise InvalidArgument(
            "not a TOML file", where=where, seen=str(error)[:300], todo="mend it or remove it"
        ) from error
    _refuse_unknown(parsed, ("policy", "runs", "staging", "writing", "scrub"), where, "")
    policy = _policy(_table(parsed, "policy", where, ""), {}, where, "policy")
    tables = _table(parsed, "runs", where, "")
    runs = {}
    for run in tables:
        check_run_name(run)
        runs[run] = _policy(_table(tables, run, where, "runs."), asdict(policy), where, f"runs.{run}")
    return Settings(
        policy=policy, runs=runs, budget=_budget(_table(parsed, "staging", where, ""), where),
        max_write_rate=_write_rate(_table(parsed, "writing", where, ""), where),
        scrub_every_s=_scrub_every(_table(parsed, "scrub", where, ""), where),
    )  # fmt: skip


def settings_to_toml(settings: Settings) -> bytes:
    """The file's bytes; what settings_from_toml reads back equal."""
    document: dict[str, Any] = {"policy": _plain(settings.policy)}
    if settings.runs:
        document["runs"] = {run: _plain(policy) for run, policy in sorted(settings.runs.items())}
    staging = {key: value for key, value in asdict(settings.budget).items() if value is not None}
    if staging:
        document["staging"] = staging
    if settings.max_write_rate is not None:
        document["writing"] = {_RATE_KEY: settings.max_write_rate}
    if settings.scrub_every_s is not None:
        document["scrub"] = {_SCRUB_KEY: settings.scrub_every_s}
    return tomli_w.dumps(document).encode("utf-8")


def write_settings(root: Path, settings: Settings) -> None:
    """Write the settings file of the root at this path, durably, all or nothing.

    The caller holds the root lock.

    Raises:
        OSError: Disk full, no permission. The old file stays.
    """
    durable.replace_file(settings_path(root), [settings_to_toml(settings)])


def _plain(policy: RetentionPolicy) -> dict[str, Any]:
    return {key: "" if value is None else value for key, value in asdict(policy).items()}


def _policy(table: dict[str, Any], base: dict[str, Any], where: str, name: str) -> RetentionPolicy:
    _refuse_unknown(table, _POLICY_KEYS, where, f"{name}.")
    values = base | table
    if any(key in table for key in _METRIC_KEYS):  # taken over whole: never one's name with the other's mode
        values |= {key: table.get(key) or None for key in _METRIC_KEYS}
    try:
        return RetentionPolicy(**values)
    except InvalidArgument as error:
        raise _in_file(error, where, name) from error


def _budget(table: dict[str, Any], where: str) -> Budget:
    _refuse_unknown(table, _BUDGET_KEYS, where, "staging.")
    try:
        return Budget(**table)
    except InvalidArgument as error:
        raise _in_file(error, where, "staging") from error


def _write_rate(table: dict[str, Any], where: str) -> int | None:
    _refuse_unknown(table, (_RATE_KEY,), where, "writing.")
    try:
        return check_rate(table.get(_RATE_KEY), _RATE_KEY)
    except InvalidArgument as error:
        raise _in_file(error, where, "writing") from error


def _scrub_every(table: dict[str, Any], where: str) -> int | None:
    _refuse_unknown(table, (_SCRUB_KEY,), where, "scrub.")
    try:
        return check_every(table[_SCRUB_KEY], _SCRUB_KEY) if _SCRUB_KEY in table else None
    except InvalidArgument as error:
        raise _in_file(error, where, "scrub") from error


def _in_file(error: InvalidArgument, where: str, name: str) -> InvalidArgument:
    where = f"{where}: [{name}] {error.where}"
    return InvalidArgument(
        error.what, where=where, seen=error.seen, wanted=error.wanted, todo="mend the file"
    )


def _table(parent: Mapping[str, Any], key: str, where: str, prefix: str) -> dict[str, Any]:
    value = parent.get(key, {})
    if not isinstance(value, dict):
        raise InvalidArgument(
            "not a table", where=f"{where}: {prefix}{key}", seen=repr(value)[:100], wanted=f"[{prefix}{key}]"
        )
    return value


def _refuse_unknown(table: Mapping[str, Any], known: tuple[str, ...], where: str, prefix: str) -> None:
    for key in table:
        if key not in known:
            raise InvalidArgument(
                "unknown key",
                where=where,
                seen=f"{prefix}{key}",
                wanted=", ".join(known),
                todo="remove it or correct its spelling",
            )
