"""Prove that tests bite: remove one guard at a time from a copy of the tree and see the named tests fail.

guard_lists.py says what a list is. The tree itself is never changed. First every named test must pass in an untouched copy.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

from guard_lists import BadList, Guard, changed_since, chosen, read_guards

TREE = Path(__file__).resolve().parent.parent
LISTS = Path(__file__).resolve().with_suffix(".d")
TIMEOUT_S = 300
UNTOUCHED_S = 3600  # for the tests of all guards, one after the other
TESTS_FAILED = 1  # pytest's exit code; others say that it didn't get so far
WRONG_TREE = 70


@dataclass(frozen=True)
class Outcome:
    """What the tests of one guard said without it."""

    word: str
    detail: str = ""
    seconds: float = 0.0

    @property
    def proven(self) -> bool:
        return self.word == "killed"


def failed_tests(report: str) -> set[str]:
    """Ids that pytest's short summary says failed, with and without their parameters."""
    ids = re.findall(r"^FAILED (\S+?::\w+)(\[.*?\])?(?: - .*)?$", report, re.MULTILINE)
    return {name for name, _ in ids} | {name + parameters for name, parameters in ids}


def judge(guard: Guard, code: int, report: str) -> tuple[str, str]:
    """Whether every test of the guard failed by itself, and what is to say if not."""
    # A test that failed may have an error in its teardown too; any other means that it never came to its point.
    errors = [
        error
        for error in re.findall(r"^ERROR (.*)$", report, re.MULTILINE)
        if error.partition("[")[0].partition(" ")[0] not in failed_tests(report)
    ]
    if code not in (0, TESTS_FAILED) or errors:
        return "broken", f"exit code {code}: {'; '.join(errors[:3]) or report.strip()[-300:]}"
    survivors = [test for test in guard.tests if test not in failed_tests(report)]
    if survivors:
        return "survived", f"still passing: {', '.join(survivors)}"
    return "killed", ""


class Copy:
    """A copy of the tree to try one guard after the other in."""

    def __init__(self, tree: Path, folder: Path) -> None:
        self._folder = folder.resolve()
        for name in _files_of(tree):
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(tree / name, target)

    def run(
        self, tests: Iterable[str], *, tracebacks: str = "no", limit_s: float = TIMEOUT_S
    ) -> tuple[int, str]:
        """Exit code and report of pytest over these tests."""
        report = self._folder / "guards-report.txt"
        each_once = list(dict.fromkeys(tests))
        process = _PYTESTS.Process(target=_pytest, args=(self._folder, report, each_once, tracebacks))
        process.start()
        process.join(limit_s)
        if process.exitcode is None:
            process.kill()
            process.join()
            return -1, f"no end after {limit_s} s"
        return process.exitcode, report.read_text(encoding="utf-8", errors="replace")

    def without(self, guard: Guard) -> Outcome:
        """What its tests say without it. The copy is whole again after it."""
        path, begun = self._folder / guard.file, time.monotonic()
        try:
            whole = path.read_text(encoding="utf-8")
            path.write_text(guard.removed_from(whole), encoding="utf-8")
        except (BadList, OSError) as error:
            return Outcome("not found", str(error))
        try:
            word, detail = judge(guard, *self.run(guard.tests))
        finally:
            path.write_text(whole, encoding="utf-8")
        return Outcome(word, detail, time.monotonic() - begun)


#: Each pytest is forked from a process that has imported once what takes long, and nothing of ckptd.
_PYTESTS = multiprocessing.get_context("forkserver")


def _import_once(tree: Path) -> None:
    """Torch where the tree needs it, with what the first step of an optimizer imports."""
    needs_torch = "torch" in (tree / "pyproject.toml").read_text()
    _PYTESTS.set_forkserver_preload(["pytest", *(["torch", "torch._dynamo", "numpy"] if needs_torch else [])])


