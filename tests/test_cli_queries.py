"""`ckptd list, latest, show, verify, status` on a root of real checkpoints, without a daemon."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from ckptd.disk.commit import Committed
from ckptd_daemon.cli import main
from made_series import Made, flip_byte

Capsys = pytest.CaptureFixture[str]


class Indexed(Made):
    """As the daemon: the run's index, which holds the verified marks, is written after every change."""

    def commit(self, step: int, **how: Any) -> Committed:
        committed = super().commit(step, **how)
        self.catalogue.write_index()
        return committed


@pytest.fixture
def made(tmp_path: Path) -> Made:
    return Indexed(tmp_path / "root")


def run(capsys: Capsys, command: str, made: Made, *argv: str) -> tuple[int, str, str]:
    code = main.main([command, "--root", str(made.root.path), *argv])
    out, err = capsys.readouterr()
    return code, out, err


def tree(folder: Path) -> dict[str, tuple[int, int, int]]:
    """Inode, size and time of everything below a folder."""
    found = {}
    for path in [folder, *folder.rglob("*")]:
        status = path.lstat()
        found[str(path)] = (status.st_ino, status.st_size, status.st_mtime_ns)
    return found


# --- latest ---------------------------------------------------------------------------------------


def test_latest_prints_the_bare_path_and_nothing_else(capsys: Capsys, made: Made) -> None:
    made.commit(100, verify=True)
    newest = made.commit(200, verify=True)
    assert run(capsys, "latest", made, "--run", "r") == (0, f"{made.dir / newest.name}\n", "")


def test_latest_says_on_stderr_what_it_passed_over_and_why(capsys: Capsys, made: Made) -> None:
    good = made.commit(100)
    bad = made.commit(200)
    flip_byte(made.dir / bad.name / "ckpt.pt")
    code, out, err = run(capsys, "latest", made, "--run", "r")
    assert (code, out) == (0, f"{made.dir / good.name}\n")
    assert f"passed over {bad.name}: ckpt.pt: wrong sha256" in err


@pytest.mark.parametrize("selector", [("latest",), ("best", "--monitor", "loss:min")])
def test_a_selector_says_what_it_verified_and_passed_over(
    capsys: Capsys, made: Made, selector: tuple[str, ...]
) -> None:
    good = made.commit(100, metrics={"loss": 2.0})
    bad = made.commit(200, metrics={"loss": 1.0})
    flip_byte(made.dir / bad.name / "ckpt.pt")
    code, out, err = run(capsys, "show", made, "--run", "r", *selector)
    assert code == 0 and good.name in out
    assert f"verifying {bad.name}" in err and f"passed over {bad.name}" in err


def test_latest_as_json_has_schema_raw_numbers_and_utc(capsys: Capsys, made: Made) -> None:
    made.commit(100, verify=True, metrics={"loss": 0.5, "bad": float("nan")})
    code, out, _ = run(capsys, "latest", made, "--run", "r", "--json")
    found = json.loads(out)
    assert code == 0
    assert (found["schema"], found["step"], found["saved_at"]) == (
        "ckpt.v2-latest",
        100,
        "1970-01-01T00:00:01Z",
    )
    assert found["metrics"] == {"loss": 0.5, "bad": {"__float__": "nan"}} and found["passed_over"] == []


def test_latest_of_a_run_without_checkpoints_is_nothing_there(capsys: Capsys, made: Made) -> None:
    code, out, err = run(capsys, "latest", made, "--run", "nobody")
    assert (code, out) == (3, "") and err.count("\n") == 1 and "nobody" in err


@pytest.mark.parametrize(
    "argv",
    [
        ("latest",), ("latest", "--no-wait"), ("show", "latest"), ("show", "best", "--monitor", "x:min"),
        ("show", "100"), ("verify", "100"), ("verify", "--all", "--run", "default"), ("list", "--run", "default"),
    ],
)  # fmt: skip
def test_a_run_that_has_nothing_is_said_with_the_runs_there_are(
    capsys: Capsys, made: Made, argv: tuple[str, ...]
) -> None:
    made.commit(100, verify=True)
    code, out, err = run(capsys, argv[0], made, *argv[1:])
    assert (code, out) == (3, "")
    assert "run default" in err and "runs there: r; choose one with --run" in err


def test_a_step_that_lies_in_quarantine_is_said_to_lie_there(capsys: Capsys, made: Made) -> None:
    made.commit(100, verify=True)
    where = quarantined(made, 200)
    code, _, err = run(capsys, "show", made, "--run", "r", "200")
    assert code == 3 and f"it failed its check and lies in {where}" in err


