"""Field cases 5 and 6 end to end: what can't be stored, and what the newest checkpoints' damage leads to."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptd
from ckptd.errors import CheckpointWarning, NoValidCheckpoint, RestoreFailed, UnstorableState
from ckptd_places import daemon_of, end_daemon, places
from fake_daemon import wait_until
from run_damage import DAMAGES, quarantine
from snapshots import Writer

__all__ = ["places"]

NAMES = [f"step-{step:09d}" for step in (1, 2, 3)]


@pytest.fixture
def root(places: Path) -> Iterator[Path]:
    yield places


def state_of(step: int) -> dict[str, Any]:
    return {"model": {"w": torch.full((64,), float(step)), "b": torch.arange(16)}, "counter": step}


@pytest.fixture(scope="module")
def master(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root with three checkpoints of two shards each; tests copy it."""
    root = tmp_path_factory.mktemp("master") / "root"
    with ckptd.Client(root, daemon="off", sharding=ckptd.Sharding(shards=2)) as client:
        for step in (1, 2, 3):
            client.snapshot(step, state_of(step))
    return root


def run_dir(root: Path, master: Path) -> Path:
    shutil.copytree(master, root, symlinks=True)
    return root / "default"


def restored(root: Path, mode: str) -> tuple[int, list[str]]:
    """The step that a new client restores and the names it passed over, every value checked."""
    state = state_of(99)
    with ckptd.Client(root, daemon=mode) as client:  # type: ignore[arg-type]
        resumed = client.restore(state)
    assert resumed is not None, "a silent fresh start"
    wanted = state_of(resumed.step)
    assert torch.equal(state["model"]["w"], wanted["model"]["w"])
    assert state["counter"] == resumed.step
    assert all(passed.reason for passed in resumed.passed_over)
    return resumed.step, [passed.name for passed in resumed.passed_over]


def latest(root: Path) -> tuple[int, list[str]]:
    found = ckptd.latest_valid(root)
    assert found is not None, "a silent fresh start"
    assert all(passed.reason for passed in found.passed_over)
    return found.step, [passed.name for passed in found.passed_over]


def damage_newest(run: Path, kinds: list[str]) -> list[str]:
    """Damage as many of the newest as kinds are given, the newest first; the names still to be passed over."""
    hurt = NAMES[::-1][: len(kinds)]
    for name, kind in zip(hurt, kinds, strict=True):
        DAMAGES[kind](run / name)
    return [name for name in hurt if (run / name).exists()]


@pytest.mark.filterwarnings("ignore::ckptd.errors.CheckpointWarning")  # test_client.py sees to its words
@pytest.mark.parametrize("kind", sorted(DAMAGES))
def test_without_a_daemon_one_damaged_leads_to_the_second_and_two_to_the_third(
    root: Path, master: Path, kind: str
) -> None:
    """Field case 6: through latest_valid and Client.restore, each with the reason."""
    run = run_dir(root, master)
    passed = damage_newest(run, [kind])
    assert latest(root) == restored(root, "off") == (2, passed)
    shutil.rmtree(root)
    run = run_dir(root, master)
    passed = damage_newest(run, [kind, "a bit in the data"])
    assert latest(root) == restored(root, "off") == (1, passed)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::ckptd.errors.CheckpointWarning")
@pytest.mark.parametrize("kind", sorted(DAMAGES))
def test_beside_a_daemon_one_damaged_leads_to_the_second_and_two_to_the_third(
    root: Path, master: Path, kind: str
) -> None:
    """Field case 6 with a daemon that verified all of it before: it may quarantine what the answer passes over."""
    run = run_dir(root, master)
    with ckptd.Client(root):
        wait_until(lambda: (found := ckptd.latest_valid(root, wait=False)) is not None and found.step == 3)
        passed = damage_newest(run, [kind])
        assert latest(root) == (2, passed)
    assert restored(root, "auto") == (2, passed)
    DAMAGES["one byte short"](run / NAMES[1])
    assert latest(root) == restored(root, "auto") == (1, [*passed, NAMES[1]])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::ckptd.errors.CheckpointWarning")
