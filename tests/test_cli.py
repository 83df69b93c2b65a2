"""The command line as such: parsing, dispatch, one line for every error and its exit code."""

from __future__ import annotations

import errno
import types

import pytest

from ckptd import errors
from ckptd_daemon.cli import main, parser


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    code = main.main(argv)
    out, err = capsys.readouterr()
    return code, out, err


def _raising(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def fail(_args: object) -> int:
        raise error

    monkeypatch.setattr(main.importlib, "import_module", lambda _name: types.SimpleNamespace(run=fail))


ALL_ERRORS = sorted(errors.BY_NAME.items())


@pytest.mark.parametrize(
    "argv", [(), ("dance",), ("list", "--colour"), ("show",), ("start", "--keep-every", "6h")]
)
def test_a_usage_error_is_one_line_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], argv: tuple[str, ...]
) -> None:
    code, out, err = run(capsys, *argv)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1 and err.startswith("ckptd: ") and "--help" in err


def test_flags_arent_abbreviated(capsys: pytest.CaptureFixture[str]) -> None:
    # An abbreviation that works today would change its meaning when a longer flag is added.
    assert run(capsys, "start", "--keep-l", "3", "--root", "/nowhere")[0] == 2


def test_the_version_needs_no_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "--version") == (0, "ckptd 0.1.0\n", "")


@pytest.mark.parametrize("command", sorted(parser.MODULES))
def test_every_command_explains_itself(capsys: pytest.CaptureFixture[str], command: str) -> None:
    with pytest.raises(SystemExit) as stop:
        main.main([command, "--help"])
    assert stop.value.code == 0
    assert f"usage: ckptd {command}" in capsys.readouterr().out


@pytest.mark.parametrize(("name", "cls"), ALL_ERRORS, ids=[name for name, _ in ALL_ERRORS])
def test_an_error_becomes_one_line_and_its_own_exit_code(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    cls: type[errors.CkptdError],
) -> None:
    _raising(monkeypatch, cls("what\nhappened", where="/x", seen="1", wanted="2", todo="do this"))
    code, out, err = run(capsys, "list", "--root", "/nowhere")
    assert (code, out) == (cls.exit_code, "")
    assert err == "ckptd: /x: what\\nhappened: 1, wanted 2; do this\n"


def test_the_exit_codes_are_those_of_the_design() -> None:
    def code(*names: str) -> set[int]:
        return {errors.BY_NAME[name].exit_code for name in names}

    assert code("SaveFailed", "UnstorableState", "ProtocolError", "CkptdError") == {1}
    assert code("InvalidArgument", "BadRoot") == {2}
    assert code("NothingThere", "CheckpointGone") == {3}
    assert code("CorruptCheckpoint", "UnknownSchema", "NoValidCheckpoint") == {4}
    assert code("NoDaemon") == {5}
    assert code("RootLocked", "RunTaken") == {6}
    assert code("TimedOut", "OutcomeUnknown") == {7}
    assert code("NoSpace", "SharedMemoryTooSmall") == {8}


def test_an_error_of_the_system_is_one_line_too(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _raising(monkeypatch, PermissionError(errno.EACCES, "Permission denied", "/root/secret"))
    assert run(capsys, "list", "--root", "/x") == (1, "", "ckptd: /root/secret: Permission denied\n")


def test_no_space_of_the_system_has_the_exit_code_of_no_space(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _raising(monkeypatch, OSError(errno.ENOSPC, "No space left on device", "/x/log"))
    assert run(capsys, "list", "--root", "/x")[0] == errors.NoSpace.exit_code


def test_an_interrupt_is_quiet(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    _raising(monkeypatch, KeyboardInterrupt())
    assert run(capsys, "list", "--root", "/x") == (130, "", "")


@pytest.mark.parametrize("command", ["start", "stop", "drain", "status", "list", "latest"])
def test_a_command_without_a_root_says_how_to_name_one(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.delenv("CKPTD_ROOT", raising=False)
    code, out, err = run(capsys, command)
    assert (code, out) == (2, "")
    assert "--root" in err and "CKPTD_ROOT" in err and err.count("\n") == 1