def test_latest_when_all_are_corrupt_is_an_error_of_its_own(capsys: Capsys, made: Made) -> None:
    for step in (100, 200):
        flip_byte(made.dir / made.commit(step).name / "ckpt.pt")
    code, out, err = run(capsys, "latest", made, "--run", "r")
    assert (code, out) == (4, "")
    assert "step-000000100" in err and "step-000000200" in err


def test_latest_without_waiting_answers_with_what_is_verified(capsys: Capsys, made: Made) -> None:
    verified = made.commit(100, verify=True)
    made.commit(200)
    code, out, err = run(capsys, "latest", made, "--run", "r", "--no-wait")
    assert (code, out) == (0, f"{made.dir / verified.name}\n")
    assert "passed over step-000000200: not verified yet" in err


def test_latest_without_waiting_doesnt_take_unverified_for_none_silently(capsys: Capsys, made: Made) -> None:
    made.commit(100)
    code, out, err = run(capsys, "latest", made, "--run", "r", "--no-wait")
    assert (code, out) == (3, "") and "--no-wait" in err


def test_the_run_comes_from_the_environment_when_no_flag_names_it(
    capsys: Capsys, made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    made.commit(100, verify=True)
    monkeypatch.setenv("CKPTD_RUN", "r")
    assert run(capsys, "latest", made)[0] == 0
    assert run(capsys, "latest", made, "--run", "other")[0] == 3


# --- list -----------------------------------------------------------------------------------------


def test_list_shows_every_checkpoint_with_its_state(capsys: Capsys, made: Made) -> None:
    made.commit(100, verify=True, metrics={"loss": 0.25})
    made.commit(200)
    broken = made.commit(300)
    (made.dir / broken.name / "index.json").write_text("{}")
    code, out, err = run(capsys, "list", made)
    rows = [line.split("\t") for line in out.splitlines()]
    assert (code, err) == (0, "")
    assert [(row[0], row[1], row[2], row[4]) for row in rows] == [
        ("r", "step-000000100", "100", "verified"),
        ("r", "step-000000200", "200", "committed"),
        ("r", "step-000000300", "300", "corrupt"),
    ]
    assert rows[0][7] == "loss=0.25" and "schema" in rows[2][8]


def test_list_says_which_ones_are_abandoned(capsys: Capsys, made: Made) -> None:
    base = made.commit(100, verify=True)
    made.commit(200, verify=True)
    made.commit(150, base=base.index.sequence, client_id="d" * 32, verify=True)
    rows = {line.split("\t")[1]: line.split("\t")[8] for line in run(capsys, "list", made)[1].splitlines()}
    assert rows == {"step-000000100": "", "step-000000200": "abandoned", "step-000000150": ""}


def test_list_says_which_one_changed_since_it_was_verified_and_how_to_check_it(
    capsys: Capsys, made: Made
) -> None:
    names = [made.commit(step, verify=True).name for step in (100, 200)]
    flip_byte(made.dir / names[1] / "ckpt.pt")
    rows = [line.split("\t") for line in run(capsys, "list", made)[1].splitlines()]
    assert [row[4] for row in rows] == ["verified", "changed"]
    assert rows[1][8] == f"not the files that were verified: ckptd verify --run r {names[1]}"
    assert run(capsys, "verify", made, "--run", "r", names[1])[0] == 4  # the command it names
    found = json.loads(run(capsys, "list", made, "--json")[1])["runs"][0]["checkpoints"]
    assert [entry["state"] for entry in found] == ["verified", "changed"]


def quarantined(made: Made, step: int) -> str:
    """Commit one that turns out corrupt; where it lies then, below the run's folder."""
    bad = made.commit(step)
    flip_byte(made.dir / bad.name / "ckpt.pt")
    assert made.verify(bad.name) == "corrupt"
    made.catalogue.write_index()
    return f"quarantine/{next((made.dir / 'quarantine').glob(f'{bad.name}*')).name}"


def test_list_shows_what_lies_in_quarantine_and_where(capsys: Capsys, made: Made) -> None:
    good = made.commit(100, verify=True)
    where = quarantined(made, 200)
    rows = [line.split("\t") for line in run(capsys, "list", made)[1].splitlines()]
    assert [(row[1], row[3], row[4]) for row in rows] == [
        (good.name, "1", "verified"),
        ("step-000000200", "2", "quarantined"),
    ]
    assert where in rows[1][8]
    found = json.loads(run(capsys, "list", made, "--json")[1])["runs"][0]["checkpoints"][1]
    assert (found["state"], found["sequence"], found["path"]) == ("quarantined", 2, str(made.dir / where))


def test_show_and_status_say_how_many_lie_in_quarantine(capsys: Capsys, made: Made) -> None:
    made.commit(100, verify=True)
    assert "quarantine" not in run(capsys, "show", made, "--run", "r", "100")[1]
    quarantined(made, 200)
    assert "quarantine\tholds 1 corrupt" in run(capsys, "show", made, "--run", "r", "100")[1]
    assert json.loads(run(capsys, "show", made, "--run", "r", "100", "--json")[1])["quarantined"] == 1
    assert "1 in quarantine, see ckptd list" in run(capsys, "status", made)[1]
    assert made.catalogue.summary()["quarantined"] == 1  # what a daemon answers


def test_list_as_json_has_raw_bytes(capsys: Capsys, made: Made) -> None:
    committed = made.commit(100, verify=True)
    found = json.loads(run(capsys, "list", made, "--json")[1])
    [entry] = found["runs"][0]["checkpoints"]
    assert found["schema"] == "ckpt.v2-list"
    assert (entry["bytes"], entry["state"]) == (committed.index.total_bytes, "verified")


def test_list_of_an_empty_root_is_nothing_there_and_still_json(capsys: Capsys, tmp_path: Path) -> None:
    code = main.main(["list", "--json", "--root", str(tmp_path)])
    out, err = capsys.readouterr()
    assert (code, json.loads(out)["runs"]) == (3, []) and "no checkpoints" in err


def test_a_hostile_reason_in_an_index_cant_move_the_cursor(capsys: Capsys, made: Made) -> None:
    broken = made.commit(100)
    (made.dir / broken.name / "index.json").write_text('{"schema": "\\u001b[2J"}')
    _, out, _ = run(capsys, "list", made)
    assert "\x1b" not in out


# --- show -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("selector", ["latest", "200", "200.1"])
def test_show_finds_a_checkpoint_by_selector(capsys: Capsys, made: Made, selector: str) -> None:
    made.commit(100, verify=True)
    newest = made.commit(200, verify=True, metrics={"loss": 0.125})
    code, out, err = run(capsys, "show", made, "--run", "r", selector)
    assert (code, err) == (0, "")
    assert (
        f"path\t{made.dir / newest.name}\n" in out
        and "metric loss\t0.125\n" in out
        and "ckpt.pt\tckpt\t" in out
    )


def test_show_takes_a_path_without_a_root(
    capsys: Capsys, made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CKPTD_ROOT", raising=False)
    committed = made.commit(100, shards=2)
    assert main.main(["show", str(made.dir / committed.name), "--tensors", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["schema"], found["layout"], found["step"]) == ("ckpt.v2-show", "sharded", 100)
    assert [tensor["key"] for tensor in found["tensors"]] == [["model", "w"]]
    assert found["files"][0]["path"] == "meta.pt"


def test_show_best_uses_the_metric_of_the_flag(capsys: Capsys, made: Made) -> None:
    best = made.commit(100, metrics={"loss": 0.1})
    made.commit(200, metrics={"loss": 0.9})
    _, out, _ = run(capsys, "show", made, "--run", "r", "best", "--monitor", "loss:min", "--json")
    assert json.loads(out)["name"] == best.name


def test_show_best_by_no_metric_is_a_usage_error(capsys: Capsys, made: Made) -> None:
    made.commit(100)
    code, _, err = run(capsys, "show", made, "--run", "r", "best")
    assert code == 2
    assert err == (
        "ckptd: no metric to choose the best checkpoint by: the policy of run r names none; "
        "give --monitor NAME:min or NAME:max\n"
    )


@pytest.mark.parametrize(
    ("selector", "exit_code"), [("300", 3), ("/nowhere/at/all", 3), ("nonsense", 2), ("-5", 2), ("1200.0", 2)]
)
def test_a_selector_that_fits_nothing_is_said(
    capsys: Capsys, made: Made, selector: str, exit_code: int
) -> None:
    made.commit(100)
    code, out, err = run(capsys, "show", made, "--run", "r", selector)
    assert (code, out) == (exit_code, "") and err.count("\n") == 1


def test_show_refuses_a_changed_index(capsys: Capsys, made: Made) -> None:
    committed = made.commit(100)
    flip_byte(made.dir / committed.name / "index.json")
    assert run(capsys, "show", made, "--run", "r", "100")[0] == 4


def test_show_refuses_a_changed_tensor_table(capsys: Capsys, made: Made) -> None:
    committed = made.commit(100)
    flip_byte(made.dir / committed.name / "tensors.json")
    assert run(capsys, "show", made, "--run", "r", "100")[0] == 0
    assert run(capsys, "show", made, "--run", "r", "100", "--tensors")[0] == 4


# --- verify ---------------------------------------------------------------------------------------


def test_verify_reads_all_and_names_every_fault(capsys: Capsys, made: Made) -> None:
    made.commit(100)
    bad = made.commit(200, shards=2)
    flip_byte(made.dir / bad.name / "meta.pt")
    (made.dir / bad.name / "tensors.json").unlink()
    code, out, err = run(capsys, "verify", made, "--all")
    assert code == 4
    assert [line.split("\t")[1] for line in out.splitlines()] == ["valid", "corrupt"]
    assert "meta.pt: wrong sha256" in err and "tensors.json: is missing" in err


def test_verify_says_a_fault_once_to_who_sees_both_streams(
    capsys: Capsys, made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    flip_byte(made.dir / made.commit(100).name / "ckpt.pt")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    code, out, err = run(capsys, "verify", made, "--run", "r", "100")
    assert code == 4
    assert (out + err).count("wrong sha256") == 1 and out.count("wrong sha256") == 1


@pytest.mark.parametrize("file", ["ckpt.pt", "index.json", "tensors.json"])
def test_any_flipped_byte_is_found(capsys: Capsys, made: Made, file: str) -> None:
    path = made.dir / made.commit(100).name / file
    assert run(capsys, "verify", made, "--run", "r", "100")[0] == 0
    for offset in range(0, path.stat().st_size, max(1, path.stat().st_size // 40)):
        flip_byte(path, offset, keep_times=True)
        assert run(capsys, "verify", made, "--run", "r", "100")[0] == 4, offset
        flip_byte(path, offset, keep_times=True)


def test_verify_as_json(capsys: Capsys, made: Made) -> None:
    committed = made.commit(100)
    found = json.loads(run(capsys, "verify", made, "--run", "r", "latest", "--json")[1])
    [entry] = found["checkpoints"]
    assert (found["schema"], entry["state"], entry["faults"]) == ("ckpt.v2-verify", "valid", [])
    assert entry["bytes"] == committed.index.total_bytes and entry["read"] in ("direct", "dontneed", "cached")


def test_verify_wants_to_know_what(capsys: Capsys, made: Made) -> None:
    code, _, err = run(capsys, "verify", made)
    assert code == 2
    assert err == "ckptd: no checkpoint named; give latest, best, a step such as 1200, a path, or --all\n"
    code, _, err = run(capsys, "verify", made, "--all", "100")
    assert (code, err) == (2, "ckptd: --all goes without SEL: 100; give one of them\n")
    assert run(capsys, "verify", made, "--all")[0] == 3


# --- without a daemon -----------------------------------------------------------------------------


def test_status_without_a_daemon_says_what_the_disk_says_and_leaves_with_5(
    capsys: Capsys, made: Made
) -> None:
    made.commit(100, verify=True)
    made.commit(200)
    code, out, err = run(capsys, "status", made)
    assert code == 5 and "no daemon" in err and err.count("\n") == 1
    assert out == "daemon\tnone\nr\t-\t0\tstep-000000200\tstep-000000100\t0\t\n"
    code, out, _ = run(capsys, "status", made, "--json")
    assert (code, json.loads(out)["daemon"]) == (5, None)


@pytest.mark.parametrize(
    "argv", [("list",), ("latest",), ("show", "100"), ("verify", "--all"), ("status",), ("stop",), ("drain",)]
)
def test_no_query_changes_anything_on_disk(capsys: Capsys, made: Made, argv: tuple[str, ...]) -> None:
    made.commit(100, verify=True)
    flip_byte(made.dir / made.commit(200).name / "ckpt.pt")
    before = tree(made.root.path)
    run(capsys, argv[0], made, *argv[1:])
    assert tree(made.root.path) == before


def test_queries_work_on_a_read_only_copy_that_no_writer_ever_used(
    capsys: Capsys, made: Made, tmp_path: Path
) -> None:
    made.commit(100)
    copy = tmp_path / "copy"
    copy.mkdir()
    os.rename(made.dir, copy / "r")
    before = tree(copy)
    for argv in (["list"], ["latest", "--run", "r"], ["verify", "--all"]):
        assert main.main([*argv, "--root", str(copy)]) == 0
    assert main.main(["status", "--root", str(copy)]) == 5
    capsys.readouterr()
    assert tree(copy) == before
