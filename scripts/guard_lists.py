"""The lists of guards, and which of them are asked for.

The lists are scripts/guards.d/NOUN.toml, one table each:

    [[guard]]
    name = "rng-captured-first"     # unique in all lists
    case = "21"                     # a field case, or the topic in a word
    file = "client/ckptd/…"         # the file that has the guard
    old = "…"                       # its text, found exactly once in that file
    new = "…"                       # the same without the guard
    tests = ["tests/test_x.py::test_y"]   # each of them must fail; of a parametrised one at least one case
"""

from __future__ import annotations

import subprocess
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

KEYS = ("name", "case", "file", "old", "new", "tests")


class BadList(Exception):
    """A list can't be used."""


@dataclass(frozen=True)
class Guard:
    """One entry of a list."""

    noun: str
    name: str
    case: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    def removed_from(self, text: str) -> str:
        """text without the guard.

        Raises:
            BadList: The guard isn't in it exactly once.
        """
        found = text.count(self.old)
        if found != 1:
            raise BadList(f"its text is found {found} times in {self.file}, wanted once")
        return text.replace(self.old, self.new)


def read_guards(folder: Path) -> list[Guard]:
    """What the lists in this folder have.

    Raises:
        BadList: A key is missing, unknown or of another type, or a name comes twice.
    """
    guards = [
        guard
        for path in sorted(folder.glob("*.toml"))
        for guard in _read(path.read_text(encoding="utf-8"), path.stem)
    ]
    names = [guard.name for guard in guards]
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise BadList(f"twice in the lists: {', '.join(sorted(twice))}")
    return guards


def _read(text: str, noun: str) -> list[Guard]:
    rows = tomllib.loads(text).get("guard", [])
    return [_guard(row, noun, number) for number, row in enumerate(rows, 1)]


def _guard(row: dict[str, Any], noun: str, number: int) -> Guard:
    where = f"guard {number} of {noun} ({row.get('name', 'no name')})"
    if set(row) != set(KEYS):
        raise BadList(f"{where} has the keys {sorted(row)}, wanted {sorted(KEYS)}")
    texts = [row[key] for key in KEYS if key != "tests"]
    tests = row["tests"]
    if not all(type(text) is str for text in texts) or not isinstance(tests, list) or not tests:
        raise BadList(f"{where}: all are strings but tests, a list of one or more")
    if row["old"] == row["new"] or not row["old"]:
        raise BadList(f"{where}: nothing would change")
    return Guard(noun, *texts, tuple(tests))


def chosen(guards: list[Guard], patterns: Sequence[str]) -> list[Guard]:
    """Those that one of the patterns fits, by name, list, file or test file; all without one.

    Raises:
        BadList: A pattern fits none.
    """
    fitting = [[guard for guard in guards if _fits(guard, pattern)] for pattern in patterns]
    unknown = sorted({pattern for pattern, found in zip(patterns, fitting, strict=True) if not found})
    if unknown:
        raise BadList(f"not in the lists: {', '.join(unknown)}")
    return [guard for guard in guards if not patterns or any(guard in found for found in fitting)]


def _fits(guard: Guard, pattern: str) -> bool:
    return any(fnmatchcase(text, pattern) for text in (guard.name, guard.noun, *_files_of(guard)))


def _files_of(guard: Guard) -> Iterator[str]:
    yield guard.file
    yield from (test.partition("::")[0] for test in guard.tests)


def changed_since(commit: str, guards: list[Guard], tree: Path, lists: Path) -> list[Guard]:
    """Those whose entry, file or tests' files aren't what they are in the commit. What tests import isn't looked at.

    Raises:
        BadList: git knows no such commit.
    """
    changed = {*_git(tree, "diff", "--name-only", "-z", commit, "--").split("\0")}
    changed |= {*_git(tree, "ls-files", "-oz", "--exclude-standard").split("\0")}
    known: set[Guard] = set()
    for path in sorted(lists.glob("*.toml")):
        name = path.relative_to(tree).as_posix()
        if name not in changed:
            known |= set(_read(path.read_text(encoding="utf-8"), path.stem))
        elif _git(tree, "ls-tree", "--name-only", commit, "--", name):
            known |= set(_read(_git(tree, "show", f"{commit}:{name}"), path.stem))
    return [guard for guard in guards if guard not in known or not changed.isdisjoint(_files_of(guard))]


def _git(tree: Path, *words: str) -> str:
    done = subprocess.run(["git", "-C", str(tree), *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise BadList(f"git {words[0]}: {done.stderr.strip()}")
    return done.stdout
