from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ckptd.errors import SharedMemoryTooSmall
from ckptd.snapshot.slots import HEADER_BYTES, Slot, SlotState
from ckptd_daemon.core.room import Room
from ckptd_daemon.core.slotpool import SlotPool, adoption_order, header_of
from daemon_parts import descriptor_of, fill_slot, new_client_id, slot_size

A, B = new_client_id(), new_client_id()
SIZE = slot_size(10)


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[SlotPool]:
    made = SlotPool(tmp_path / "slots", rooms=lambda _: [])
    made.folder.mkdir()
    yield made
    made.close()


def make(pool: SlotPool, client_id: str, count: int = 1, run: str = "default") -> list[Slot]:
    slots = pool.make(client_id, run, (1, 2), count, SIZE)
    pool.add(client_id, slots)
    return slots


def test_slots_are_found_by_their_client_only(pool: SlotPool) -> None:
    (mine, other), (foreign,) = make(pool, A, 2), make(pool, B)
    assert pool.of(A) == [mine, other] and pool.get(A, mine.name) is mine
    assert pool.get(A, foreign.name) is None and pool.get(A, "../x") is None
    pool.remove(mine)
    assert pool.of(A) == [other] and not mine.path.exists()


def test_without_room_for_all_none_is_made(tmp_path: Path) -> None:
    pool = SlotPool(tmp_path, rooms=lambda _: [Room("shm", 2 * SIZE - 1, "more")])
    with pytest.raises(SharedMemoryTooSmall):
        pool.make(A, "default", (1, 2), 2, SIZE)
    assert list(tmp_path.iterdir()) == []


def test_a_failure_half_way_leaves_none_behind(pool: SlotPool, monkeypatch: pytest.MonkeyPatch) -> None:
    create, calls = Slot.create, []

    def fail_the_second_time(path: Path, size: int, **fields: object) -> Slot:
        calls.append(path)
        if len(calls) == 2:
            raise OSError(24, "too many open files")
        return create(path, size, **fields)  # type: ignore[arg-type]

    monkeypatch.setattr(Slot, "create", fail_the_second_time)
    with pytest.raises(OSError, match="too many open files"):
        pool.make(A, "default", (1, 2), 2, SIZE)
    assert list(pool.folder.iterdir()) == []


def test_a_scan_finds_what_is_whole_drops_what_is_not_and_leaves_other_names_alone(pool: SlotPool) -> None:
    (whole, damaged, renamed) = make(pool, A, 3)
    with damaged.path.open("r+b") as file:
        file.write(bytes(HEADER_BYTES))
    renamed.path.rename(pool.folder / renamed.name.replace(A, B))
    (pool.folder / "notes.txt").write_text("mine")
    (pool.folder / f"slot-{A}-7-0123abcd").symlink_to(whole.path)
    later = SlotPool(pool.folder)
    assert [(slot.name, header.client_id) for slot, header in later.scan()] == [(whole.name, A)]
    assert {path.name for path in pool.folder.iterdir()} == {whole.name, "notes.txt"}
    for slot in later:
        slot.close()


def test_what_was_accepted_is_adopted_first_then_what_was_sealed_in_its_order(pool: SlotPool) -> None:
    first, second, third, other = [*make(pool, A, 3), *make(pool, B, run="another")]
    for slot, number in ((first, 9), (second, 8), (third, 7)):
        fill_slot(slot, descriptor_of(A, number, b"x"), b"x")
    fill_slot(other, descriptor_of(B, 1, b"x", run="another"), b"x")
    third.accept(12)
    order = adoption_order([(slot, slot.header()) for slot in (first, second, third, other)])
    assert [slot for slot, _ in order] == [other, third, second, first]


def test_closing_removes_the_folder_only_when_nobody_needs_what_is_in_it(pool: SlotPool) -> None:
    (slot,) = make(pool, A)
    pool.close()
    assert slot.path.exists()
    again = SlotPool(pool.folder)
    ((found, header),) = again.scan()
    assert header.state is SlotState.FREE
    again.remove(found)
    again.close()
    assert not pool.folder.exists()


def test_a_destroyed_header_is_none(pool: SlotPool) -> None:
    (slot,) = make(pool, A)
    with slot.path.open("r+b") as file:
        file.write(bytes(HEADER_BYTES))
    assert header_of(slot) is None
