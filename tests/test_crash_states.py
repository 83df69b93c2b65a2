"""What any crash may leave: thousands of states, each put to the real recovery and the real `latest_valid`.

CKPTD_CRASH_STATES is the number of power-cut states tried at each point beside the ordered ones (default 4).
`scripts/torture crash` tries far more, and each single sync instead of one of each kind.
"""

from __future__ import annotations

import functools
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from crash_barriers import REDUNDANT, STAND_INS, first_fault, without_it
from crash_judge import recover
from crash_place import Ground
from crash_record import record
from crash_recorder import Recorder
from crash_seen import Eye
from crash_states import State, states
from crash_stories import STORIES, killed_before
from crash_trace import Trace

MOST = int(os.environ.get("CKPTD_CRASH_STATES", "4"))
KILLS = range(1, 44, 1 if MOST > 4 else 6)


@pytest.fixture(scope="module")
def memory() -> Iterator[Path]:
    """A folder in memory: thousands of states are laid out in it."""
    parent = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="ckptd-crash-", dir=parent) as folder:
        yield Path(folder)


@pytest.fixture(scope="module")
def eye(memory: Path) -> Eye:
    """One for all, so that no state is looked at twice."""
    return Eye(memory / "state", memory / "shm")


@pytest.fixture(scope="module")
def traced(memory: Path) -> Callable[[str], Trace]:
    @functools.cache
    def tell(name: str) -> Trace:
        (memory / name).mkdir()
        return record(STORIES[name], memory / name)

    return tell


@pytest.mark.slow
@pytest.mark.parametrize("story", STORIES)
def test_no_crash_at_any_point_breaks_a_promise(story: str, traced: Callable[[str], Trace], eye: Eye) -> None:
    trace = traced(story)
    found = list(states(trace, most=MOST))
    assert len(found) > 2 * len(trace.ops)  # it does look at more than the cuts
    before = len(os.listdir("/proc/self/fd"))
    assert first_fault(found, eye) == ""
    assert len(os.listdir("/proc/self/fd")) <= before


@pytest.mark.slow
@pytest.mark.parametrize("kill", KILLS)
def test_a_kill_and_a_power_cut_after_the_next_process_has_saved_lose_nothing(
    kill: int, memory: Path, eye: Eye
) -> None:
    """The next process finds folders and decisions that nobody has synced, and nothing shows it."""
    (memory / f"kill-{kill}").mkdir()
    trace = record(lambda recorder, folder: killed_before(recorder, folder, kill), memory / f"kill-{kill}")
    assert first_fault(states(trace, most=2), eye) == ""


@pytest.mark.slow
@pytest.mark.parametrize("story", ["retention", "a_rewind", "adoption"])
def test_a_recovery_that_crashes_itself_twice_breaks_no_promise_either(
    story: str, traced: Callable[[str], Trace], memory: Path, eye: Eye
) -> None:
    left = [state for state in states(traced(story), most=2) if _has_work(state)]
    assert len(left) > 20
    for state in left[:: max(1, len(left) // (2 * MOST))]:
        again = _crashes_of_recovery(state, memory / "recovering", 1)
        assert first_fault(again, eye) == ""
        for second in [one for one in again if _has_work(one)][:: max(1, len(again) // 2)]:
            assert first_fault(_crashes_of_recovery(second, memory / "recovering", 2), eye) == ""


def _crashes_of_recovery(state: State, folder: Path, time: int) -> list[State]:
    """What a crash in the middle of the first or second recovery from a state leaves."""
    memory = folder.with_name(f"{folder.name}.memory")
    Ground(memory, folder).lay_out(state.memory)
    Ground(folder, folder / "fresh" / "root").lay_out(state.tree)
    return list(states(record(recover, folder, told=state.told, ids_from=10_000 * time), most=2))


def _has_work(state: State) -> bool:
    slots = any("/slot-" in path for path in state.memory)
    return slots or any("/.tmp-" in path or "/.trash-" in path for path in state.tree)


@pytest.mark.slow
def test_every_barrier_is_needed_or_said_to_be_redundant(traced: Callable[[str], Trace], eye: Eye) -> None:
    """With one taken out, some crash state breaks a promise: so the states and the judge do bite."""
    traces = {story: traced(story) for story in STORIES}
    barriers = {barrier for trace in traces.values() for barrier in trace.syncs().values()}
    missed = {}
    for barrier in sorted(barriers):
        most = 10 if barrier in REDUNDANT else None
        bites = any(without_it(trace, {barrier}, eye, most=most) for trace in traces.values())
        if bites == (barrier in REDUNDANT):
            missed[barrier] = "isn't redundant" if bites else "could be taken out"
    assert missed == {}, missed
    assert barriers >= REDUNDANT.keys()


def test_barriers_that_stand_in_for_one_another_are_needed_together(
    traced: Callable[[str], Trace], eye: Eye
) -> None:
    assert without_it(traced("killed_with_its_first_folder"), STAND_INS, eye)


# --- the model itself -----------------------------------------------------------------------------


def left_by(story: Callable[[Path], None], folder: Path) -> list[dict[str, bytes | None]]:
    """What a power cut at the end of a story may leave."""
    folder.mkdir()

    def tell(recorder: Recorder, below: Path) -> None:
        story(below)
        recorder.mark("end")

    trace = record(tell, folder)
    return [state.tree for state in states(trace, most=64) if state.cut == len(trace.ops)]


def write(path: Path, data: bytes, *, sync: bool) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT)
    os.write(fd, data)
    if sync:
        os.fsync(fd)
    os.close(fd)


def sync_folder(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)


def test_a_file_that_was_not_synced_may_be_absent_empty_zeros_half_or_whole(tmp_path: Path) -> None:
    def story(folder: Path) -> None:
        write(folder / "a", b"data", sync=False)

    assert {tree.get("a", b"absent") for tree in left_by(story, tmp_path / "one")} == {
        b"absent", b"", b"\0\0\0\0", b"da", b"data",
    }  # fmt: skip


def test_a_synced_file_in_a_folder_that_was_not_synced_may_be_absent(tmp_path: Path) -> None:
    def story(folder: Path) -> None:
        write(folder / "a", b"data", sync=True)

    assert {tree.get("a", b"absent") for tree in left_by(story, tmp_path / "one")} <= {b"absent", b"data"}
    assert {} in left_by(story, tmp_path / "two")


def test_renaming_without_a_sync_of_the_bytes_may_replace_good_ones_by_none(tmp_path: Path) -> None:
    def story(folder: Path) -> None:
        write(folder / "a", b"good", sync=True)
        sync_folder(folder)
        write(folder / "b", b"better", sync=False)
        os.replace(folder / "b", folder / "a")
        sync_folder(folder)

    assert {tree["a"] for tree in left_by(story, tmp_path / "one")} >= {b"", b"better"}


def test_a_rename_into_another_folder_leaves_one_name_or_both(tmp_path: Path) -> None:
    def story(folder: Path) -> None:
        (folder / "one").mkdir()
        (folder / "two").mkdir()
        write(folder / "one" / "a", b"data", sync=True)
        for path in (folder / "one", folder / "two", folder):
            sync_folder(path)
        os.rename(folder / "one" / "a", folder / "two" / "a")

    seen = {("one/a" in tree, "two/a" in tree) for tree in left_by(story, tmp_path / "one")}
    assert seen == {(True, False), (False, True), (True, True)}


def test_what_goes_past_the_recorder_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    with pytest.raises(AssertionError, match="past the recorder"):
        record(lambda _recorder, folder: (folder / "a").write_bytes(b"1") and None, tmp_path / "one")
