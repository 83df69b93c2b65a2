from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ckptd.errors import ProtocolError, SharedMemoryTooSmall
from ckptd.snapshot import slot_header
from ckptd.snapshot.slots import HEADER_BYTES, Slot, SlotHeader, SlotState, needed_bytes

CLIENT = "ab" * 16


@pytest.fixture
def slot(tmp_path: Path) -> Iterator[Slot]:
    made = Slot.create(tmp_path / "slot-a", needed_bytes(10_000, 500))
    yield made
    made.close()


def test_a_new_slot_is_free_private_and_allocated(slot: Slot) -> None:
    found = slot.path.stat()
    assert slot.header().state is SlotState.FREE
    assert found.st_mode & 0o777 == 0o600
    assert found.st_size == slot.capacity == needed_bytes(10_000, 500)
    assert found.st_blocks * 512 >= slot.capacity


def test_a_snapshot_goes_through_the_four_states_and_comes_back_whole(slot: Slot) -> None:
    slot.prefault()
    began = slot.begin(CLIENT, "gpt", 7)
    assert (began.state, began.generation, began.snapshot) == (SlotState.FILLING, 1, 7)
    slot.data[:10_000] = b"x" * 10_000
    slot.seal(b"the descriptor", 10_000)
    other = Slot.open(slot.path)
    header = other.header()
    assert (header.state, header.run, header.client_id, header.sequence) == (
        SlotState.SEALED,
        "gpt",
        CLIENT,
        0,
    )
    assert other.descriptor() == b"the descriptor"
    assert bytes(other.data[: header.data_bytes]) == b"x" * 10_000
    other.mark_writing(12)
    assert (slot.header().state, slot.header().sequence) == (SlotState.WRITING, 12)
    other.release()
    assert slot.header().state is SlotState.FREE
    assert slot.begin(CLIENT, "gpt", 8).generation == 2
    assert slot.header().sequence == 0
    other.close()


def test_a_header_is_taken_apart_once_and_again_when_somebody_else_has_changed_it(
    slot: Slot, monkeypatch: pytest.MonkeyPatch
) -> None:
    other, calls = Slot.open(slot.path), 0
    newest = slot_header.newest

    def counted(page: bytes, fits: Callable[[SlotHeader], bool]) -> tuple[int, int, SlotHeader] | None:
        nonlocal calls
        calls += 1
        return newest(page, fits)

    monkeypatch.setattr(slot_header, "newest", counted)
    slot.header()
    slot.begin(CLIENT, "gpt", 7)
    slot.data[:3] = b"abc"
    slot.seal(b"the descriptor", 3)
    assert slot.header().state is SlotState.SEALED
    assert calls == 1  # what it writes itself it needn't read
    assert other.accept(12).state is SlotState.SEALED
    assert other.header() == slot.header() and slot.header().sequence == 12
    assert calls == 3
    other.close()


def test_prefaulting_for_reading_or_writing_changes_no_byte(slot: Slot) -> None:
    slot.begin(CLIENT, "gpt", 1)
    slot.data[:3] = b"abc"
    slot.seal(b"d", 3)
    slot.prefault(write=False)
    slot.prefault()
    assert bytes(slot.data[:3]) == b"abc" and slot.descriptor() == b"d"


