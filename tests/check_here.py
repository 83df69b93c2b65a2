"""check_resume without processes: every run of the job in this one, its SIGKILL an exception."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ckptd.proof.checking import Check
from ckptd.proof.child import Run
from ckptd.proof.job import address_of
from ckptd.proof.processes import Process
from ckptd.proof.report import ResumeReport
from ckptd.proof.trace import Trace, collect


class Killed(BaseException):
    pass


def start_here(process: Process) -> Trace:
    random.seed()  # a fresh interpreter starts these two from a seed of its own
    np.random.seed()
    lines: list[str] = []

    def die() -> None:
        raise Killed

    run = Run(process.plan(), lines.append, die)
    try:
        run.go()
    except Killed:
        pass
    finally:
        if run.client is not None:
            run.client.close()
    return collect(map(json.loads, lines))


def check_here(
    job: Callable[[], Any], folder: Path, *, steps: int = 8, cuts: Sequence[int] | None = None,
    started: list[str] | None = None,
) -> ResumeReport:  # fmt: skip
    """The report; `started` takes the names of the runs."""

    def start(process: Process) -> Trace:
        if started is not None:
            started.append(process.name)
        return start_here(process)

    wanted = None if cuts is None else tuple(cuts)
    return Check(address_of(job), steps, wanted, 60.0, folder, lambda text: None, start).run()
