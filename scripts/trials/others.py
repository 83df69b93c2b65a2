"""What other ways of saving leave after a crash, in the same harness as ours: a table for docs/durability.md.

    python scripts/trials/others.py [--into docs/durability.md]

Each tool saves two checkpoints in a folder where everything is recorded (watched_folder.py); the states that a kill or a
power cut may leave are those of tests/crash_states.py; each is put to that tool's own loader. Tools that aren't
installed are listed as not tried.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections import Counter
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

sys.path.insert(1, str(Path(__file__).resolve().parent.parent.parent / "tests"))

from other_savers import TOOLS, Tool
from watched_folder import watched

from crash_place import Ground
from crash_states import State, states
from crash_trace import Sync, Trace

_SAVER: Final = str(Path(__file__).with_name("other_savers.py"))
_BEGIN, _END = "<!-- others: begin -->", "<!-- others: end -->"
_KINDS: Final = {"kill": "kill", "ordered": "power cut, names in order", "strict": "power cut, strict POSIX"}
_COLUMNS: Final = (
    "the acknowledged one is resumed",
    "refused, one is there by hand",
    "nothing left",
    "garbage taken",
)


def record(name: str, folder: Path) -> Trace:
    with watched(folder) as trace:
        subprocess.run([sys.executable, _SAVER, "save", name, str(folder)], check=True)
    return trace


def outcome(state: State, said: str) -> str:
    """Which column a state belongs to; said: what the loader made of it."""
    acked = max((mark.about for mark in state.told if mark.what == "acked"), default=0)
    usual, by_hand = said.split()
    if usual == "wrong":
        return _COLUMNS[3]
    if usual.isdigit() and int(usual) >= acked:
        return _COLUMNS[0]
    if acked == 0 and usual == "none":
        return _COLUMNS[0]  # nothing was promised, and nothing is there
    return _COLUMNS[1] if by_hand.isdigit() or acked == 0 else _COLUMNS[2]


def judge(name: str, trace: Trace, folder: Path) -> dict[str, Counter[str]]:
    found = {kind: Counter[str]() for kind in _KINDS}
    ground = Ground(folder, folder / "root")
    with subprocess.Popen(
        [sys.executable, _SAVER, "load", name], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL, text=True,
    ) as loader:  # fmt: skip
        if loader.stdin is None or loader.stdout is None:
            raise RuntimeError(f"{name}: its loader has no pipes")
        known: dict[str, str] = {}
        for state in (one for kind in _KINDS for one in states(trace, most=64, torn=True, kind=kind)):
            if state.on_disk not in known:
                ground.lay_out(state.tree)
                loader.stdin.write(f"{folder}\n")
                loader.stdin.flush()
                known[state.on_disk] = loader.stdout.readline()
                ground.touched()
            found[state.kind][outcome(state, known[state.on_disk])] += 1
        loader.stdin.close()
    return found


def versions(tool: type[Tool]) -> str:
    return ", ".join(f"{package} {version(package)}" for package in tool.packages)


def table() -> list[str]:
    lines = [f"| tool | crash | states | {' | '.join(_COLUMNS)} |", "|---|---|--:|" + "--:|" * len(_COLUMNS)]
    missing = ["Hugging Face `Trainer`"]
    for name, tool in TOOLS.items():
        try:
            said = versions(tool)
        except PackageNotFoundError:
            missing.append(tool.about)
            continue
        with tempfile.TemporaryDirectory() as below:
            trace = record(name, Path(below) / "watched")
            found = judge(name, trace, Path(below) / "state")
        syncs = sum(isinstance(op, Sync) for op in trace.ops)
        print(f"{tool.about}: {len(trace.ops)} operations, {syncs} syncs: {found}", file=sys.stderr)
        for kind, counted in found.items():
            about = f"{tool.about} ({said}; {syncs} syncs)" if kind == "kill" else ""
            numbers = " | ".join(str(counted[column]) for column in _COLUMNS)
            lines.append(f"| {about} | {_KINDS[kind]} | {counted.total()} | {numbers} |")
    return [*lines, "", f"Not tried: {', '.join(missing)}." if missing else ""]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--into", type=Path, help="a page whose table between the markers is replaced")
    into = parser.parse_args().into
    into = into and into.resolve()  # FUSE changes the working folder
    made = "\n".join(table())
    if into is None:
        print(made)
        return
    before, _, rest = into.read_text().partition(_BEGIN)
    into.write_text(f"{before}{_BEGIN}\n{made}\n{_END}{rest.partition(_END)[2]}")


if __name__ == "__main__":
    main()