def _pytest(folder: Path, report: Path, tests: list[str], tracebacks: str) -> None:
    """Run pytest in a copy, as a process of its own, with the copy's packages in place of the installed ones."""
    with report.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.chdir(folder)
    sources = [str(folder / root) for root in ("client", "daemon")]
    sys.path[:0] = sources
    # No bytecode: a file changed twice within a second would be taken for the one before.
    sys.dont_write_bytecode = True
    multiprocessing.set_start_method(None, force=True)  # what a test starts, it starts as everywhere
    os.environ |= {"PYTHONPATH": os.pathsep.join(sources), "PYTHONDONTWRITEBYTECODE": "1"}
    import pytest

    code = pytest.main(["-rfE", f"--tb={tracebacks}", "--no-header", "-p", "no:cacheprovider", *tests])
    foreign = [
        module.__file__
        for name, module in list(sys.modules.items())
        if name.partition(".")[0] in ("ckptd", "ckptd_daemon")
        and not str(module.__file__).startswith(str(folder))
    ]
    if foreign:
        print(f"tests ran with {foreign[0]}, not with the copy")
        code = WRONG_TREE
    sys.stdout.flush()
    for left in multiprocessing.active_children():
        left.kill()  # a worker of a DataLoader that a failed test's traceback holds would wait for its reader for ever
        left.join()
    os._exit(code)


def _files_of(tree: Path) -> list[str]:
    """Tracked files, and new ones that git doesn't ignore."""
    command = ["git", "-C", str(tree), "ls-files", "-coz", "--exclude-standard"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return [name for name in done.stdout.split("\0") if name and (tree / name).is_file()]


def untouched_faults(copy: Copy, guards: Sequence[Guard]) -> str:
    """What fails although nothing was removed: such a test proves nothing. Empty when all pass."""
    tests = (test for guard in guards for test in guard.tests)
    code, report = copy.run(tests, tracebacks="short", limit_s=UNTOUCHED_S)
    return "" if code == 0 else report[-3000:]


def try_all(guards: Sequence[Guard], copies: Sequence[Copy]) -> list[Outcome]:
    """The outcome of each, tried in as many copies at once; told as they come."""
    free: SimpleQueue[Copy] = SimpleQueue()
    for copy in copies:
        free.put(copy)

    def one(guard: Guard) -> Outcome:
        copy = free.get()
        try:
            outcome = copy.without(guard)
        finally:
            free.put(copy)
        print(_line(guard, outcome), flush=True)
        return outcome

    with ThreadPoolExecutor(len(copies)) as pool:
        return list(pool.map(one, guards))


def _line(guard: Guard, outcome: Outcome) -> str:
    line = f"{outcome.word:9}  {outcome.seconds:5.1f} s  {guard.case:10}  {guard.name:44}  {guard.file}"
    return f"{line}\n           {outcome.detail}" if outcome.detail else line


def main(argv: Sequence[str] | None = None, *, tree: Path = TREE, lists: Path = LISTS) -> int:
    """0: each guard is proven; 1: one isn't; 2: a list can't be used."""
    parser = argparse.ArgumentParser(prog="scripts/guards", description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "names", nargs="*", metavar="NAME",
        help="guards to try, by their name, their list, the file that they are in or that of one of their tests; "
        "'*' stands for any text: 'client/ckptd/proof/*' (default: all)",
    )  # fmt: skip
    parser.add_argument(
        "--since", metavar="COMMIT",
        help="only those whose entry, file or tests' files are not as in this commit, committed or not",
    )  # fmt: skip
    parser.add_argument("--jobs", type=int, default=2, help="how many at once (default: %(default)s)")
    parser.add_argument("--list", action="store_true", help="print the names and leave")
    args = parser.parse_args(argv)
    try:
        guards = chosen(read_guards(lists), args.names)
        if args.since is not None:
            guards = changed_since(args.since, guards, tree, lists)
            if not guards:
                print(f"none of the guards asked for has changed since {args.since}")
                return 0
        if args.list:
            print(*(f"{guard.noun:10}  {guard.case:10}  {guard.name}" for guard in guards), sep="\n")
            return 0
        return _run(guards, tree, max(1, args.jobs))
    except BadList as error:
        print(f"scripts/guards: {error}", file=sys.stderr)
        return 2


def _run(guards: list[Guard], tree: Path, jobs: int) -> int:
    begun = time.monotonic()
    _import_once(tree)
    with tempfile.TemporaryDirectory(prefix="ckptd-guards-") as folder:
        copies = [Copy(tree, Path(folder) / str(number)) for number in range(min(jobs, len(guards)))]
        faults = untouched_faults(copies[0], guards)
        if faults:
            print(f"tests that fail with every guard in place prove nothing:\n{faults}")
            return 1
        outcomes = try_all(guards, copies)
    proven = sum(outcome.proven for outcome in outcomes)
    print(f"{proven} of {len(guards)} guards are proven, in {time.monotonic() - begun:.0f} s")
    return 0 if proven == len(guards) else 1


if __name__ == "__main__":
    sys.exit(main())
