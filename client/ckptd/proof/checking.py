"""check_resume: run a user's job, kill it, resume it in a new process, and name the first thing that differs."""

from __future__ import annotations

import math
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from ckptd.errors import InvalidArgument, JobFailed
from ckptd.names import check_step
from ckptd.proof import causes
from ckptd.proof.causes import Phase
from ckptd.proof.comparing import Finding, Suspect, first_difference, made_anew, suspects_of
from ckptd.proof.cuts import chosen_cuts, middle_cut
from ckptd.proof.details import how_far_apart, notes_on
from ckptd.proof.ending import ending_in_order
from ckptd.proof.job import JobAddress, address_of
from ckptd.proof.processes import SOCKETS, Process, refuse_inside_a_check
from ckptd.proof.report import Difference, ResumeReport
from ckptd.proof.trace import Trace

__all__ = ["ResumeReport", "check_resume"]


def check_resume(
    make_job: Callable[[], Any] | str,
    *,
    steps: int,
    cuts: int | Sequence[int] | Literal["all"] | None = None,
    timeout_s: float = 600.0,
    keep: str | Path | None = None,
    progress: Callable[[str], None] | None = None,
) -> ResumeReport:
    """Find out whether a job that is killed and resumed goes on bit for bit, and if not, what differs first.

    The job is a function without arguments that returns the state, as for `Client.snapshot`, and an iterator that
    does one optimizer step for each `next()` and yields its loss. A generator function is best: its body starts at
    the first `next()`, after the restore, so it goes on from whatever the state says. The same two can train for
    real, with `client.restore(state)` between them and `for loss in losses: client.maybe_snapshot(…)`:

        def make_job():
            torch.manual_seed(0)
            model = torch.nn.Linear(4, 1)
            opt = torch.optim.Adam(model.parameters())
            loader = ckptd.ResumableLoader(DataLoader(data, batch_size=2, shuffle=True))
            state = {"model": model, "optimizer": opt, "loader": loader}
            return state, train(**state)

        def train(model, optimizer, loader):
            while True:
                for batch in loader:
                    optimizer.zero_grad()
                    loss = model(batch).square().mean()
                    loss.backward()
                    optimizer.step()
                    yield loss

        if __name__ == "__main__":
            print(ckptd.check_resume(make_job, steps=20))

    Each run imports the job's file, so what else the file does stands below that guard, as for multiprocessing.

    It runs, one after the other and each in a fresh interpreter: the job without a break; the job again, saving
    at the cuts and killed by SIGKILL right after the last; and for each cut a process that makes the job, sets
    every global generator to something else, restores, and runs to the end. Compared are each loss and, after the
    restore and after each step, every value that the state holds, and the random generators. When something
    differs, the job runs once more without a break, to tell a job that isn't deterministic by itself.

    Args:
        make_job: The function, or its address: "package.module:make_job", "train.py:make_job". Another process
            must find it, so it is at the top of a file.
        steps: Steps of the uninterrupted run, 2 or more. More than an epoch shows more.
        cuts: Steps (1 to steps - 1) to be killed after; "all" for each. None (default): one in the middle, not
            between two epochs of a ResumableLoader.
        timeout_s: Bound for each of the processes (600).
        keep: Folder, made here, in which traces, logs and checkpoints stay. None (default): a temporary one,
            removed at the end. It takes the state's size for each cut, and at most 64 MiB a run beside that.
        progress: Called with a line of text as it goes on.

    Returns:
        The report. A job that isn't exact, or not deterministic, is a result and no error.

    Raises:
        InvalidArgument: An argument that can't be right; a function that another process can't find; a job that
            doesn't give (state, losses), has a DataLoader in its state, or is checked where it is imported, without
            the guard. Nothing is left.
        JobFailed: The job raised, ended early or died; `log` is the end of its output, with the traceback, which
            is shown below the error too. Nothing is left but what keep asks for.
        TimedOut: One of the processes didn't end within timeout_s, and was killed; its stacks are shown.

    A SIGTERM that nothing handles still ends the process that asks, once the runs are killed and the temporary
    folder is gone. A SIGKILL leaves the folder.
    """
    refuse_inside_a_check()
    steps = check_step(steps)
    if steps < 2:
        raise InvalidArgument("too few steps", where="steps", seen=str(steps), wanted="2 or more")
    if isinstance(timeout_s, bool) or not (0 < timeout_s < math.inf):
        raise InvalidArgument("not a bound", where="timeout_s", seen=repr(timeout_s), wanted="over 0, finite")
    wanted_cuts, job = chosen_cuts(cuts, steps), address_of(make_job)
    with ending_in_order(), _folder(keep) as folder:
        say = progress or (lambda text: None)
        return Check(job, steps, wanted_cuts, timeout_s, folder, say).run()


