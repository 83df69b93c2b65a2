"""scripts/guards: its lists fit the tree, and it tells a guard whose tests bite from one whose tests don't."""

from __future__ import annotations

import ast
import functools
import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

TREE = Path(__file__).parent.parent


def load_guards() -> Any:
    spec = importlib.util.spec_from_file_location("guards", TREE / "scripts" / "guards.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["guards"] = module  # dataclasses look their module up
    sys.path.insert(0, str(TREE / "scripts"))
    spec.loader.exec_module(module)
    return module


guards = load_guards()
LISTED = guards.read_guards(guards.LISTS)
#: By field case, one whose tests are quick: they are tried with every run of the suite, all of them by scripts/guards.
QUICK = {
    "1": "the-history-of-losses-is-copied",
    "2": "layout-is-made-anew-for-each-snapshot",
    "3": "a-slot-is-sealed-once-filled",
    "4": "tensors-are-detached",
    "5": "a-failed-copy-frees-its-slot",
    "20": "every-file-is-hashed-when-read",
    "21": "rng-is-set-last",
    "22": "loader-a-sampler-that-goes-by-fetches-is-refetched",
    "23": "another-number-of-rates-is-refused",
    "24": "a-missing-parameter-is-refused",
    "25": "every-object-is-asked-beforehand",
    "26": "cuda-states-without-cuda-are-skipped",
    "27": "a-string-that-looks-like-a-path-is-one",
    "28": "bits-are-copied-not-values",
    "29": "a-tie-goes-into-one-file",
    "30": "a-nan-metric-is-tagged",
}


@functools.cache
def functions_of(file: str) -> set[str]:
    body = ast.parse((TREE / file).read_text()).body
    return {node.name for node in body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("guard", LISTED, ids=lambda guard: guard.name)
def test_each_guard_is_in_its_file_once_and_its_tests_exist(guard: Any) -> None:
    text = (TREE / guard.file).read_text()
    assert guard.removed_from(text) != text
    ast.parse(guard.removed_from(text))
    for test in guard.tests:
        file, _, name = test.partition("::")
        assert name.partition("[")[0] in functions_of(file), test


def test_each_field_case_of_this_kind_has_a_guard() -> None:
    cases = {guard.name: guard.case for guard in LISTED}
    assert {name: cases[name] for name in QUICK.values()} == {name: case for case, name in QUICK.items()}
    assert {int(case) for case in QUICK} == {*range(1, 6), *range(20, 31)}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_guard_of_each_field_case_is_proven() -> None:
    code, said = run(TREE, *QUICK.values(), timeout_s=850)
    assert code == 0, said


ENTRY = """
[[guard]]
name = "small"
case = "1"
file = "client/ckptd/small.py"
old = "return min(a, b)"
new = "return a"
tests = ["tests/test_small.py::test_the_smaller_one"]
"""


def tree(folder: Path, listed: str, test: str) -> Path:
    """A repository with one guard, and what the script needs of one."""
    for name, text in {
        "client/ckptd/__init__.py": "",
        "client/ckptd/small.py": "def small(a, b):\n    return min(a, b)\n",
        "daemon/ckptd_daemon/__init__.py": "",
        "tests/test_small.py": f"from ckptd.small import small\n\n\ndef test_the_smaller_one():\n    {test}\n",
        "pyproject.toml": '[tool.pytest.ini_options]\naddopts = "-q --import-mode=importlib"\n',
        "scripts/guards.d/small.toml": listed,
        **{
            f"scripts/{name}": (TREE / "scripts" / name).read_text()
            for name in ("guards.py", "guard_lists.py")
        },
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    subprocess.run(["git", "init", "-q", str(folder)], check=True)
    return folder


def run(folder: Path, *names: str, timeout_s: float = 100) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, str(folder / "scripts" / "guards.py"), *names],
        capture_output=True, text=True, timeout=timeout_s, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


@pytest.mark.slow
def test_a_guard_whose_test_fails_without_it_is_proven_and_the_tree_stays_as_it_is(tmp_path: Path) -> None:
    folder = tree(tmp_path, ENTRY, "assert (small(1, 2), small(2, 1)) == (1, 1)")
    code, said = run(folder)
    assert code == 0, said
    assert re.search(r"^killed .* small ", said, re.MULTILINE)
    assert "1 of 1 guards are proven" in said
    assert "min(a, b)" in (folder / "client/ckptd/small.py").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "test", "word"),
    [
        (("", ""), "assert small(1, 2) == 1", "survived"),
        (('old = "return min(a, b)"', 'old = "return max(a, b)"'), "assert small(2, 1) == 1", "not found"),
        (('new = "return a"', 'new = "return a +"'), "assert small(2, 1) == 1", "broken"),
        (("", ""), "assert small(2, 1) == 2", "prove nothing"),
    ],
    ids=["survived", "not found", "broken", "fails anyway"],
)
def test_a_guard_that_isnt_proven_is_said_and_fails(
    change: tuple[str, str], test: str, word: str, tmp_path: Path
) -> None:
    code, said = run(tree(tmp_path, ENTRY.replace(*change) if change[0] else ENTRY, test))
    assert code == 1, said
    assert word in said