@pytest.mark.parametrize("kind", sorted(set(DAMAGES) - {"only a temp folder left"}))
def test_all_damaged_is_an_error_with_and_without_a_daemon_and_the_next_save_still_works(
    root: Path, master: Path, kind: str
) -> None:
    """Field case 6: never a silent fresh start, also not after the daemon quarantined what it may."""
    run = run_dir(root, master)
    damage_newest(run, [kind] * 3)
    with ckptd.Client(root, daemon="off") as client, pytest.raises(RestoreFailed, match=NAMES[0]):
        client.restore(state_of(99))
    with ckptd.Client(root) as client:
        for _ in range(2):  # while the daemon looks at each, and after
            with pytest.raises(RestoreFailed, match=NAMES[0]):
                client.restore(state_of(99))
            with pytest.raises(NoValidCheckpoint):
                client.latest()
            # Without an index nothing proves that they are this run's own; with bytes missing they may still be copied in.
            if "a bit in" in kind and "index" not in kind:
                wait_until(lambda: steps_in_place(run) == NAMES[:1])
        client.snapshot(4, state_of(4)).wait("verified", timeout_s=60)
    assert latest(root)[0] == 4


@pytest.mark.filterwarnings("ignore::ckptd.errors.CheckpointWarning")
def test_all_in_quarantine_is_an_error_too(root: Path, master: Path) -> None:
    """Field case 6: a run whose checkpoints were all moved away did not never begin."""
    run_dir(root, master)
    writer = Writer(root)
    for sequence, name in enumerate(NAMES, 1):
        quarantine(writer, name, sequence)
    with pytest.raises(NoValidCheckpoint, match="quarantine"):
        ckptd.latest_valid(root)
    with ckptd.Client(root, daemon="off") as client, pytest.raises(RestoreFailed, match="quarantine"):
        client.restore(state_of(99))


def steps_in_place(run: Path) -> list[str]:
    return sorted(path.name for path in run.glob("step-*"))


class Fails:
    """An object whose state_dict raises."""

    def state_dict(self) -> Any:
        raise RuntimeError("not now")

    def load_state_dict(self, state: Any) -> None: ...


def of_main() -> Any:
    return type("Config", (), {"__module__": "__main__"})()


@pytest.mark.parametrize("mode", ["auto", "off"])
def test_a_snapshot_that_cant_be_stored_costs_nothing_but_its_error(root: Path, mode: Any) -> None:
    """Field case 5: five refusals in a row, by key path; slots, earlier and later snapshots are as ever."""
    with ckptd.Client(root, daemon=mode) as client, (root / "open").open("w") as file:
        good = client.snapshot(1, state_of(1))
        for bad in (lambda: 1, file, of_main(), type(of_main()), Fails()):
            with pytest.raises(UnstorableState) as caught:
                client.snapshot(2, {**state_of(2), "extra": {"list": [0, bad]}})
            assert caught.value.where.startswith("state['extra']['list'][1]")
        assert good.wait(timeout_s=30).committed
        assert client.snapshot(3, state_of(3)).wait(timeout_s=30).committed
        assert [one.step for one in client.checkpoints()] == [1, 3]
    end_daemon(root)
    assert daemon_of(root) is None
    assert restored(root, "off") == (3, [])


@pytest.mark.slow
def test_what_the_daemon_moved_to_quarantine_is_still_said_to_be_passed_over(
    root: Path, master: Path
) -> None:
    """Field case 6: the reason isn't lost with the place."""
    run = run_dir(root, master)
    damage_newest(run, ["a bit in the data", "a bit in the table"])
    with ckptd.Client(root) as client:
        wait_until(lambda: steps_in_place(run) == NAMES[:1])
        assert latest(root) == (1, [NAMES[2], NAMES[1]])
        with pytest.warns(CheckpointWarning, match="is passed over: .*quarantine/step-00000000[23]-[23]-"):
            resumed = client.restore(state := state_of(99))
        assert resumed is not None
        assert (resumed.step, [passed.name for passed in resumed.passed_over]) == (1, [NAMES[2], NAMES[1]])
        client.snapshot(2, state).wait("verified", timeout_s=60)
    assert latest(root) == (2, [])
