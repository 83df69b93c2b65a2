"""Trainers of a history: one process has torch loaded and forks the others, each of which does random things and logs them.

Run as `history_trainers.py LOG_FOLDER`; a line of JSON on stdin is a trainer to begin, its pid is the answer. The
identity of a snapshot is a number that nothing else has: in every element of its tensors, in its metric, in the log.
"""

from __future__ import annotations

import importlib
import json
import os
import pkgutil
import random
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch

import ckptd
from ckptd.errors import (
    CheckpointGone,
    ClientClosed,
    CorruptCheckpoint,
    NoDaemon,
    NoSpace,
    NothingThere,
    OutcomeUnknown,
    ReadFailed,
    RestoreFailed,
    RunTaken,
    SaveFailed,
    TimedOut,
)

_EXPECTED: Final = (
    SaveFailed,
    NoSpace,
    TimedOut,
    OutcomeUnknown,
    ReadFailed,
    CorruptCheckpoint,
    CheckpointGone,
)
_ELEMENTS: Final = 5000


class Log:
    """Lines of JSON, whole ones even when the process is killed."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def write(self, op: str, run: str, call: float, **fields: Any) -> None:
        os.write(self._fd, (json.dumps({"op": op, "run": run, "call": call, **fields}) + "\n").encode())


class Trainer(threading.Thread):
    """One client after the other of one run, until it is told to stop. What it does, its seed says, act by act."""

    def __init__(self, root: str, run: str, first: int, seed: str, log: Log, stop: Path) -> None:
        super().__init__()
        self._root, self._run, self._log, self._ends = root, run, log, stop
        self._chance, self._seed, self._acts = random.Random(), seed, 0
        self._next = first
        self._state: dict[str, Any] = {"model": _tensors(0), "count": 0}
        self._after: int | None = None
        self._pending: dict[int, tuple[ckptd.Ticket, str]] = {}
        self.died = ""

    def run(self) -> None:
        try:
            while not self._ends.exists() and self._live():
                pass
        except BaseException:
            self.died = traceback.format_exc()

    def _live(self) -> bool:
        """One client's life; False when there is nothing valid left to go on from."""
        try:
            with self._client() as client:
                if not self._restore(client):
                    return False
                self._train(client)
                client.wait(60.0)
                self._listen()
        except (RunTaken, NoDaemon):
            time.sleep(0.05)
        except _EXPECTED:  # the tickets say which snapshots it was
            self._listen()
        return True

    def _act(self) -> None:
        """The next act is the same whatever chance had a say in before: how often it is asked, the machine decides too."""
        self._acts += 1
        self._chance.seed(f"{self._seed} {self._acts}")

    def _client(self) -> ckptd.Client:
        self._act()
        pick = self._chance.choice
        self._way = pick(("slot", "slot", "slot", "stream"))
        self._overlap = pick((False, False, True))
        self._on_busy = pick(("wait", "supersede", "skip"))
        return ckptd.Client(
            self._root, run=self._run, slots=pick((1, 2)), on_busy=self._on_busy,
            transport="stream" if self._way == "stream" else "auto", overlap=self._overlap,
            cadence=ckptd.Cadence(every_steps=pick((1, 2, 3))), sharding=ckptd.Sharding(shards=2) if pick((0, 1)) else None,
            busy_timeout_s=20.0, start_timeout_s=60.0, close_timeout_s=60.0,
        )  # fmt: skip

    def _train(self, client: ckptd.Client) -> None:
        for _ in range(self._chance.randrange(5, 60)):
            if self._ends.exists():
                return
            self._act()
            match self._chance.randrange(40):
                case 0:
                    self._restore(client)
                case 1:
                    self._rewind(client)
                case 2:
                    client.drain(60.0)
                case 3 | 4 | 5:
                    self._snapshot(client, maybe=True)
                case 6 | 7:
                    time.sleep(self._chance.random() * 0.05)
                case 8 | 9 | 10:
                    self._wait()
                case _:
                    self._snapshot(client)
            self._listen()

    def _snapshot(self, client: ckptd.Client, *, maybe: bool = False) -> None:
        identity, self._next = self._next, self._next + 1
        self._state["count"] += 1
        for tensor in self._state["model"].values():
            tensor.fill_(identity)
        asked = {
            "identity": identity, "step": self._state["count"], "after": self._after,
            "gives_way": self._on_busy != "wait",
        }  # fmt: skip
        call = time.monotonic()
        self._log.write("snapshot", self._run, call, **asked)
        save = client.maybe_snapshot if maybe else client.snapshot
        ticket = save(self._state["count"], self._state, metrics={"identity": identity})
        if ticket is None:
            self._log.write(
                "told",
                self._run,
                call,
                ret=time.monotonic(),
                identity=identity,
                state="skipped",
                sequence=None,
            )
            return
        if self._overlap:  # the next thing that it does changes the tensors by hand
            ticket.wait("staged", timeout_s=60.0)
        state = ticket.state
        self._log.write(
            "snapshot", self._run, call, ret=time.monotonic(), number=ticket.snapshot, state=state, way=self._way, **asked
        )  # fmt: skip
        self._pending[identity] = (ticket, state)
        if state != "skipped":
            self._after = identity

    def _wait(self) -> None:
        if self._pending:
            ticket, _ = self._chance.choice(list(self._pending.values()))
            try:
                ticket.wait(self._chance.choice(("committed", "verified")), timeout_s=30.0)
            except (*_EXPECTED, ClientClosed):
                return  # what became of it is asked of the ticket, also of an earlier client's

    def _listen(self) -> None:
        """Log what is known of each snapshot now, if that is something new."""
        for identity, (ticket, before) in list(self._pending.items()):
            call = time.monotonic()
            state = ticket.state
            if state != before:
                self._log.write(
                    "told", self._run, call, ret=time.monotonic(), identity=identity, state=state, sequence=ticket.sequence
                )  # fmt: skip
                self._pending[identity] = (ticket, state)

    def _rewind(self, client: ckptd.Client) -> None:
        older = client.checkpoints()
        if older:
            self._restore(client, step=self._chance.choice(older).step)

    def _restore(self, client: ckptd.Client, *, step: int | None = None) -> bool:
        """Bring the state back; False when there is nothing valid left to go on from."""
        call = time.monotonic()
        fields: dict[str, Any] = {
            "wanted": step,
            "answer": None,
            "sequence": None,
            "staged": False,
            "error": "",
        }
        good = True
        try:
            resumed = client.restore(self._state, step=step)
        except (RestoreFailed, NothingThere, *_EXPECTED) as error:
            fields["error"] = f"{type(error).__name__}: {error}"
            good = step is not None or not isinstance(error, RestoreFailed)
        else:
            seen = sorted({value for t in self._state["model"].values() for value in t.unique().tolist()})
            if resumed is None:
                self._after, self._state["count"] = None, 0
            else:
                self._after = int(seen[0])
                fields |= {"answer": self._after, "sequence": resumed.sequence, "staged": resumed.staged}
                fields |= {"torn": str(seen)} if len(seen) > 1 or self._state["count"] != resumed.step else {}
        self._log.write("restore", self._run, call, ret=time.monotonic(), **fields)
        return good


