"""One run of a job, in a process of its own. Started by `processes`; writes its trace and never reads another's.

A run that saves ends by a SIGKILL to itself, right after its last snapshot: no handler, no exit, no flush.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from pathlib import Path
from typing import Any, Final

from ckptd.client import Client
from ckptd.errors import CkptdError, InvalidArgument
from ckptd.proof import trace
from ckptd.proof.beside import look_around, look_beside
from ckptd.proof.job import JobAddress, load_job
from ckptd.proof.leaves import LeafReader, exact_number, kinds_of
from ckptd.proof.loaders import is_between_epochs, loaders_of
from ckptd.proof.own_process import die_with, keep_sockets_in, show_stacks_at, tell_warnings
from ckptd.proof.trace import Moment
from ckptd.tensors.rng import capture_rng_state

_ALWAYS_KEPT: Final = 64 * 1024 * 1024  # bytes of values that a run may keep of any steps
_KEPT_WHEN_ASKED: Final = 2 * 1024**3  # of one step that was asked for


def main(plan: Mapping[str, Any]) -> None:
    """Do what the plan says; the exit code is 0, or Python's own for an exception."""
    die_with(plan["parent"])
    show_stacks_at(plan["ends_at"])
    keep_sockets_in(Path(plan["sockets"]))
    own = os.getpid()
    with Path(plan["trace"]).open("w", encoding="utf-8", buffering=1) as out:

        def write(text: str) -> None:
            if os.getpid() == own:  # what a fork of the job does, and how it ends, is no part of the run
                out.write(text)

        tell_warnings(write)
        run = Run(plan, write)
        try:
            run.go()
        except BaseException as error:
            # Said twice: here for the parent, and by the interpreter, with the traceback, in the log.
            write(trace.line("failed", stage=run.stage, kind=type(error).__name__, text=str(error)[:2000]))
            if run.stage in ("use", "take") and isinstance(error, CkptdError):
                sys.exit(f"{type(error).__name__}: {error}")  # of what was given: no line of the job's failed
            raise
        write(trace.line("done"))
    # The stacks are still to come: a thread or an exit handler that is left may keep this process from ending.


class Run:
    """A run of one job.

    Args:
        plan: `place`, `function`, `steps`, `folder`; `cuts` to save after; `resume` the step to restore, or None;
            `keep` the steps whose values are wanted.
        write: Takes one line of the trace.
        die: Ends the process after the last cut; in tests it raises.

    Attributes:
        step: Finished steps.
        stage: What is under way, for an error: `find`, `make`, `use` (what make_job gave, a loss), `take` (the
            state), `restore`, `step`.
        client: What saves; None when the run doesn't.
    """

    def __init__(
        self, plan: Mapping[str, Any], write: Callable[[str], Any], die: Callable[[], None] | None = None
    ) -> None:
        self.step, self.stage = 0, "find"
        self._plan, self._write, self._die = plan, write, die or _kill_itself
        self.client: Client | None = None
        self._reader, self._kept_bytes = LeafReader(), 0
        self._state: MutableMapping[Any, Any] = {}
        self._losses: Iterator[Any] = iter(())
        self._unseeded: dict[str, Any] = {}
        self._job: Callable[[], Any] = dict

    def go(self) -> None:
        """Make the job, restore it where that is asked, and run it."""
        before = _read_global()
        self._job = load_job(JobAddress(self._plan["place"], self._plan["function"]))
        self.stage = "make"
        made = self._job()
        self.stage = "use"
        self._state, self._losses = _parts_of(made)
        self._unseeded = _settle_untouched(before)
        self._write(trace.line("kinds", kinds=kinds_of(self._state)))
        if self._plan["resume"] is None:
            self._write(trace.beside_line(0, *look_beside(self._state, self._losses)))
        elif not self._restore(self._plan["resume"]):
            return
        self._see({})
        self.client = client = self._client() if self._plan["cuts"] else None
        while self.step < self._plan["steps"]:
            if not self._one_step():
                self._write(trace.line("ended", step=self.step))
                return
            if client is not None and self.step in self._plan["cuts"]:
                self._save(client)

    def _one_step(self) -> bool:
        self.stage = f"step {self.step + 1}"
        try:
            loss = next(self._losses)
        except StopIteration:
            return False
        self.stage = "use"
        numbers = _numbers_of(loss)
        self.step += 1
        self._see(numbers)
        return True

    def _see(self, losses: Mapping[str, str]) -> None:
        self.stage = "take"
        leaves, data = self._reader.read(self._state)
        for part in _changed(self._unseeded):
            del self._unseeded[part]
            self._write(trace.line("unseeded", part=part, step=self.step))
        edge = any(map(is_between_epochs, loaders_of(self._state)))
        self._write(trace.moment_line(Moment(self.step, losses, leaves, self._keep(data), edge)))

    def _keep(self, data: memoryview) -> str:
        """The values file of this step; "" when they would take too much room."""
        asked = self.step in self._plan["keep"] and data.nbytes <= _KEPT_WHEN_ASKED
        if not asked and self._kept_bytes + data.nbytes > _ALWAYS_KEPT:
            return ""
        if not asked:
            self._kept_bytes += data.nbytes
        path = Path(self._plan["trace"]).with_suffix(f".{self.step}.values")
        path.write_bytes(data)
        return str(path)

    def _client(self) -> Client:
        return Client(self._plan["folder"], run="check", daemon="off", on_error="raise")

    def _save(self, client: Client) -> None:
        client.snapshot(self.step, self._state)
        self._write(trace.line("saved", step=self.step))
        self._write(trace.beside_line(self.step, *look_beside(self._state, self._losses)))
        self._write(trace.around_line(look_around(self._state, self._losses, self._job)))
        if self.step == max(self._plan["cuts"]):
            self._die()

    def _restore(self, step: int) -> bool:
        self.stage = "restore"
        scramble()
        with self._client() as client:
            try:
                client.restore(self._state, step=step)
            except CkptdError as error:
                self._write(trace.line("refused", text=str(error)))
                return False
        self.step, self._unseeded = step, {}
        self._write(trace.beside_line(step, *look_beside(self._state, self._losses)))
        return True


