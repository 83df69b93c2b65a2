"""How one daemon is run: what its command line gives, and what of that goes into the root's settings."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ckptd.disk.rootdir import Root
from ckptd.disk.write_rate import check_rate
from ckptd.errors import InvalidArgument
from ckptd.names import check_run_name
from ckptd_daemon.core.loopback import check_listen
from ckptd_daemon.series.policy import RetentionPolicy
from ckptd_daemon.series.settings_file import Settings, read_settings, write_settings
from ckptd_daemon.verify.rota import check_every

DEFAULT_GRACE_S: Final = 30.0
DEFAULT_IDLE_EXIT_S: Final = 60.0


@dataclass(frozen=True, kw_only=True)
class DaemonSettings:
    """How to run one daemon.

    Attributes:
        root: The root; made when it is missing.
        autostarted: A client started it, nobody watches it: print nothing, leave when idle.
        quiet: Print nothing. Default: a line on stdout per snapshot, unless autostarted.
        grace_s: How long attached clients are served after SIGTERM, SIGINT or SIGHUP. Default 30 s.
        idle_exit_s: Leave after so many seconds without clients and without work. None (default): after 60 s
            when autostarted, else never.
        policy: A retention policy to write into the root's settings; None (default) leaves them as they are.
        policy_run: The run the policy is for; None (default) for every run without one of its own.
        budget: Fields of series.budget.Budget to write into the root's settings. Default: none.
        max_write_rate: Bytes per second to write at most, 0 for no bound, to write into the root's settings. None
            (default) leaves what they say.
        scrub_every_s: Seconds within which every checkpoint is read again, 0 for never, to write into the root's
            settings. None (default) leaves what they say.
        log_path: None (default) for ROOT/.ckptd/daemon.log.
        listen: Address of this machine's loopback to serve clients at too, "tcp://127.0.0.1:0" for any free port;
            None (default) for none. Only who can read daemon.json gets in.
    """

    root: Path
    autostarted: bool = False
    quiet: bool = False
    grace_s: float = DEFAULT_GRACE_S
    idle_exit_s: float | None = None
    policy: RetentionPolicy | None = None
    policy_run: str | None = None
    budget: Mapping[str, int | None] = dataclasses.field(default_factory=dict)
    max_write_rate: int | None = None
    scrub_every_s: int | None = None
    log_path: Path | None = None
    listen: str | None = None

    def __post_init__(self) -> None:
        for name, value in (("grace_s", self.grace_s), ("idle_exit_s", self.idle_exit_s)):
            if value is not None and not (math.isfinite(value) and value >= 0):
                raise InvalidArgument("not a time", where=name, seen=repr(value), wanted="seconds, 0 or more")
        check_rate(self.max_write_rate, "max_write_rate")
        check_every(self.scrub_every_s, "scrub_every_s")
        if self.listen is not None:
            check_listen(self.listen)
        if self.policy_run is not None:
            check_run_name(self.policy_run)

    @property
    def idles_for_s(self) -> float | None:
        """Seconds of idleness after which to leave; None for never."""
        if self.idle_exit_s is None and self.autostarted:
            return DEFAULT_IDLE_EXIT_S
        return self.idle_exit_s

    def into_file(self, root: Root) -> Settings:
        """Write what was given into the root's settings; returns them as they are now. The caller holds the root's lock.

        Raises:
            InvalidArgument: The settings file is wrong. Nothing was changed.
            OSError: It can't be written; it is as it was.
        """
        policies = read_settings(root.path)
        given = (self.policy, self.max_write_rate, self.scrub_every_s)
        if not self.budget and given == (None, None, None):
            return policies
        policies = dataclasses.replace(policies, budget=dataclasses.replace(policies.budget, **self.budget))
        if self.max_write_rate is not None:
            policies = dataclasses.replace(policies, max_write_rate=self.max_write_rate or None)
        if self.scrub_every_s is not None:
            policies = dataclasses.replace(policies, scrub_every_s=self.scrub_every_s)
        if self.policy is not None and self.policy_run is None:
            policies = dataclasses.replace(policies, policy=self.policy)
        elif self.policy is not None and self.policy_run is not None:
            policies = dataclasses.replace(policies, runs={**policies.runs, self.policy_run: self.policy})
        write_settings(root.path, policies)
        return policies
