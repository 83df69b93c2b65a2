"""docs/field-cases.md leads from a case to tests that exist, and names every test that says its case."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
PAGE = TESTS.parent / "docs" / "field-cases.md"
WANTED = {*range(1, 10), *range(11, 35), *range(36, 40)}


def functions_of(file: Path) -> dict[str, str]:
    """The file's tests: name → docstring."""
    tree = ast.parse(file.read_text())
    found = [
        node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    ]
    return {node.name: ast.get_docstring(node) or "" for node in found}


def rows() -> dict[int, list[str]]:
    """Case → ids of tests."""
    found = re.findall(r"^\| (\d+) \|.*\|(.*)\|$", PAGE.read_text(), re.MULTILINE)
    return {int(case): re.findall(r"`([^`]+)`", ids) for case, ids in found}


def test_every_case_has_its_row_and_every_row_its_tests() -> None:
    assert set(rows()) == WANTED
    assert all(rows().values())


@pytest.mark.parametrize("case", sorted(WANTED))
def test_every_test_on_the_page_exists(case: int) -> None:
    for test_id in rows()[case]:
        file, _, name = test_id.partition("::")
        assert name in functions_of(TESTS / file), test_id


def test_every_test_that_says_its_case_is_on_the_page() -> None:
    for file in sorted(TESTS.glob("test_field_*.py")):
        for name, doc in functions_of(file).items():
            said = re.match(r"Field cases? ([\d, and]+)", doc)
            for case in map(int, re.findall(r"\d+", said[1] if said else "")):
                assert case not in WANTED or f"{file.name}::{name}" in rows()[case], (case, name)
