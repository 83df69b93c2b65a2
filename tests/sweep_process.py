"""For tests: a job in processes of its own, with a Client, a daemon and SIGKILLs."""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import ckptd
from sweep_run import Job, seed
from sweep_trace import told


def trainer(make: Callable[[], Job], end: str, out: Path, root: Path | None, kill_after: str = "") -> None:
    """A training script: one line in `out` for each step; saves each, and dies right after snapshot() of one."""
    torch.set_num_threads(1)
    seed(1 if root is None or not root.exists() else os.getpid())
    job = make()
    client = ckptd.Client(root) if root is not None else None
    if client is not None:
        client.restore(job.state)
    with out.open("a", buffering=1) as file:

        def after(where: str, shown: Any) -> None:
            file.write(json.dumps([where, repr(shown), told(job.state)]) + "\n")
            if client is not None and "edge" not in where:
                client.snapshot(int(where), job.state)
            if where == kill_after:
                os.kill(os.getpid(), signal.SIGKILL)

        job.run(end, after)
    if client is not None:
        client.close()


def in_process(act: Callable[[], None]) -> int:
    """The exit code (minus the signal) of another process that does it."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            signal.alarm(200)  # what hangs dies of it
            act()
            code = 0
        except BaseException:
            traceback.print_exc(file=sys.stderr)
        finally:
            sys.stderr.flush()
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def imported() -> None:
    """Load what torch imports at an optimizer's first step, once for all the processes to come."""
    parameter = torch.nn.Parameter(torch.ones(1))
    parameter.grad = torch.ones(1)
    torch.optim.AdamW([parameter]).step()
