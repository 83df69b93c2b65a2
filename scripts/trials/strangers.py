"""Who isn't this user, or sees other processes: what a daemon answers to them."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from part import Findings

from other_user import as_another_user


def another_user(endpoints: Sequence[str], findings: Findings) -> None:
    """Another user knocks at the sockets."""
    if os.geteuid() != 0:
        findings.not_tried["another user"] = "only root can become one"
        return

    def knock(endpoint: str) -> None:
        with socket.socket(socket.AF_UNIX) as one:
            one.connect(endpoint.removeprefix("ipc://"))

    for endpoint in endpoints:
        answer = as_another_user(lambda endpoint=endpoint: knock(endpoint))
        if answer != "PermissionError":
            findings.fault(f"another user connected to {endpoint}: {answer}")
    findings.tried["another user"] += 1


def another_namespace(root: Path, findings: Findings) -> None:
    """A trainer that sees other pids than the daemon is refused by name, and saves nothing by mistake."""
    unshare = shutil.which("unshare")
    script = (
        "import sys; from pathlib import Path; from daemon_parts import BareClient; "
        "BareClient(Path(sys.argv[1]), 'elsewhere').attach()"
    )
    command = [*([unshare, "-p", "-f", "--mount-proc"] if unshare else []), sys.executable, "-c", script]
    if unshare is None or subprocess.run([*command[:4], "true"], check=False).returncode != 0:
        findings.not_tried["another pid namespace"] = "unshare isn't there, or not allowed"
        return
    path = os.pathsep.join(
        (str(Path(__file__).resolve().parents[2] / "tests"), os.environ.get("PYTHONPATH", ""))
    )
    done = subprocess.run(
        [*command, str(root)], env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    if done.returncode == 0 or not any(word in done.stderr for word in ("pid namespace", "NoDaemon")):
        findings.fault(f"a trainer of another pid namespace: {done.returncode} {done.stderr[-500:]}")
    findings.numbers["another pid namespace"] = done.stderr.strip().splitlines()[-1:]
    findings.tried["another pid namespace"] += 1
