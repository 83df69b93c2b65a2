"""The Client: what a training script holds. Three lines save and resume a run:

with ckptd.Client(root="checkpoints") as client:
    resumed = client.restore(state)
    for step in range(resumed.next_step if resumed else 1, total + 1):
        ...
        client.maybe_snapshot(step, state)
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Collection, Mapping, MutableMapping
from types import TracebackType
from typing import Any, Literal

from ckptd.disk.rootdir import Root
from ckptd.disk.series import Checkpoint, best, checkpoints, latest_valid
from ckptd.errors import ClientClosed
from ckptd.link.client_options import ClientOptions, DaemonChoice, OnBusy, OnError, Transport, check_bound
from ckptd.link.failures import Failures
from ckptd.link.leaving import leave_at_end
from ckptd.link.metrics import plain_metrics
from ckptd.link.recorder import Recorder
from ckptd.link.restoration import Restoration
from ckptd.link.resumed import Resumed
from ckptd.link.ticket import WAIT_TIMEOUT_S, Ticket
from ckptd.link.writers import make_writer
from ckptd.loop.cadence import Cadence
from ckptd.names import DEFAULT_RUN, check_run_name, check_step
from ckptd.snapshot.descriptor import Sharding

__all__ = ["Client", "Resumed"]


class Client:
    """Saves and restores the checkpoints of one run.

    Use it from one thread at a time (a lock makes another one wait) and close it, best with `with`. A forked
    child, such as a DataLoader worker, may hold one and can't use it. A script that ends without close()
    still waits for its last snapshots, and says on stderr what it couldn't save.

    Args:
        root: Folder of all runs; made when missing (with daemon="attach" nothing is made).
        run: Name of this run. One live client per run.
        daemon: "auto" (default) uses the root's daemon and starts one when there is none; "attach" insists on a
            running one; "off" saves in this process before snapshot() returns, and removes nothing.
        cadence: When maybe_snapshot() saves. None (default): every ten minutes, and after the first step of a
            run that has no checkpoint.
        slots: Snapshots under way at once, 1 or 2 (default); each takes the state's size in /dev/shm.
        on_busy: Without a free slot "wait" (default); "supersede": the oldest snapshot that isn't being written yet
            gives way, else wait; "skip": the same, else skip this one. Each that is left out is reported.
        overlap: True returns from snapshot() before parameters and optimizer state are copied; see snapshot().
        transport: "auto" (default) streams to the daemon where /dev/shm can't serve; "shm" refuses, "stream" always does.
        on_error: "warn" (default) says a failed snapshot as a CheckpointWarning at the next call; "raise" raises.
        sharding: How the tensors are divided into files; None (default) for Sharding().
        busy_timeout_s: Bound of the wait for a slot, and for an earlier client's snapshots (300).
        start_timeout_s: Bound for a daemon to start and answer (30).
        close_timeout_s: Bound of close(), and of the end of the script, for the last snapshots (120).
        max_unsaved_s: A failure becomes an error once nothing was committed for so long (3600).

    ckptd.link.client_options.ClientOptions says more of each.

    Raises:
        InvalidArgument: An argument that can't be right. Nothing was changed.
        BadRoot: The root can't be used.
        NoDaemon: None is there (daemon="attach"), or none can be started.
        NoSpace: None can be started, because the disk is full.
        RunTaken: The run has a live client.
        RootLocked: With daemon="off", a daemon or another client writes to this root.
        TimedOut: A daemon is there and doesn't answer within start_timeout_s.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        run: str = DEFAULT_RUN,
        *,
        daemon: DaemonChoice = "auto",
        cadence: Cadence | None = None,
        slots: int = 2,
        on_busy: OnBusy = "wait",
        overlap: bool = False,
        transport: Transport = "auto",
        on_error: OnError = "warn",
        sharding: Sharding | None = None,
        busy_timeout_s: float = 300.0,
        start_timeout_s: float = 30.0,
        close_timeout_s: float = 120.0,
        max_unsaved_s: float = 3600.0,
    ) -> None:
        self._closed, self._pid = True, os.getpid()
        self._options = options = ClientOptions(
            daemon=daemon, cadence=cadence, slots=slots, on_busy=on_busy, overlap=overlap,
            transport=transport, on_error=on_error,
            sharding=sharding or Sharding(), busy_timeout_s=busy_timeout_s, start_timeout_s=start_timeout_s,
            close_timeout_s=close_timeout_s, max_unsaved_s=max_unsaved_s,
        )  # fmt: skip
        self._run, self._client_id = check_run_name(run), uuid.uuid4().hex
        self._root = Root.for_reading(root) if daemon == "attach" else Root.open(root, create=True)
        self._failures = Failures(on_error, max_unsaved_s)
        who = (self._root, self._run, self._client_id)
        self._writer = make_writer(*who, options, self._failures)
        self._recorder = Recorder(*who, options=options, writer=self._writer, failures=self._failures)
        self._restoration = Restoration(
            *who, writer=self._writer, recorder=self._recorder, timeout_s=options.busy_timeout_s
        )
        self._writer.open()
        self._closed = False
        self._ending = leave_at_end(self, self._writer, self._failures, options.close_timeout_s)

    def __repr__(self) -> str:
        state = "closed" if self._closed else "open" if os.getpid() == self._pid else "the parent's"
        return f"Client({str(self._root.path)!r}, run={self._run!r}, {self._options.daemon!r}, {state})"

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close(may_raise=error is None)

    # --- saving ----------------------------------------------------------------------------------

    def reserve(self, state: Mapping[Any, Any]) -> None:
        """Have the memory for snapshots of `state` made and touched now; restore() and snapshot() do it too.

        Raises:
            SharedMemoryTooSmall: /dev/shm can't hold the slots. Nothing was made.
            OverBudget: They are more than the root's budget allows. Nothing was made.
            UnstorableState: The state can't be stored.
            NoDaemon, TimedOut: No daemon answers within start_timeout_s.
        """
        self._check_open()
        with self._writer.lock:
            self._recorder.reserve(state)

    def snapshot(
        self, step: int, state: Mapping[Any, Any], metrics: Mapping[str, Any] | None = None
    ) -> Ticket:
        """Take the state as it is now and have it saved; returns as soon as it is copied.

        From then on it survives the death of this process; where it is streamed, once its ticket has a sequence. The
        state may be changed at once.

        With overlap=True parameters and optimizer state are copied beside the next forward and backward pass; all
        else is copied before it returns. The next step of any torch optimizer waits for that copy, and so do
        restore(), load_state_dict() of those modules, the next snapshot(), wait() and close(). Until it has ended the
        snapshot dies with this process: its ticket says "copying". A loop that changes parameters in another way
        meanwhile (by hand, in a forward pass, to swap averaged weights in, by SAM's first step; that moves them to
        shared memory or captures a CUDA graph) calls ticket.wait("staged") before it does. Steps inside torch.compile
        or a CUDA graph can't be made to wait: once one was compiled or captured, snapshots are copied before they
        return, with a CheckpointWarning; what a graph from before this client replays isn't seen.

        Gradients that were accumulated since the last optimizer step are in it only when the state has a
        ckptd.Gradients; that they are left out is a CheckpointWarning, once per client.

        Args:
            step: Finished optimizer steps, 0 or more.
            state: Name → module, optimizer, scheduler, object with state_dict, tensor or plain data, nested
                up to 100 levels: a deque, namedtuple or registered dataclass counts as two, any kind of dict but
                dict and OrderedDict as three. The global random generators are stored by themselves.
            metrics: Name → number.

        Returns:
            A ticket. Its state is "skipped" when no slot came free in time, and becomes "superseded" when it gave way
            to a newer one (see on_busy); both are reported too.

        Raises:
            UnstorableState: Something in the state can't be stored; `where` is its key path. Nothing was
                taken.
            InvalidArgument: A step or metric that can't be right. Nothing was taken.
            SharedMemoryTooSmall: The state doesn't fit into shared memory. Nothing was taken.
            OverBudget: Its memory is more than the root's budget allows (ckptd start --max-client-bytes). Nothing
                was taken.
            CkptdError: What went wrong with an earlier snapshot, with on_error="raise".
            SaveFailed: Nothing was committed for max_unsaved_s. This snapshot was tried all the same.
        """
        self._check_open()
        step, plain = check_step(step), plain_metrics(metrics)
        with self._writer.lock:
            self._writer.look()
            self._failures.say()
            ticket = self._recorder.take(step, state, plain)
            self._failures.surface(time.monotonic())
            return ticket

    def maybe_snapshot(
        self, step: int, state: Mapping[Any, Any], metrics: Mapping[str, Any] | None = None
    ) -> Ticket | None:
        """snapshot() when the cadence says so, else None. Call it after every step: it costs microseconds.

        Arguments, result and errors are snapshot()'s. The last step of a run is seldom due: save it by snapshot().
        """
        self._check_open()
        step = check_step(step)
        with self._writer.lock:
            if self._recorder.is_due(step):
                return self.snapshot(step, state, metrics)
            self._writer.look()
            self._failures.surface(time.monotonic())
            return None

    # --- restoring -------------------------------------------------------------------------------

    def restore(
        self,
        state: MutableMapping[Any, Any],
        *,
        step: int | None = None,
        source: str | os.PathLike[str] | None = None,
        only: Collection[str] | None = None,
        strict: bool = True,
        verify_first: bool = False,
    ) -> Resumed | None:
        """Bring `state` to the newest whole checkpoint of the line, every byte checked while it is read.

        One that fails its checks is passed over, with a warning, for the one before it. When an earlier client left
        a newer snapshot in shared memory that isn't written yet, that one is restored, from there (`Resumed.staged`);
        where that can't be, it is waited for (at most busy_timeout_s). Later snapshots go on from what was restored.
        The memory for them is reserved here.

        Everything but the hashes of large files is checked before anything is written; those are checked while the bytes are
        read, straight into the live tensors where that can be. A wrong one leads to the checkpoint before, which
        overwrites everything. Live objects stay the objects they are, on their own
        devices, with their own `requires_grad`; whether a module is compiled or wrapped in DDP makes no
        difference. The gradients of what is restored are cleared, unless a ckptd.Gradients in the state restores
        them. Random generators are set last and never change device; a CUDA device whose state the
        checkpoint lacks keeps its own, and one this host lacks is skipped, both with a warning.

        A checkpoint that this client made, or has restored before (strictly, and whole), is a rollback:
        plain data takes the stored structure altogether, so that whatever training has made since is gone.

        Warnings are said before anything is written, or once all is done: where they are errors the state is untouched
        or wholly restored.

        Args:
            state: As for snapshot(). Restored in place.
            step: Restore the checkpoint of this step.
            source: Restore exactly this checkpoint: a folder, also of another run or by ckptd.save, or a file of
                format v1. One that isn't of this run is a warm start: values and step are taken over, and the
                run's seconds, its line and the cadence begin anew (its first step is saved if the cadence says so).
            only: Restore only these names; "rng" is one, and without it the generators stay as they are. What
                is left out is untouched, and named in `not_asked`. None means all.
            strict: False lets names be missing on either side, and tensors have another shape: they are left alone
                and reported by key path. Optimizers may have other parameter groups, or be of another class: how they
                differ is in `tolerated`, and so is what has another kind or dtype. What the live objects themselves
                refuse is refused all the same. Each checkpoint of the run is read whole before it touches the state.
            verify_first: True reads and checks the whole checkpoint before the state is touched, so that none that is
                damaged ever is in it. It takes longer, and memory for a second copy of the state meanwhile.

        Returns:
            What was restored, or None when the run has no checkpoint yet: a fresh start.

        Raises:
            RestoreFailed: There are checkpoints and every one fails its checks; or an object's own load_state_dict
                failed half-way. With state_touched=True a part of it is in the state, which is of no use then.
            StateMismatch: The checkpoint doesn't fit the state, which is untouched; `faults` lists everything.
            InvalidArgument: `only` names what neither side has. The state is untouched.
            NothingThere: No checkpoint of this step, or nothing at source.
            CorruptCheckpoint: The one at source fails its checks. The state is untouched; where it isn't, it is a
                RestoreFailed with state_touched=True.
            TimedOut: An earlier client's snapshot isn't written yet; restoring now would lose it.
            SharedMemoryTooSmall: The state was restored and can't be saved.
        """
        self._check_open()
        with self._writer.lock:
            self._writer.finish_copy()
            return self._restoration.run(
                state, step=step, source=source, only=only, strict=strict, verify_first=verify_first
            )

    # --- asking ----------------------------------------------------------------------------------

    def latest(self) -> Checkpoint | None:
        """The newest valid checkpoint on the line, None when there is none; see ckptd.latest_valid."""
        return latest_valid(self._root.path, self._run)

    def best(self, metric: str, mode: Literal["min", "max"]) -> Checkpoint | None:
        """The valid checkpoint whose `metric` is smallest or largest; None when none has it."""
        return best(self._root.path, self._run, metric, mode)

    def checkpoints(self) -> list[Checkpoint]:
        """All checkpoints of the run by commit order."""
        return checkpoints(self._root.path, self._run)

    def status(self) -> dict[str, Any]:
        """What `ckptd status --json` prints. Raises NoDaemon, TimedOut."""
        self._check_open()
        return self._writer.status()

    # --- waiting and leaving ---------------------------------------------------------------------

    def wait(self, timeout_s: float = WAIT_TIMEOUT_S) -> None:
        """Wait until every snapshot of this client is committed; reports those that failed.

        One that restore() took from shared memory (`Resumed.staged`) counts like one of its own, here and in close().

        Args:
            timeout_s: Bound in seconds (default 300).

        Raises:
            TimedOut: Not within the bound.
            CkptdError: What went wrong with one of them, with on_error="raise".
        """
        self._check_open()
        self._writer.wait_all(check_bound("timeout_s", timeout_s))
        self._failures.surface(time.monotonic())

    def drain(self, timeout_s: float = WAIT_TIMEOUT_S, *, verified: bool = False) -> int:
        """Wait until nothing of this run is on its way, earlier clients' snapshots included.

        Args:
            timeout_s: Bound in seconds (default 300).
            verified: Also wait until what was committed is verified.

        Returns:
            How many of them failed.

        Raises:
            TimedOut: Not within the bound.
            CkptdError: What went wrong with one of this client's own, with on_error="raise".
        """
        self._check_open()
        failed = self._writer.drain(check_bound("timeout_s", timeout_s), verified=verified)
        self._failures.surface(time.monotonic())
        return failed

    def close(self) -> None:
        """Wait for the last snapshots to be durable (at most close_timeout_s) and leave. May be called twice.

        What isn't durable in time is reported; it stays in shared memory and a daemon writes it. Where it is streamed,
        what the daemon hasn't received by then is lost.

        Raises:
            CkptdError: What went wrong with a snapshot, with on_error="raise". It is closed all the same.
        """
        self._close(may_raise=True)

    # --- inside ----------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if os.getpid() != self._pid:
            raise ClientClosed(
                "the client belongs to the parent of this forked process", where=f"run {self._run}",
                seen=f"pid {os.getpid()}", wanted=f"pid {self._pid}", todo="use it only where it was made",
            )  # fmt: skip
        if self._closed:
            raise ClientClosed("the client is closed", where=f"run {self._run}", todo="make a new one")

    def _close(self, *, may_raise: bool) -> None:
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        self._ending.detach()
        self._writer.close(self._options.close_timeout_s)
        self._recorder.close()
        self._failures.surface(time.monotonic(), may_raise=may_raise)
