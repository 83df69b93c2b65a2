"""Where a job is: what another process can find, and what is refused with what to do instead."""

from __future__ import annotations

import functools
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import jobs_exact
import jobs_faulty
from ckptd.errors import InvalidArgument
from ckptd.proof.job import JobAddress, address_of, load_job, parse_address


class Jobs:
    @staticmethod
    def make() -> None:
        """A static method is found by its qualified name."""


def top_level() -> None:
    """A function of this file, which pytest imports under a name that no other process knows."""


def test_a_function_of_a_module_is_found_by_the_modules_name() -> None:
    address = address_of(jobs_exact.make_job)
    assert address == JobAddress("jobs_exact", "make_job") and str(address) == "jobs_exact:make_job"
    assert load_job(address) is jobs_exact.make_job


def test_a_module_that_another_process_cant_import_by_name_is_found_by_its_file() -> None:
    for job, name in ((top_level, "top_level"), (Jobs.make, "Jobs.make")):
        address = address_of(job)
        assert address.function == name
        assert address.place in (__name__, str(Path(__file__)))


def closure() -> Any:
    def make_job() -> None:
        pass

    return make_job


@pytest.mark.parametrize(
    ("job", "said"),
    [
        (lambda: None, "a lambda, or a function inside another"),
        (closure(), "a lambda, or a function inside another"),
        (functools.partial(jobs_faulty.needs_an_argument, 3), "not a function"),
        (Jobs(), "not a function"),
        (7, "not a function"),
        (functools.wraps(jobs_exact.make_job)(lambda: None), "not the function of this name in its module"),
        (jobs_faulty.needs_an_argument, "needs arguments"),
    ],
)
def test_what_another_process_cant_find_or_call_is_refused_with_what_to_do(job: Any, said: str) -> None:
    with pytest.raises(InvalidArgument, match=said) as caught:
        address_of(job)
    assert caught.value.todo


def test_a_function_typed_at_a_prompt_is_refused() -> None:
    program = (
        "import ckptd\n"
        "def make_job(): pass\n"
        "try: ckptd.check_resume(make_job, steps=5)\n"
        "except ckptd.CkptdError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=250)
    assert "a function that is in no file (a notebook, a prompt, python -c)" in done.stdout, done.stderr
    assert "write it as a function at the top of a file" in done.stdout


@pytest.mark.parametrize(
    "text", ["", "train", "train.py", ":f", "train.py:", "a b:f", "train.py:f()", "train.py:<lambda>", "a..b:f", "a/b:f"]
)  # fmt: skip
def test_a_text_that_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgument):
        parse_address(text)


def test_a_file_is_absolute_runs_as_a_module_and_not_as_main(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a_job.py").write_text(
        "import sys\nname = __name__\ndef make_job(): return name, sys.modules[name].make_job is make_job\n"
        "if __name__ == '__main__': raise SystemExit('run as main')\n"
    )
    monkeypatch.chdir(tmp_path)
    address = parse_address("a_job.py:make_job")
    assert (
        address == JobAddress(str(tmp_path / "a_job.py"), "make_job") and str(address) == "a_job.py:make_job"
    )
    try:
        assert load_job(address)() == ("a_job", True)
    finally:
        sys.modules.pop("a_job", None)


def test_a_file_of_a_name_that_is_taken_is_loaded_beside_it(tmp_path: Path) -> None:
    (tmp_path / "json.py").write_text("def make_job(): return __name__\n")
    try:
        assert load_job(parse_address(f"{tmp_path}/json.py:make_job"))() == "_job_json"
    finally:
        sys.modules.pop("_job_json", None)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("nowhere.py:f", "no such file"),
        ("no_such_module_of_mine:f", "no such module"),
        ("no_such.module:f", "no such module"),
        ("jobs_exact:nothing", "no such function"),
        ("jobs_exact:SAMPLES", "no such function"),
        ("jobs_faulty:needs_an_argument", "needs arguments"),
    ],
)
def test_what_isnt_there_is_said(text: str, said: str) -> None:
    with pytest.raises(InvalidArgument, match=said):
        load_job(parse_address(text))