def _read_global() -> dict[str, Any]:
    found = capture_rng_state()
    return {part: found[part] for part in ("python", "numpy")}  # torch starts from a seed of its own


def _settle_untouched(before: Mapping[str, Any]) -> dict[str, Any]:
    """Give a generator that the job has neither seeded nor drawn from so far the same state in every run.

    Else two runs of a job that never uses it would differ in it; and a draw from it later on is noticed.
    """
    import numpy

    untouched = [part for part, state in _read_global().items() if state == before[part]]
    if "python" in untouched:
        random.seed(0)
    if "numpy" in untouched:
        numpy.random.seed(0)
    now = _read_global()
    return {part: now[part] for part in untouched}


def _changed(settled: Mapping[str, Any]) -> list[str]:
    now = _read_global() if settled else {}
    return [part for part, state in settled.items() if now[part] != state]


def _kill_itself() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def scramble() -> None:
    """Set every global generator to a state of this process alone, so that one which isn't restored shows."""
    import numpy
    import torch

    random.seed()
    numpy.random.bytes(1 + random.randrange(4096))  # of any bit generator; seed() is MT19937's alone
    torch.default_generator.seed()
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.seed_all()


def _parts_of(made: Any) -> tuple[MutableMapping[Any, Any], Iterator[Any]]:
    from torch.utils.data import DataLoader

    if not isinstance(made, tuple) or len(made) != 2:
        raise InvalidArgument(
            "make_job() must return (state, losses)", where="make_job", seen=type(made).__name__,
            wanted="a dict as for Client.snapshot, and an iterator that does one step for each next()",
        )  # fmt: skip
    state, losses = made
    if not isinstance(state, MutableMapping):
        raise InvalidArgument(
            "the state is not a dict", where="make_job", seen=type(state).__name__, wanted="name → object"
        )
    for name, value in state.items():
        if isinstance(value, DataLoader):
            raise InvalidArgument(
                "a DataLoader can't be stored, nor go on where it was", where=f"state[{name!r}]",
                seen=type(value).__qualname__, wanted="ckptd.ResumableLoader",
                todo="wrap it: ckptd.ResumableLoader(loader), and train with that one",
            )  # fmt: skip
    if not isinstance(losses, Iterator):
        raise InvalidArgument(
            "losses is not an iterator", where="make_job", seen=type(losses).__name__,
            wanted="what calling a generator function gives", todo="return state, train(state)",
        )  # fmt: skip
    return state, losses


def _numbers_of(loss: Any) -> dict[str, str]:
    named = loss if isinstance(loss, Mapping) else {"loss": loss}
    try:
        return {str(name): exact_number(value) for name, value in named.items()}
    except (TypeError, ValueError, RuntimeError) as error:
        raise InvalidArgument(
            "the job yielded something that is no loss", where="losses", seen=str(error).splitlines()[0][:200],
            wanted="a number, a tensor of one element, or a dict of those", todo="yield loss.item()",
        ) from error  # fmt: skip


def start() -> None:
    """What `processes` runs: the plan's path is the only argument."""
    plan = json.loads(Path(sys.argv[1]).read_text("utf-8"))
    sys.argv = [plan["place"]]
    main(plan)
