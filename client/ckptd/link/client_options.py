"""The settings of a client, checked before anything is touched."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import Final, Literal

from ckptd.errors import InvalidArgument
from ckptd.limits import MAX_SLOTS_PER_CLIENT
from ckptd.loop.cadence import Cadence
from ckptd.snapshot.descriptor import Sharding

__all__ = ["ClientOptions", "DaemonChoice", "OnBusy", "OnError", "Transport"]

DaemonChoice = Literal["auto", "attach", "off"]
OnBusy = Literal["wait", "skip", "supersede"]
OnError = Literal["warn", "raise"]
Transport = Literal["auto", "shm", "stream"]

#: maybe_snapshot() without a cadence: every ten minutes, and after the first step of a fresh run.
DEFAULT_CADENCE: Final = Cadence(every_s=600.0)

_CHOICES: Final = {
    "daemon": ("auto", "attach", "off"),
    "on_busy": ("wait", "skip", "supersede"),
    "on_error": ("warn", "raise"),
    "transport": ("auto", "shm", "stream"),
}


@dataclass(frozen=True, kw_only=True)
class ClientOptions:
    """How a Client saves.

    Attributes:
        daemon: "auto" uses the root's daemon and starts one when there is none; "attach" insists on a running
            one; "off" saves in this process, under the root's lock, before snapshot() returns, and without
            retention.
        cadence: When maybe_snapshot() saves. None: every ten minutes, and after the first step of a run that
            has no checkpoint.
        slots: Snapshots that can be under way at once, 1 or 2. Each takes the size of the state in /dev/shm.
        on_busy: What snapshot() does while no slot is free. "wait": for one, at most busy_timeout_s.
            "supersede": this client's oldest snapshot that isn't being written yet gives its slot up; when there
            is none (with slots=1 mostly) it waits as "wait" does, no longer than for the write under way.
            "skip": the same, but it never waits for the disk: when none can give way this snapshot is skipped.
            So with two slots the newest state is always the one that is kept, the last before close() too. With
            slots=1 and "skip" it needs a client.wait() before it. What is skipped or superseded is reported: by
            ticket, a CheckpointWarning, `ckptd status` and the daemon's log. The older one is given up before the new
            one is copied: who is killed in between has what was being written.
        overlap: Whether snapshot() returns before the parameters and the optimizers' state are copied: that is done
            beside the next forward and backward pass, and the next step of any optimizer waits for it. Not with
            daemon="off", which writes before snapshot() returns. See Client.snapshot for what it asks of the loop.
        on_error: "warn" reports a failed snapshot as a CheckpointWarning at the next call, and raises only
            once nothing was committed for max_unsaved_s; "raise" raises it at the next call.
        transport: How a snapshot gets to the daemon. "auto": by slots in shared memory and, where those can't be had
            (a small /dev/shm, another mount namespace), staged in this process's memory and streamed over ZeroMQ
            beside the training; which and why is said once, in the log. "shm" refuses instead, "stream" streams
            from the start. What is streamed is lost with this process until the daemon has all of it, which shows
            by its ticket's sequence; the death of the daemon loses nothing, it is streamed to the next one. Takes
            the state's size for each of `slots` here and again in the daemon.
        sharding: How the tensors are divided into files.
        busy_timeout_s: Bound of snapshot()'s wait for a slot, and of restore()'s wait for snapshots of an
            earlier client. After a wait in which the daemon said nothing at all, the next snapshots wait at
            most one second until it is heard again.
        start_timeout_s: Bound for a daemon to start and answer; also how long snapshot() and close() look for
            one that is gone.
        close_timeout_s: Bound of close(), and of the wait at the end of the script, for the last snapshots to
            be durable. What isn't by then is reported; it stays in shared memory, and a daemon writes it.
        max_unsaved_s: Failures are warnings until nothing was committed for so long.
    """

    daemon: DaemonChoice = "auto"
    cadence: Cadence | None = None
    slots: int = 2
    on_busy: OnBusy = "wait"
    overlap: bool = False
    on_error: OnError = "warn"
    transport: Transport = "auto"
    sharding: Sharding = field(default_factory=Sharding)
    busy_timeout_s: float = 300.0
    start_timeout_s: float = 30.0
    close_timeout_s: float = 120.0
    max_unsaved_s: float = 3600.0

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise _wrong(name, getattr(self, name), " or ".join(map(repr, choices)))
        if isinstance(self.slots, bool) or self.slots not in range(1, MAX_SLOTS_PER_CLIENT + 1):
            raise _wrong("slots", self.slots, f"1 to {MAX_SLOTS_PER_CLIENT}")
        if not isinstance(self.overlap, bool):
            raise _wrong("overlap", self.overlap, "True or False")
        if self.overlap and self.daemon == "off":
            raise _wrong(
                "overlap", True, 'a daemon: with daemon="off" each snapshot is written before it returns'
            )
        if self.transport == "stream" and self.daemon == "off":
            raise _wrong("transport", "stream", 'a daemon: with daemon="off" nothing is sent')
        if not isinstance(self.sharding, Sharding):
            raise _wrong("sharding", self.sharding, "a ckptd.Sharding")
        if self.cadence is not None and not isinstance(self.cadence, Cadence):
            raise _wrong("cadence", self.cadence, "a ckptd.Cadence or None")
        for one in fields(self):
            if one.name.endswith("_s"):
                check_bound(one.name, getattr(self, one.name))


def check_bound(name: str, value: object) -> float:
    """Return value (seconds, 0 or more, finite) as a float, or raise InvalidArgument."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise _wrong(name, value, "a number of seconds")
    if not math.isfinite(value) or value < 0:
        raise _wrong(name, value, "a finite number of seconds, 0 or more: nothing here waits without a bound")
    return float(value)


def _wrong(name: str, seen: object, wanted: str) -> InvalidArgument:
    return InvalidArgument("not a setting of a client", where=name, seen=repr(seen)[:200], wanted=wanted)
