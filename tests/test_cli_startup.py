"""The queries people put into prompts and scripts start quickly: no torch, no numpy, little more than Python itself."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest

from made_series import Made

QUERIES = [["status"], ["list"], ["latest", "--run", "r"]]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    made = Made(tmp_path / "root")
    made.commit(100, verify=True)
    made.catalogue.write_index()
    return made.root.path


@pytest.mark.parametrize("query", QUERIES, ids=lambda query: query[0])
def test_a_query_loads_no_heavy_module(root: Path, query: list[str]) -> None:
    program = (
        "import sys\n"
        "from ckptd_daemon.cli.main import main\n"
        "code = main(sys.argv[1:])\n"
        "heavy = {'torch', 'numpy', 'watchdog', 'ckptd.client', 'ckptd_daemon.core.server'} & set(sys.modules)\n"
        "sys.exit(f'loaded {heavy}' if heavy else code)\n"
    )
    command = [sys.executable, "-c", program, *query, "--root", str(root)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode in (0, 5), done.stderr


#: What each of them takes of the standard library, and msgspec: on a busy machine that takes longer in the same measure.
STANDARD = "import argparse, dataclasses, hashlib, json, logging, pathlib, subprocess, tempfile, msgspec"


def processor_seconds(*arguments: str) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, *arguments], capture_output=True, timeout=250, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


@pytest.mark.slow
@pytest.mark.parametrize("query", QUERIES, ids=lambda query: query[0])
def test_a_query_takes_a_few_times_what_its_standard_imports_take_and_no_more(
    root: Path, query: list[str]
) -> None:
    """Of the processor, the best of several, in turn."""
    command = ("-m", "ckptd_daemon.cli.main", *query, "--root", str(root))
    took = [(processor_seconds(*command), processor_seconds("-c", STANDARD)) for _ in range(7)]
    assert min(asked for asked, _ in took) < 4 * min(standard for _, standard in took), took
