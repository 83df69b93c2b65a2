"""Each call fails in turn while a process saves without a daemon; scripts/torture has all of it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

import ckptd
from ckptd.disk import own_leftovers
from ckptd.errors import ReadFailed, SaveFailed
from ckptd.link import inline_writer
from failing_alone import WRITERS, state_of, tell_alone
from nth_call import KINDS
from test_failing_calls import folder

__all__ = ["folder"]

#: Of so many calls of a client one fails here; the others make few.
EVERY = {"open": 53, "stat": 151, "close": 53, "list": 17, "change": 41, "fsync": 11, "write": 5, "mkdir": 7}


@pytest.mark.slow
@pytest.mark.parametrize("name", WRITERS)
def test_whichever_call_fails_nothing_is_lost_or_left_and_the_next_one_works(name: str, folder: Path) -> None:
    met, client = Counter[str](), name.startswith("a client")
    for kind, hows in KINDS.items():
        every = EVERY.get(kind, 1) if client else 4
        first = 1 + len(kind) % every
        for told in tell_alone(
            WRITERS[name], kind, lambda n: hows[n % len(hows)], folder, first=first, every=every  # noqa: B023
        ):  # fmt: skip
            assert told.wrong == (), f"{kind} call {told.number}"
            met[kind] += told.met
    assert met["open"] and met["fsync"] and met["change"]


def no_memory(*_args: object, **_options: object) -> None:
    raise OSError(12, "Cannot allocate memory")


def test_a_client_without_memory_for_the_copy_says_so_and_saves_once_it_has_some(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ckptd.Client(tmp_path, daemon="off") as client:
        with monkeypatch.context() as patch:
            patch.setattr(inline_writer.mmap, "mmap", no_memory)
            with pytest.warns(ckptd.CheckpointWarning, match="no memory for the copy of the state"):
                ticket = client.snapshot(1, state_of(1))
            assert ticket.state == "failed"
        assert client.snapshot(2, state_of(2)).committed


def test_save_without_memory_for_the_copy_is_a_typed_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ckptd.tensors.saving.mmap.mmap", no_memory)
    with pytest.raises(SaveFailed, match="no memory for the copy of the state"):
        ckptd.save(tmp_path / "made", state_of(1), step=1)
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_that_cant_be_looked_at_now_is_a_typed_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = ckptd.save(tmp_path / "made", state_of(1), step=1)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "is_file", no_memory)
        with pytest.raises(ReadFailed, match="Cannot allocate memory"):
            ckptd.load(made)
    assert ckptd.load(made)["counter"] == 1


def test_a_file_that_could_not_be_removed_goes_with_the_next_save_there(tmp_path: Path) -> None:
    for save in (ckptd.atomic_save, lambda obj, path: ckptd.atomic_write_json(path, obj)):
        left = tmp_path / ".tmp-0-left"
        left.touch()
        own_leftovers.note(left)
        save(1, tmp_path / "file")
        assert not left.exists()