@contextmanager
def _folder(keep: str | Path | None) -> Iterator[Path]:
    if keep is None:
        with tempfile.TemporaryDirectory(prefix="ckptd-check-", ignore_cleanup_errors=True) as name:
            yield Path(name)
        return
    path = Path(keep).absolute()
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise InvalidArgument("not a new or empty folder", where=str(path), todo="name another one for keep")
    path.mkdir(parents=True, exist_ok=True)
    try:
        yield path
    finally:
        shutil.rmtree(path / SOCKETS, ignore_errors=True)


@dataclass
class Check:
    """One check: its runs in their order. `base` and `saving` are the traces of the first two.

    Attributes:
        start: Starts a process and gives its trace; tests do without processes.
    """

    job: JobAddress
    steps: int
    cuts: tuple[int, ...] | None
    timeout_s: float
    folder: Path
    say: Callable[[str], None]
    start: Callable[[Process], Trace] = Process.run
    _harmless: dict[str, Suspect] = field(default_factory=dict)
    _warned: dict[str, None] = field(default_factory=dict)

    def run(self) -> ResumeReport:
        began = time.monotonic()
        self.say(f"{self.job}: {self.steps} steps without a break")
        self.base = self._run(self._process("uninterrupted", "the uninterrupted run"))
        self._refuse_an_early_end()
        self._cuts = self.cuts or (middle_cut(self.base, self.steps),)
        report = self._report(tuple(self._differences()))
        return replace(report, seconds=time.monotonic() - began)

    def _differences(self) -> list[Difference]:
        """The first one of each cut; where two uninterrupted runs differ, that one alone."""
        if self.base.unseeded:
            return [self._unseeded()]
        at = ", ".join(map(str, self._cuts))
        self.say(f"again, saved after step {at}, then SIGKILL")
        process = self._process("killed", "the run to be killed", steps=self._cuts[-1], cuts=self._cuts)
        self.saving = self._run(replace(process, keep=self._cuts[:1]))
        repeat = first_difference(self.base, self.saving)
        if repeat is not None:
            return [self._difference("repeat", repeat, self.base, self.saving, None)]
        found: list[Difference] = []
        tried = False
        for one in filter(None, map(self._resume, self._cuts)):
            if one.phase == "resumed" and not tried:
                tried, again = True, self._again(one)
                if again is not None:
                    return [again]
            found.append(one)
        return found

    def _resume(self, cut: int) -> Difference | None:
        self.say(f"resumed from step {cut} in a new process")
        name, said = f"resumed-from-{cut}", f"the run resumed from step {cut}"
        run = self._run(replace(self._process(name, said), resume=cut, keep=(cut, cut + 1)))
        if run.refused:
            return _refused(run, cut)
        found = first_difference(self.saving, run, steps=(cut,))
        if found is not None:
            return self._difference("restore", found, self.saving, run, cut)
        found = first_difference(self.base, run)
        if found is not None:
            return self._difference("resumed", found, self.base, run, cut)
        for file in self.folder.glob(f"{name}.*.values"):
            file.unlink()
        without = suspects_of(self.saving.beside[cut], run.beside[cut], self.saving.with_state)
        self._harmless |= {one.name: one for one in without}
        return None

    def _again(self, found: Difference) -> Difference | None:
        """An uninterrupted run to the step of the difference; what differs in that one is the job's own."""
        self.say(f"something differs at step {found.step}: without a break again, to tell whose fault it is")
        process = self._process("again", "the second uninterrupted run", steps=found.step)
        run = self._run(replace(process, keep=(found.step,)))
        repeat = first_difference(self.base, run)
        return None if repeat is None else self._difference("repeat", repeat, self.base, run, None)

    def _run(self, process: Process) -> Trace:
        trace = self.start(process)
        self._warned |= dict.fromkeys(trace.warned)
        return trace

    def _difference(
        self, phase: Phase, found: Finding, wanted: Trace, seen: Trace, cut: int | None
    ) -> Difference:
        from_start = False
        if phase == "resumed" and cut is not None and found.step == cut + 1 and found.kind == "loss":
            from_start = self.base.moments[1].losses == seen.moments[found.step].losses
        at = 0 if cut is None else cut
        before = (
            {} if phase == "restore" else (wanted if phase == "repeat" else self.saving).beside.get(at, {})
        )
        after = seen.beside.get(at, {})
        suspects = suspects_of(before, after, self.saving.with_state)
        if phase == "repeat" and found.step == 0:  # what differs in the state itself is the finding
            suspects = tuple(one for one in suspects if not one.name.startswith("state["))
        anew = made_anew(before, after) if phase == "resumed" else ()
        why, look_for = causes.explain(
            phase, found, cut=cut, kinds=wanted.kinds, from_start=from_start, suspected=bool(suspects), anew=bool(anew),
            around=self.saving.around,
        )  # fmt: skip
        return Difference(
            phase=phase, cut=cut, step=found.step, kind=found.kind, where=found.where, seen=found.seen,
            wanted=found.wanted, apart=how_far_apart(found, wanted, seen), extents=found.extents,
            suspects=suspects, made_anew=anew, why=why, look_for=look_for,
        )  # fmt: skip

    def _unseeded(self) -> Difference:
        part, step = min(self.base.unseeded.items(), key=lambda item: item[1])
        why, look_for = causes.of_unseeded(part, step)
        return Difference(
            phase="repeat", cut=None, step=step, kind="rng", where=f"state['rng'][{part!r}]",
            seen="", wanted="", why=why, look_for=look_for,
        )  # fmt: skip

    def _report(self, differences: tuple[Difference, ...]) -> ResumeReport:
        last = self.base.moments[self.steps]
        harmless = () if differences else sorted(self._harmless.values(), key=lambda one: not one.has_state)
        return ResumeReport(
            exact=not differences, job=str(self.job), steps=self.steps, cuts=self._cuts, differences=differences,
            left_out=tuple(one.name for one in harmless if one.has_state), components=tuple(self.base.kinds),
            values=len(last.leaves), state_bytes=self.base.state_bytes,
            notes=(
                *map(_harmless_note, harmless), *notes_on(self.base),
                *(f"ckptd warned in a run: {text}" for text in self._warned),
            ),
        )  # fmt: skip

    def _refuse_an_early_end(self) -> None:
        if self.base.ended is not None:
            raise JobFailed(
                "the job ended early", where=str(self.job), seen=f"after step {self.base.ended}",
                wanted=f"{self.steps} steps", todo="ask for fewer steps, or let it go on (`while True:`)",
            )  # fmt: skip

    def _process(
        self, name: str, said: str, *, steps: int | None = None, cuts: Sequence[int] = ()
    ) -> Process:
        return Process(
            name=name, said=said, job=self.job, folder=self.folder, steps=steps or self.steps,
            timeout_s=self.timeout_s, cuts=cuts,
        )  # fmt: skip


def _refused(run: Trace, cut: int) -> Difference:
    why, look_for = causes.of_refusal()
    return Difference(
        phase="restore", cut=cut, step=cut, kind="refused", where="restore()", seen=run.refused,
        wanted="a checkpoint that fits", why=why, look_for=look_for,
    )  # fmt: skip


def _harmless_note(one: Suspect) -> str:
    differ = "one value differs" if one.values == 1 else f"{one.values} values differ"
    return (
        f"the state doesn't bring back {one.name}: {differ} after the resume ({one.example}: {one.seen} after the "
        f"restore, {one.wanted} at the snapshot). No loss and no value of the state depended on it in these steps; if "
        "you use it later (an EMA, a best model, a scaler), put it into the state"
    )
