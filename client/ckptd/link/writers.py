"""The two ways to save, behind the same methods: through a daemon, or in this process."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from ckptd.disk.rootdir import Root
from ckptd.link.client_options import ClientOptions
from ckptd.link.daemon_writer import DaemonWriter
from ckptd.link.failures import Failures

if TYPE_CHECKING:
    from ckptd.link.inline_writer import InlineWriter

__all__ = ["Writer", "make_writer"]

Writer: TypeAlias = "DaemonWriter | InlineWriter"


def make_writer(root: Root, run: str, client_id: str, options: ClientOptions, failures: Failures) -> Writer:
    """The writer that options.daemon asks for, not opened yet."""
    if options.daemon == "off":
        from ckptd.link.inline_writer import InlineWriter  # beside a daemon nothing here writes a checkpoint

        return InlineWriter(root, run, client_id, failures=failures)
    return DaemonWriter(
        root, run, client_id, mode=options.daemon, slots=options.slots,
        failures=failures, start_timeout_s=options.start_timeout_s, gives_way=options.on_busy != "wait",
        transport=options.transport,
    )  # fmt: skip
