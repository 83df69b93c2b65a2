"""The processes of a check: one at a time, bounded, output kept, none left behind however it ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ckptd.errors import CkptdError, InvalidArgument, JobFailed, TimedOut
from ckptd.proof.job import JobAddress
from ckptd.proof.trace import Trace, read_trace

#: sys.path as it is here, before anything of ours or the user's is imported.
_PROGRAM: Final = (
    "import json, sys\n"
    "sys.path[:] = json.load(open(sys.argv[1], encoding='utf-8'))['path']\n"
    "from ckptd.proof.child import start\n"
    "start()\n"
)
#: In the environment of all that a run starts: the path of its plan, so that they are found, in whatever session.
_MARK: Final = "CKPTD_CHECK_RESUME"
#: Folder in the check's that its runs leave sockets in.
SOCKETS: Final = "sockets"
_GRACE_S: Final = 2.0  # for the stacks of a job that hangs to reach its log
_LOOKS: Final = 50  # for what was killed to be gone
_SHOWN_LINES: Final = 40
_SHOWN_BYTES: Final = 16_384


@dataclass(frozen=True, kw_only=True)
class Process:
    """One run to start.

    Attributes:
        name: What it is called in the folder, such as `resumed-from-5`.
        said: What it is called in an error, such as `the run resumed from step 5`.
        job: Where the job is.
        folder: Where its files lie, the checkpoints among them.
        steps: Steps to reach.
        timeout_s: Bound in seconds for the whole run.
        cuts: Steps to save after; it dies of SIGKILL after the last of them.
        resume: Step to restore first.
        keep: Steps whose values to keep, whatever their size.
    """

    name: str
    said: str
    job: JobAddress
    folder: Path
    steps: int
    timeout_s: float
    cuts: Sequence[int] = ()
    resume: int | None = None
    keep: Sequence[int] = ()

    @property
    def log(self) -> Path:
        """Its stdout and stderr."""
        return self.folder / f"{self.name}.log"

    def run(self) -> Trace:
        """Start it and wait for its end.

        Raises:
            InvalidArgument: There is no such job, or what it gives can't be used.
            JobFailed: It ended in another way than it should, or the job's own code raised.
            TimedOut: Not within timeout_s. It was killed.
        """
        code = self._wait(self._write_plan())
        trace = read_trace(self._trace_path)
        if trace.failed is not None:
            raise self._with_log(_failure(self.said, trace))
        killed_as_wanted = bool(self.cuts) and code == -signal.SIGKILL and max(self.cuts) in trace.saved
        if not (killed_as_wanted or (code == 0 and trace.done)):
            raise self._with_log(
                JobFailed(
                    f"{self.said} ended in a way of its own", where=str(self.job), seen=_exit(code),
                    wanted="a run to its end", todo=f"after step {trace.last_step}; see its output",
                )
            )  # fmt: skip
        return trace

    @property
    def _trace_path(self) -> Path:
        return self.folder / f"{self.name}.jsonl"

    def plan(self) -> dict[str, Any]:
        """What the child is to do; see child.Run."""
        return {
            "place": self.job.place, "function": self.job.function, "steps": self.steps,
            "folder": str(self.folder / "checkpoints"), "cuts": list(self.cuts), "resume": self.resume,
            "keep": list(self.keep), "trace": str(self._trace_path),
        }  # fmt: skip

    def _write_plan(self) -> Path:
        # time.monotonic() is one clock for all processes of a machine.
        ends_at = time.monotonic() + self.timeout_s
        more = {
            "ends_at": ends_at, "parent": os.getpid(), "path": _search_path(self.job),
            "sockets": str(self.folder / SOCKETS),
        }  # fmt: skip
        path = self.folder / f"{self.name}.plan.json"
        path.write_text(json.dumps(self.plan() | more), "utf-8")
        return path

    def _wait(self, plan: Path) -> int:
        process: subprocess.Popen[bytes] | None = None
        try:
            process = self._start(plan)
            return process.wait(self.timeout_s + _GRACE_S)
        except subprocess.TimeoutExpired:
            raise self._with_log(self._late()) from None
        finally:
            if (
                process is not None
            ):  # else a signal came while it was started: its mark is all that is known of it
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            _kill_marked(str(plan))

    def _start(self, plan: Path) -> subprocess.Popen[bytes]:
        with self.log.open("wb") as log:
            # A session of its own: what the job starts (workers) ends with it, by one signal to the group.
            return subprocess.Popen(
                [sys.executable, "-u", "-c", _PROGRAM, str(plan)], stdin=subprocess.DEVNULL, stdout=log,
                stderr=subprocess.STDOUT, start_new_session=True, env=os.environ | {_MARK: str(plan)},
            )  # fmt: skip

    def _late(self) -> TimedOut:
        trace = read_trace(self._trace_path)
        if trace.done:
            return TimedOut(
                f"{self.said} did its steps, and then its process did not end in time", where=str(self.job),
                seen=f"still there after {self.timeout_s:g} s",
                todo="see in its output what it waits for, such as a thread that isn't a daemon",
            )  # fmt: skip
        return TimedOut(
            f"{self.said} did not end in time", where=str(self.job),
            seen=f"step {trace.last_step} of {self.steps} after {self.timeout_s:g} s",
            todo="give it more time, or see in its output where it hangs",
        )  # fmt: skip

    def _with_log(self, error: CkptdError) -> CkptdError:
        tail = last_lines(self.log)
        if isinstance(error, JobFailed):
            error.log = tail
        error.add_note(f"--- the end of what {self.said} wrote ---\n{tail}")
        return error


def refuse_inside_a_check() -> None:
    """So that a script which checks its job where it is imported doesn't start checks without end.

    Raises:
        InvalidArgument: This process belongs to a run of a check.
    """
    if _MARK in os.environ:
        raise InvalidArgument(
            "check_resume is called by the job that it checks, when the job's file is imported or runs",
            where="check_resume", todo="put the call below `if __name__ == '__main__':`",
        )  # fmt: skip


def _kill_marked(plan: str) -> None:
    """What the run has started in sessions of its own; what began while one looked is found at the next look."""
    mark = f"{_MARK}={plan}".encode()
    for _ in range(_LOOKS):
        found = [pid for pid in _pids() if mark in _environment(pid)]
        for pid in found:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if not found:
            return
        time.sleep(0.01)


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _environment(pid: int) -> list[bytes]:
    """As the process was started with; empty for one that has ended or belongs to somebody else."""
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []


def last_lines(path: Path) -> str:
    """The end of a log, at most 40 lines."""
    data = path.read_bytes()[-_SHOWN_BYTES:] if path.exists() else b""
    return "\n".join(data.decode("utf-8", "replace").splitlines()[-_SHOWN_LINES:])


def _search_path(job: JobAddress) -> list[str]:
    """sys.path as here; for a file its folder comes first, as when it is run; "" stays the current folder."""
    own = [str(Path(job.place).parent)] if job.is_file else []
    return [*own, *(path for path in sys.path if path not in own)]


def _failure(said: str, trace: Trace) -> JobFailed | InvalidArgument:
    failed = trace.failed or {}
    if failed["stage"] in ("find", "use") and failed["kind"] == "InvalidArgument":
        return InvalidArgument(failed["text"])
    stage = {
        "find": "could not be found or imported", "make": "failed in make_job()", "use": "gave something unusable",
        "take": f"has a state that can't be taken, after step {trace.last_step}", "restore": "failed in restore()",
    }.get(failed["stage"], f"failed at {failed['stage']}")  # fmt: skip
    return JobFailed(f"the job {stage} in {said}", seen=f"{failed['kind']}: {failed['text']}")


def _exit(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"
