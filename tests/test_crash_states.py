"""What any crash may leave: thousands of states, each put to the real recovery and the real `latest_valid`.

CKPTD_CRASH_STATES is the number of power-cut states tried at each point beside the ordered ones (default 4).
"""

from __future__ import annotations

import itertools
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from crash_judge import faults, lay_out, recover
from crash_states import State, states
from crash_stories import STORIES, killed_before
from crash_trace import Recorder, Trace, record

MOST = int(os.environ.get("CKPTD_CRASH_STATES", "4"))
KILLS = range(1, 44, 1 if MOST > 4 else 6)

UP = "durable.fsync_dir < durable.sync_upwards < "
ROOT_OPENED = f"{UP}rootdir._make_service_dir < rootdir.open"
RUN_MADE = f"{UP}durable.make_dirs < durable.make_real_dir < catalogue.open"
DECISIONS_MADE = f"{UP}durable.make_dirs < durable.make_real_dir < decisions._write < decisions.write_birth"

#: Barriers without which no state breaks a promise, and why they are there all the same.
REDUNDANT = {
    ROOT_OPENED: "a new run syncs as far up; but the policy is written before there is a run",
    RUN_MADE: "the root was synced when it was opened, and is when decisions are made; neither knows of the other",
    DECISIONS_MADE: "the first commit syncs RUN before it is acknowledged",
    "durable.fsync_dir < durable.rename_new < quarantine.quarantine < catalogue._move_away":
        "what comes back after a power cut fails its check again; without it, a file system whose renames between two"
        " folders aren't atomic could lose the corrupt checkpoint",
}  # fmt: skip


@pytest.fixture
def memory() -> Iterator[Path]:
    """A folder in memory: thousands of states are laid out in it."""
    parent = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="ckptd-crash-", dir=parent) as folder:
        yield Path(folder)


@pytest.fixture
def traced(memory: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Trace]:
    monkeypatch.setenv("CKPTD_SHM_DIR", str(memory / "shm"))

    def tell(name: str) -> Trace:
        (memory / name).mkdir()
        return record(STORIES[name], memory / name)

    return tell


def first_fault(found: Iterator[State], folder: Path) -> str:
    """The first state that breaks a promise, in words; "" if none does."""
    for state in found:
        if wrong := faults(state, folder):
            return f"cut {state.cut} ({state.kind}): {wrong[0]}; on disk: {sorted(state.tree)}"
    return ""


@pytest.mark.slow
@pytest.mark.parametrize("story", STORIES)
def test_no_crash_at_any_point_breaks_a_promise(
    story: str, traced: Callable[[str], Trace], memory: Path
) -> None:
    trace = traced(story)
    found = list(states(trace, most=MOST))
    assert len(found) > 2 * len(trace.ops)  # it does look at more than the cuts
    before = len(os.listdir("/proc/self/fd"))
    assert first_fault(iter(found), memory / "state") == ""
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.slow
@pytest.mark.parametrize("kill", KILLS)
def test_a_kill_and_a_power_cut_after_the_next_process_has_saved_lose_nothing(
    kill: int, memory: Path
) -> None:
    """The next process finds folders and decisions that nobody has synced, and nothing shows it."""
    (memory / "told").mkdir()
    trace = record(lambda recorder, folder: killed_before(recorder, folder, kill), memory / "told")
    assert first_fault(states(trace, most=2), memory / "state") == ""


@pytest.mark.slow
@pytest.mark.parametrize("story", ["retention", "a_rewind"])
def test_a_recovery_that_crashes_itself_breaks_no_promise_either(
    story: str, traced: Callable[[str], Trace], memory: Path
) -> None:
    left = [state for state in states(traced(story), most=2) if _has_leftovers(state)]
    assert len(left) > 20
    for state in left[:: max(1, len(left) // (4 * MOST))]:
        folder = memory / "recovering"
        lay_out(state, folder)
        trace = record(recover, folder, told=state.told)
        assert first_fault(states(trace, most=2), memory / "state") == ""


def _has_leftovers(state: State) -> bool:
    return any("/.tmp-" in path or "/.trash-" in path for path in state.tree)


@pytest.mark.slow
def test_every_barrier_is_needed_or_said_to_be_redundant(
    traced: Callable[[str], Trace], memory: Path
) -> None:
    """With one taken out, some crash state breaks a promise: so the states and the judge do bite."""
    missed = {}
    traces = {story: traced(story) for story in STORIES}
    for barrier in sorted({barrier for trace in traces.values() for barrier in trace.barriers()}):
        with_it = [trace for trace in traces.values() if barrier in trace.barriers()]
        bites = any(
            _bites(trace, {barrier}, memory / "state", 100 if barrier in REDUNDANT else None)
            for trace in with_it
        )
        if bites == (barrier in REDUNDANT):
            missed[barrier] = "isn't redundant" if bites else "could be taken out"
    assert missed == {}, missed
    assert REDUNDANT.keys() <= set().union(*(trace.barriers() for trace in traces.values()))


def test_barriers_that_stand_in_for_one_another_are_needed_together(
    traced: Callable[[str], Trace], memory: Path
) -> None:
    together = {ROOT_OPENED, RUN_MADE, DECISIONS_MADE}
    assert _bites(traced("killed_with_its_first_folder"), together, memory / "state")


def _bites(trace: Trace, barriers: set[str], folder: Path, most: int | None = None) -> bool:
    """Whether a state that the trace without those barriers may leave breaks a promise."""
    usual = {state.digest for state in states(trace, most=MOST)}
    without = states(trace, most=MOST, without=frozenset(barriers))
    new = itertools.islice((state for state in without if state.digest not in usual), most)
    return first_fault(new, folder) != ""


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