def _tensors(value: int) -> dict[str, torch.Tensor]:
    return {name: torch.full((_ELEMENTS,), value, dtype=torch.int64) for name in ("a", "b", "c")}


@contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _be_trainers(asked: dict[str, Any], logs: Path) -> None:
    """This forked process: one thread for each run."""
    torch.set_num_threads(1)
    with _quiet():
        threads = [
            Trainer(asked["root"], run, asked["first"] + at * 10**6, f"{asked['seed']} {run}",
                    Log(logs / f"trainer-{os.getpid()}-{run}"), Path(asked["stop"]))
            for at, run in enumerate(asked["runs"])
        ]  # fmt: skip
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if died := "".join(thread.died for thread in threads):
        raise RuntimeError(died)


def main() -> None:
    logs = Path(sys.argv[1])
    for module in pkgutil.walk_packages(ckptd.__path__, "ckptd."):
        importlib.import_module(module.name)  # once, here, instead of in each trainer
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks how they ended
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            sys.stdin.close()
            code = 0
            try:
                _be_trainers(json.loads(line), logs)
            except BaseException:
                (logs / f"died-{os.getpid()}").write_text(traceback.format_exc())
                code = 1
            os._exit(code)
        print(pid, flush=True)


if __name__ == "__main__":
    main()