@pytest.mark.slow
def test_a_process_that_a_failed_test_leaves_is_ended(tmp_path: Path) -> None:
    left = tmp_path / "left"
    code, said = run(
        tree(
            tmp_path / "tree",
            ENTRY,
            "import multiprocessing, pathlib, time\n"
            "    child = multiprocessing.get_context('fork').Process(target=time.sleep, args=(80,), daemon=True)\n"
            "    child.start()\n"
            f"    pathlib.Path({str(left)!r}).open('a').write(f'{{child.pid}} ')\n"
            "    assert small(2, 1) == 1",
        ),
        timeout_s=60,
    )
    assert code == 0, said
    pids = left.read_text().split()
    assert len(pids) == 2
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]


@pytest.mark.parametrize(
    ("listed", "said"),
    [
        (ENTRY + ENTRY, "twice"),
        (ENTRY.replace('case = "1"\n', ""), "keys"),
        (ENTRY.replace('"return a"', '"return min(a, b)"'), "nothing would change"),
        (ENTRY.replace('["tests/test_small.py::test_the_smaller_one"]', "[]"), "one or more"),
    ],
    ids=["twice", "key", "no change", "no tests"],
)
def test_a_list_that_cant_be_used_is_refused(
    listed: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "small.toml").write_text(listed)
    assert guards.main([], tree=tmp_path, lists=tmp_path) == 2
    assert said in capsys.readouterr().err


def test_a_name_that_isnt_in_the_list_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert guards.main(["no-such-guard"]) == 2
    assert "no-such-guard" in capsys.readouterr().err


def named(said: str) -> list[str]:
    return [line.split()[-1] for line in said.splitlines()]


def test_guards_are_chosen_by_name_list_file_test_file_and_pattern(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for pattern, holds in {
        "proof": lambda guard: guard.noun == "proof",
        "rng-is-set-last": lambda guard: guard.name == "rng-is-set-last",
        "client/ckptd/proof/*": lambda guard: guard.file.startswith("client/ckptd/proof/"),
        "tests/test_rng.py": lambda guard: any(test.startswith("tests/test_rng.py:") for test in guard.tests),
    }.items():
        assert guards.main([pattern, "--list"]) == 0
        assert named(capsys.readouterr().out) == [guard.name for guard in LISTED if holds(guard)] != []


def test_since_a_commit_are_those_whose_entry_file_or_test_changed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    second = (
        ENTRY.replace('"small"', '"other"')
        .replace("small.py::", "other.py::")
        .replace("ckptd/small", "ckptd/other")
    )
    folder = tree(tmp_path, ENTRY + second, "assert True")
    commit(folder)

    def changed() -> list[str]:
        how = {"tree": folder, "lists": folder / "scripts" / "guards.d"}
        assert guards.main(["--since", "HEAD", "--list"], **how) == 0
        return named(capsys.readouterr().out)

    assert changed() == ["HEAD"]  # none has changed since HEAD
    (folder / "client/ckptd/small.py").write_text("def small(a, b):\n    return max(a, b)\n")
    assert changed() == ["small"]
    commit(folder)
    (folder / "tests/test_other.py").write_text("")
    assert changed() == ["other"]
    commit(folder)
    entries = folder / "scripts/guards.d/small.toml"
    entries.write_text(entries.read_text().replace('"return a"', '"return b"', 1))
    assert changed() == ["small"]
    (folder / "scripts/guards.d/new.toml").write_text(ENTRY.replace('"small"', '"new"'))
    assert changed() == ["new", "small"]
    assert guards.main(["--since", "no-such-commit"], tree=folder, lists=folder / "scripts" / "guards.d") == 2
    assert "no-such-commit" in capsys.readouterr().err


def commit(folder: Path) -> None:
    git = ["git", "-C", str(folder), "-c", "user.name=n", "-c", "user.email=e@x"]
    subprocess.run([*git, "add", "."], check=True)
    subprocess.run([*git, "commit", "-qm", "as it is"], check=True)


def test_which_tests_failed_is_read_from_the_summary() -> None:
    report = (
        "..F\nFAILED tests/test_a.py::test_b[x y-1] - assert 1\nFAILED tests/test_a.py::test_c\n1 failed\n"
    )
    assert guards.failed_tests(report) == {
        "tests/test_a.py::test_b", "tests/test_a.py::test_b[x y-1]", "tests/test_a.py::test_c"
    }  # fmt: skip
