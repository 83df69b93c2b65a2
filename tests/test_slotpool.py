from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckptd.errors import SharedMemoryTooSmall
from ckptd.snapshot.slots import HEADER_BYTES, Slot, SlotState
from ckptd_daemon.core.room import Room
from ckptd_daemon.core.slotpool import SlotPool, adoption_order, header_of
from daemon_parts import descriptor_of, fill_slot, new_client_id, slot_size
from other_user import NOBODY, only_root

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


def test_a_scan_finds_what_is_whole_drops_what_holds_nothing_and_leaves_other_names_alone(
    pool: SlotPool,
) -> None:
    whole, renamed, short, blank = make(pool, A, 4)
    blank.path.write_bytes(bytes(blank.capacity))  # as its maker leaves it when it is killed at once
    renamed.path.rename(pool.folder / renamed.name.replace(A, B))
    os.truncate(short.path, 4096)
    (pool.folder / "notes.txt").write_text("mine")
    (pool.folder / f"slot-{A}-7-0123abcd").symlink_to(whole.path)
    later = SlotPool(pool.folder)
    assert [(slot.name, header.client_id) for slot, header in later.scan()] == [(whole.name, A)]
    assert {path.name for path in pool.folder.iterdir()} == {whole.name, "notes.txt"}
    assert later.scan() == [] and not later.unread
    for slot in later:
        slot.close()


def test_a_slot_that_may_hold_what_was_sealed_is_kept_and_named(pool: SlotPool) -> None:
    damaged, renamed, opened_up = make(pool, A, 3)
    for number, slot in enumerate((damaged, renamed, opened_up)):
        fill_slot(slot, descriptor_of(A, number, b"x"), b"x")
    with damaged.path.open("r+b") as file:
        file.write(bytes(HEADER_BYTES))
    renamed.path.rename(pool.folder / renamed.name.replace(A, B))
    opened_up.path.chmod(0o644)
    before = set(pool.folder.iterdir())
    later = SlotPool(pool.folder)
    assert later.scan() == []
    assert set(pool.folder.iterdir()) == before
    assert {pool.folder / name for name in later.unread} == before
    later.close()
    assert set(pool.folder.iterdir()) == before


@only_root
def test_what_another_users_file_holds_is_no_snapshot_of_ours(pool: SlotPool) -> None:
    ours, foreign = make(pool, A, 2)
    for slot in (ours, foreign):
        fill_slot(slot, descriptor_of(A, 1, b"x"), b"x")
        slot.path.chmod(0o644)
    os.chown(foreign.path, NOBODY, -1)
    later = SlotPool(pool.folder)
    assert later.scan() == [] and list(later.unread) == [ours.name]
    assert not foreign.path.exists()


@pytest.mark.parametrize("error", [errno.EMFILE, errno.ENOMEM, errno.EACCES])
def test_a_sealed_slot_that_cannot_be_opened_now_is_kept_and_found_by_a_later_scan(
    pool: SlotPool, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    (slot,) = make(pool, A)
    fill_slot(slot, descriptor_of(A, 1, b"x"), b"x")
    later = SlotPool(pool.folder)

    def fails(path: Path) -> Slot:
        raise OSError(error, os.strerror(error))

    with monkeypatch.context() as without:
        without.setattr(Slot, "open", fails)
        assert later.scan() == [] and list(later.unread) == [slot.name]
        assert later.get(A, slot.name) is None
    assert later.get(B, slot.name) is None
    ((found, header),) = later.scan()
    assert header.state is SlotState.SEALED and not later.unread
    found.close()


def test_a_slot_that_could_not_be_opened_is_tried_again_when_its_client_names_it(
    pool: SlotPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    (slot,) = make(pool, A)
    later = SlotPool(pool.folder)
    with monkeypatch.context() as without:
        without.setattr(Slot, "open", _no_descriptor)
        later.scan()
    found = later.get(A, slot.name)
    assert found is not None and later.of(A) == [found] and later.scan() == []
    found.close()


def _no_descriptor(path: Path) -> Slot:
    raise OSError(errno.EMFILE, "too many open files")


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
