"""What other ways of saving leave after a crash, in the same harness as ours: a table for docs/durability.md.

    python scripts/trials/others.py [--only TOOL] [--into docs/durability.md]

Each tool saves two checkpoints in a folder where everything is recorded (watched_folder.py); the states that a kill or a
power cut may leave are those of tests/crash_states.py; each is put to that tool's own loader. Tools that aren't
installed are listed as not tried.
"""

from __future__ import annotations

import argparse
import functools
import random
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

sys.path.insert(1, str(Path(__file__).resolve().parent.parent.parent / "tests"))

from other_savers import TOOLS
from other_tool import Tool

from crash_place import Ground
from crash_states import State, states
from crash_trace import Sync, Trace

_SAVER: Final = str(Path(__file__).with_name("other_savers.py"))
BEGIN, END = "<!-- others: begin -->", "<!-- others: end -->"
_KINDS: Final = {"kill": "kill", "ordered": "power cut, names in order", "strict": "power cut, strict POSIX"}
_AT_ONE_POINT: Final = 64  #: strict states; where there are more, a sample
_OF_A_KIND: Final = 400  #: states of one tool; where there are more, a sample
_WORDS: Final = {
    "fine": "fine", "older": "older", "refused": "refused", "lost": "**lost**", "wrong": "**wrong**",
}  # fmt: skip


def record(name: str, folder: Path) -> Trace:
    from watched_folder import watched  # needs mfusepy; the rest is tested without it

    with watched(folder) as trace:
        subprocess.run([sys.executable, _SAVER, "save", name, str(folder)], check=True)
    return trace


def outcome(state: State, said: str) -> str:
    """Which of _WORDS a state deserves; said: what the loader made of it."""
    acked = max((mark.about for mark in state.told if mark.what == "acked"), default=0)
    usual, by_hand = said.split()
    if usual == "wrong":
        return "wrong"
    if usual.isdigit():
        return "fine" if int(usual) >= acked else "older"
    if acked == 0 and usual == "none":
        return "fine"  # nothing was promised, and nothing is there
    return "refused" if by_hand.isdigit() or acked == 0 else "lost"


class Loader:
    """A process that says what a tool's own resume makes of a folder.

    Args:
        name: Of the tool.
        folder: Where the states are laid out.
    """

    def __init__(self, name: str, folder: Path) -> None:
        self._ground, self._folder = Ground(folder, folder / "root"), folder
        self._process = subprocess.Popen(
            [sys.executable, _SAVER, "load", name], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, text=True,
        )  # fmt: skip
        self._known: dict[str, str] = {}

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()

    def says(self, state: State) -> str:
        if self._process.stdin is None or self._process.stdout is None:
            raise RuntimeError("the loader has no pipes")
        if state.on_disk not in self._known:
            self._ground.lay_out(state.tree)
            self._process.stdin.write(f"{self._folder}\n")
            self._process.stdin.flush()
            self._known[state.on_disk] = self._process.stdout.readline()
            self._ground.touched()
        return self._known[state.on_disk]


def sample(trace: Trace, kind: str) -> Iterator[State]:
    """Its states of one kind, at most _OF_A_KIND."""
    made = functools.partial(states, trace, most=_AT_ONE_POINT, torn=True, kind=kind)
    count = sum(1 for _ in made())
    picked = set(random.Random(0).sample(range(count), min(count, _OF_A_KIND)))
    return (state for at, state in enumerate(made()) if at in picked)


def judge(name: str, trace: Trace, folder: Path) -> dict[str, Counter[str]]:
    found = {kind: Counter[str]() for kind in _KINDS}
    with Loader(name, folder) as loader:
        last = ""
        for state in (one for kind in _KINDS for one in sample(trace, kind)):
            said = loader.says(state)
            found[state.kind][outcome(state, said)] += 1
            last = said if state.kind == "kill" else last
    if last.split() != ["2", "2"]:
        raise RuntimeError(f"{name}: nothing was taken from it, and yet its resume says {last!r}")
    return found


def row(name: str, tool: type[Tool]) -> str:
    with tempfile.TemporaryDirectory() as below:
        trace = record(name, Path(below) / "watched")
        found = judge(name, trace, Path(below) / "state")
    syncs = sum(isinstance(op, Sync) for op in trace.ops)
    print(f"{tool.about}: {len(trace.ops)} operations, {syncs} syncs: {found}", file=sys.stderr)
    cells = (
        " · ".join(f"{counted[word]} {shown}" for word, shown in _WORDS.items() if counted[word])
        for counted in found.values()
    )
    return f"| {tool.about} | {syncs} | {' | '.join(cells)} |"


def table(names: list[str]) -> list[str]:
    lines = [f"| tool | syncs | {' | '.join(_KINDS.values())} |", "|---|--:|" + "---|" * len(_KINDS)]
    missing, versions = [], {}
    for name in names:
        tool = TOOLS[name]
        try:
            versions |= {package: version(package) for package in tool.packages}
        except PackageNotFoundError:
            missing.append(tool.about)
            continue
        lines.append(row(name, tool))
    said = ", ".join(f"{package} {number}" for package, number in sorted(versions.items()))
    return [*lines, "", f"With {said}. Not tried: {', '.join(missing) or 'nothing of this list'}."]


def into_page(page: str, made: str) -> str:
    """The page with the table between the markers replaced.

    Raises:
        ValueError: It doesn't have each marker once, in this order.
    """
    if page.count(BEGIN) != 1 or page.count(END) != 1 or page.index(END) < page.index(BEGIN):
        raise ValueError(f"the page must have {BEGIN} and then {END}, once each")
    before, _, rest = page.partition(BEGIN)
    return f"{before}{BEGIN}\n{made}\n{END}{rest.partition(END)[2]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", action="append", choices=TOOLS, help="a tool; may be given again")
    parser.add_argument("--into", type=Path, help="a page whose table between the markers is replaced")
    given = parser.parse_args()
    into = given.into and given.into.resolve()  # FUSE changes the working folder
    made = "\n".join(table(given.only or list(TOOLS)))
    if into is None:
        print(made)
    else:
        into.write_text(into_page(into.read_text(), made))


if __name__ == "__main__":
    main()
