from __future__ import annotations

import json

import pytest

from ckptd_daemon.cli import output
from ckptd_daemon.cli.output import Cell


class _Terminal:
    def __init__(self, is_terminal: bool) -> None:
        self.is_terminal, self.text = is_terminal, ""

    def isatty(self) -> bool:
        return self.is_terminal

    def write(self, text: str) -> None:
        self.text += text


ROWS = [
    [Cell("step-000000100"), Cell("1536", "1.5 KiB"), Cell("verified", colour="green")],
    [Cell("step-000000200"), Cell("12", "12 B"), Cell("corrupt", colour="red")],
]


def test_a_pipe_gets_raw_values_separated_by_tabs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout", _Terminal(False))
    assert output.table(["NAME", "BYTES", "STATE"], ROWS) == (
        "step-000000100\t1536\tverified\nstep-000000200\t12\tcorrupt\n"
    )


def test_a_terminal_gets_aligned_columns_under_headers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout", _Terminal(True))
    monkeypatch.setenv("NO_COLOR", "1")
    assert output.table(["NAME", "BYTES", "STATE"], ROWS).splitlines() == [
        "NAME            BYTES    STATE",
        "step-000000100  1.5 KiB  verified",
        "step-000000200  12 B     corrupt",
    ]


def test_colour_is_for_terminals_and_doesnt_change_the_alignment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout", _Terminal(True))
    monkeypatch.delenv("NO_COLOR", raising=False)
    last = output.table(["NAME", "BYTES", "STATE"], ROWS).splitlines()[-1]
    assert last == "step-000000200  12 B     \x1b[31mcorrupt\x1b[0m"


def test_control_characters_of_a_hostile_name_never_reach_the_terminal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    hostile = "a\x1b[2Jb\nc\u202ed\udc80"
    assert output.printable(hostile) == "a\\x1b[2Jb\\nc\\u202ed\\udc80"
    output.note(hostile)
    assert capsys.readouterr().err == "ckptd: a\\x1b[2Jb\\nc\\u202ed\\udc80\n"
    assert "\x1b[2J" not in output.table(["X"], [[Cell(hostile)]])


def test_json_is_one_object_with_its_schema_first(capsys: pytest.CaptureFixture[str]) -> None:
    output.emit_json("ckpt.v2-thing", {"bytes": 2**60, "name": "é\x1b"})
    text = capsys.readouterr().out
    assert json.loads(text) == {"schema": "ckpt.v2-thing", "bytes": 2**60, "name": "é\x1b"}
    assert "\x1b" not in text and text.lstrip("{ \n").startswith('"schema"')


def test_json_refuses_what_isnt_json() -> None:
    with pytest.raises(ValueError, match="JSON compliant"):
        output.emit_json("x", {"loss": float("nan")})
