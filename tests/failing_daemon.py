"""A real daemon and its verifier whose calls fail when a test orders it, and a real client beside them."""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import torch

import ckptd
from ckptd.errors import CkptdError, NoDaemon
from ckptd.names import parse_step_folder, parse_work_folder
from ckptd_daemon.series.policy import RetentionPolicy
from ckptd_places import daemon_of, end_daemon
from fake_daemon import wait_until
from kept_promises import says_too_little
from nth_call import Orders, environment, failing, orders_of
from paths_below import paths_below

PATIENCE_S: Final = 60.0
_ENDED: Final = ("verified", "corrupt", "failed", "superseded", "skipped", "unknown")
_SIZE: Final = 3000


def state_of(step: int) -> dict[str, Any]:
    return {"weights": torch.full((_SIZE,), float(step)), "counter": step}


class Trainer:
    """One trainer that goes on saving whatever fails, and what it was told.

    Args:
        root: The root; its daemons are started by the client, and obey the orders.
        control: A folder for the orders.

    Attributes:
        acked: Step → its checkpoint.
        unknown: Steps of which nothing is known.
        orders: Of the "daemon", the "verifier" and this "client".
    """

    def __init__(self, root: Path, control: Path) -> None:
        self.root, self.step = root, 0
        self.acked, self.unknown = dict[int, Path](), set[int]()
        self._below = (root, Path(os.environ["CKPTD_SHM_DIR"]), Path(os.environ["CKPTD_RUNTIME_DIR"]))
        self.orders = {who: orders_of(control, who) for who in ("daemon", "verifier")} | {
            "client": Orders.here()
        }
        os.environ |= environment(control, *self._below)
        self.client: ckptd.Client | None = None
        self._last: ckptd.Ticket | None = None
        self._attach([], well=True)

    def close(self) -> None:
        self._leave()
        if (record := daemon_of(self.root)) is not None:
            os.kill(record.pid, signal.SIGTERM)
            wait_until(lambda: not record.alive())
        end_daemon(self.root)

    def round(
        self, when: str, who: str, kind: str, number: int, how: str, *, lasting: bool = False
    ) -> tuple[int, list[str]]:
        """A snapshot while a call of `who` fails, and one more: how many failed, and what is wrong.

        when: "serving"; "attaching", by a new client; "starting", by a new daemon, which has a snapshot to adopt.
        """
        orders, wrong, pending = self.orders[who], list[str](), None
        if when == "attaching":
            self._leave()
        with failing(self.orders["client"], *self._below):
            if when == "starting":
                pending = self._kill_daemon()
            orders.fail(kind, number, how, lasting=lasting)
            self._attach(wrong, well=False)
            self._save(
                wrong, well=False, pending=pending, patience_s=2.0 if when == "starting" else PATIENCE_S
            )
            if (who, kind) == ("daemon", "unlink"):
                wait_until(lambda: orders.met or self._retention_is_through(), PATIENCE_S)
            orders.works()
        met = orders.met
        self._attach(wrong, well=True)
        self._save(wrong, well=True, pending=pending)
        return met, [*wrong, *self._looked()]

    def between(self, begin: Callable[[], None], end: Callable[[], None]) -> list[str]:
        """A snapshot while something else makes calls fail, and one more after that: what is wrong."""
        wrong = list[str]()
        begin()
        try:
            self._save(wrong, well=False)
        finally:
            end()
        self._save(wrong, well=True)
        return [*wrong, *self._looked()]

    def _kill_daemon(self) -> ckptd.Ticket | None:
        """It is killed with a snapshot that was just sealed: the next one adopts it, or has it on disk."""
        if self.client is None:
            return None
        self.step += 1
        ticket = self.client.snapshot(self.step, state_of(self.step))
        end_daemon(self.root)
        return ticket

    def _leave(self) -> None:
        if self.client is not None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", ckptd.CheckpointWarning)
                self.client.close()
            self.client = None

    def _attach(self, wrong: list[str], *, well: bool) -> None:
        if self.client is not None:
            return
        try:
            self.client = ckptd.Client(self.root, daemon="auto", start_timeout_s=PATIENCE_S if well else 3.0)
            self.client.reserve(state_of(0))
        except CkptdError as error:
            wrong += says_too_little(error)
            wrong += [f"no client: {error}"] if well else []
            if well:
                raise

    def _save(
        self,
        wrong: list[str],
        *,
        well: bool,
        pending: ckptd.Ticket | None = None,
        patience_s: float = PATIENCE_S,
    ) -> None:
        if self.client is None:
            return
        self.step += 1
        tickets = [] if pending is None else [pending]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ckptd.CheckpointWarning)
            try:
                tickets.append(self.client.snapshot(self.step, state_of(self.step)))
                while well and not tickets[-1].committed:  # another start is tried after half a minute
                    with suppress(NoDaemon):
                        tickets[-1].wait(timeout_s=patience_s)
                tickets[-1].wait("verified" if well else "committed", timeout_s=patience_s)
            except CkptdError as error:
                wrong += says_too_little(error)
                wrong += [f"the next save failed: {error!r} {error}"] if well else []
            with suppress(CkptdError):
                self.client.wait(patience_s)
        self._last = tickets[-1] if tickets else None
        for ticket in tickets:
            if ticket.committed and ticket.path is not None:
                self.acked[ticket.step] = ticket.path
            else:
                self.unknown.add(ticket.step)

    def _looked(self) -> Iterator[str]:
        """What breaks a promise now."""
        for step in sorted(self.acked)[-1:]:
            path = self.acked[step]
            try:
                ckptd.verify(path)
                if not torch.equal(ckptd.load(path)["weights"], state_of(step)["weights"]):
                    yield f"step {step} was acknowledged and holds another state"
            except CkptdError as error:
                yield f"step {step} was acknowledged: {error}"
        found = ckptd.latest_valid(self.root)
        newest = max(self.acked, default=0)
        if (found.step if found else 0) != newest:
            yield f"latest is {found and found.step}, acknowledged was {newest}"

    def _retention_is_through(self) -> bool:
        """Whether the daemon has no more files to remove for the last snapshot: it does that once it is verified."""
        if self._last is None or self._last.state not in _ENDED:
            return self._last is None
        names = [path.name for path in self.root.glob("*/step-*")]
        return len(names) <= RetentionPolicy().keep_last and not self.left_over()

    def left_over(self) -> list[str]:
        return [str(path) for path in paths_below(self.root) if parse_work_folder(path.name) is not None]

    def kept(self) -> list[str]:
        return sorted(p.name for p in (self.root / "default").iterdir() if parse_step_folder(p.name))


@contextmanager
def trainer_of(root: Path, control: Path) -> Iterator[Trainer]:
    """With a daemon of its own; both end with the context."""
    control.mkdir(exist_ok=True)
    before = dict(os.environ)
    trainer = Trainer(root, control)
    try:
        yield trainer
        assert daemon_of(root) is not None
    finally:
        trainer.close()
        os.environ.clear()
        os.environ |= before