@pytest.mark.parametrize("copy", [0, HEADER_BYTES // 2])
def test_a_torn_header_write_leaves_the_other_state(slot: Slot, copy: int) -> None:
    slot.begin(CLIENT, "gpt", 1)
    slot.seal(b"d", 1)
    states = {SlotState.FILLING, SlotState.SEALED}
    with slot.path.open("r+b") as file:
        file.seek(copy + 20)
        file.write(b"\xff" * 8)
    assert slot.header().state in states


def test_a_newer_whole_copy_wins_and_the_older_one_is_the_one_overwritten(slot: Slot) -> None:
    slot.begin(CLIENT, "gpt", 1)
    before = slot.path.read_bytes()[:HEADER_BYTES]
    slot.seal(b"d", 1)
    after = slot.path.read_bytes()[:HEADER_BYTES]
    half = HEADER_BYTES // 2
    assert (before[:half] == after[:half]) != (before[half:] == after[half:])


def test_a_slot_with_both_headers_damaged_is_refused(slot: Slot) -> None:
    with slot.path.open("r+b") as file:
        file.write(os.urandom(HEADER_BYTES))
    with pytest.raises(ProtocolError, match="no whole header"):
        slot.header()


def test_a_header_with_a_right_crc_and_an_impossible_length_is_refused(slot: Slot) -> None:
    slot.begin(CLIENT, "gpt", 1)
    slot.seal(b"d", 1)
    small = slot.path.with_name("small")
    made = Slot.create(small, needed_bytes(1, 1))
    slot.release()
    slot.begin(CLIENT, "gpt", 2)
    slot.seal(b"d", 10_000)
    slot.mark_writing(3)
    with small.open("r+b") as file:
        file.write(slot.path.read_bytes()[:HEADER_BYTES])
    with pytest.raises(ProtocolError):
        made.header()
    made.close()


def test_a_changed_descriptor_is_refused(slot: Slot) -> None:
    slot.begin(CLIENT, "gpt", 1)
    slot.seal(b"descriptor", 1)
    slot.data[4096] ^= 1
    with pytest.raises(ProtocolError, match="isn't what was sealed"):
        slot.descriptor()


def test_what_does_not_fit_is_refused_and_the_slot_can_be_released(slot: Slot) -> None:
    slot.begin(CLIENT, "gpt", 1)
    with pytest.raises(SharedMemoryTooSmall):
        slot.seal(b"d" * 10_000, 10_000)
    assert slot.header().state is SlotState.FILLING
    assert slot.release().state is SlotState.FREE


def test_no_step_is_taken_out_of_turn(slot: Slot) -> None:
    with pytest.raises(ProtocolError, match="wrong state"):
        slot.seal(b"", 0)
    with pytest.raises(ProtocolError, match="wrong state"):
        slot.mark_writing(1)
    slot.begin(CLIENT, "gpt", 1)
    with pytest.raises(ProtocolError, match="filling, wanted free"):
        slot.begin(CLIENT, "gpt", 2)


def test_too_little_shared_memory_leaves_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(SharedMemoryTooSmall, match="--shm-size"):
        Slot.create(tmp_path / "slot-huge", 2**50)
    assert list(tmp_path.iterdir()) == []


def test_a_taken_name_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "slot-a").write_text("mine")
    with pytest.raises(FileExistsError):
        Slot.create(tmp_path / "slot-a", 8192)
    assert (tmp_path / "slot-a").read_text() == "mine"


@pytest.mark.parametrize("kind", ["link", "folder", "fifo", "short", "readable"])
def test_what_is_not_a_private_regular_slot_file_is_refused(tmp_path: Path, kind: str) -> None:
    real = Slot.create(tmp_path / "real", 8192)
    real.close()
    path = tmp_path / kind
    match kind:
        case "link":
            path.symlink_to(tmp_path / "real")
        case "folder":
            path.mkdir()
        case "fifo":
            os.mkfifo(path)
        case "short":
            path.write_bytes(b"x" * 100)
            path.chmod(0o600)
        case "readable":
            path.write_bytes(bytes(8192))
            path.chmod(0o644)
    with pytest.raises(ProtocolError, match="not a slot"):
        Slot.open(path)


def test_the_memory_outlives_close_while_an_array_views_it(slot: Slot) -> None:
    view = slot.data[:10]
    slot.close()
    view[:3] = b"abc"
    assert slot.path.read_bytes()[HEADER_BYTES : HEADER_BYTES + 3] == b"abc"
    view.release()


def test_a_killed_filler_leaves_the_slot_readable(slot: Slot) -> None:
    program = (
        "import os, signal, sys; from pathlib import Path; from ckptd.snapshot.slots import Slot\n"
        f"s = Slot.open(Path(sys.argv[1])); s.begin({CLIENT!r}, 'gpt', 3)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", program, str(slot.path)], check=False)
    assert done.returncode == -9
    assert (slot.header().state, slot.header().snapshot) == (SlotState.FILLING, 3)


def test_the_owner_and_the_sequence_given_on_acceptance_stay_in_the_header(tmp_path: Path) -> None:
    slot = Slot.create(tmp_path / "slot-a", needed_bytes(1, 1), owner=(123, 456))
    slot.begin(CLIENT, "gpt", 1)
    with pytest.raises(ProtocolError, match="wrong state"):
        slot.accept(9)
    slot.seal(b"d", 1)
    slot.accept(9)
    header = slot.header()
    assert (header.state, header.sequence) == (SlotState.SEALED, 9)
    assert (header.owner_pid, header.owner_started) == (123, 456)
    assert slot.disown().owner_pid == 0
    slot.close()


def _rewrite_newest(slot: Slot, counter: int) -> None:
    with slot.path.open("r+b") as file:
        for start in (0, HEADER_BYTES // 2):
            file.seek(start)
            file.write(slot_header.pack(counter, slot.header()))


def test_a_counter_that_can_not_be_counted_on_is_no_header(slot: Slot) -> None:
    _rewrite_newest(slot, 2**64 - 1)
    with pytest.raises(ProtocolError, match="no whole header"):
        slot.header()


def test_the_last_counter_is_refused_instead_of_written_as_one_nobody_reads(slot: Slot) -> None:
    _rewrite_newest(slot, slot_header.MAX_NUMBER)
    with pytest.raises(ProtocolError, match="used up"):
        slot.begin(CLIENT, "gpt", 1)
    assert slot.header().state is SlotState.FREE
