"""Files of every kind of content, written in every mode, and everything that can go wrong with a call on the way."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from ckptd.disk import durable, new_file, write_mode
from ckptd.disk.chunks import Chunk
from ckptd.disk.durable import FsyncFailed
from ckptd.disk.write_mode import Mode, WriteMode
from ckptd.disk.write_rate import WriteRate
from ckptd.disk.writing import Writing
from ckptd.limits import KIB, MIB, PAGE_ALIGNMENT

MODES = ("direct", "early", "plain")


@pytest.fixture(autouse=True)
def _has_the_mode(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    callspec = getattr(request.node, "callspec", None)
    mode = "direct" if callspec is None else callspec.params.get("mode", "direct")
    if mode != "direct":
        return
    tried = WriteMode()
    tried.find_out(tmp_path)
    if tried.now != "direct":
        pytest.skip(f"the file system of the test's folder has no O_DIRECT: {tried.reason}")


def in_mode(mode: str, rate: int | None = None) -> Writing:
    return Writing(mode=WriteMode(cast(Mode, mode)), rate=WriteRate(rate, sleep=lambda _: None))


def through(steps: Iterator[None]) -> int:
    """What a generator gives at its end."""
    try:
        while True:
            next(steps)
    except StopIteration as done:
        return int(done.value)


def large(nbytes: int) -> memoryview:
    memory = memoryview(mmap.mmap(-1, max(1, nbytes)))
    memory[:nbytes] = os.urandom(nbytes)
    return memory[:nbytes]


#: Bytes per second for which blocks are small.
SLOW = 2_000_000


def in_blocks() -> list[Chunk]:
    """Several of them, at that rate."""
    return [b"h" * PAGE_ALIGNMENT, large(MIB), b"end"]


def contents() -> dict[str, list[Chunk]]:
    tensor = large(300 * KIB)
    page = b"h" * PAGE_ALIGNMENT
    return {
        "nothing": [],
        "one byte": [b"x"],
        "empty segments": [b"", tensor[:0], b"x", b""],
        "a page": [page],
        "a page and a byte": [page, b"x"],
        "as an archive": [page, tensor, page, tensor[: 64 * KIB], b"t" * 333],
        "an odd tensor": [page, tensor[: 70_001], b"p" * (PAGE_ALIGNMENT - 70_001 % PAGE_ALIGNMENT), tensor],
        "small ones": [b"s" * at for at in range(300)],
        "nowhere aligned": [b"x", tensor[64:], tensor[128:]],
        "several blocks": in_blocks(),
    }  # fmt: skip


@pytest.mark.parametrize("rate", [None, SLOW])
@pytest.mark.parametrize("mode", MODES)
def test_the_bytes_are_the_same_in_every_mode(tmp_path: Path, mode: str, rate: int | None) -> None:
    for name, segments in contents().items():
        writing = in_mode(mode, rate)
        nbytes = through(durable.write_large(tmp_path / name, segments, writing))
        whole = b"".join(segments)
        assert (nbytes, (tmp_path / name).read_bytes()) == (len(whole), whole), name
        assert writing.mode.now == mode


@pytest.mark.parametrize("mode", MODES)
def test_every_file_is_synced_last_of_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    calls: list[str] = []
    for module, name in ((os, "pwritev"), (os, "write"), (os, "ftruncate"), (os, "fsync")):
        monkeypatch.setattr(module, name, noting(getattr(module, name), name, calls))
    through(durable.write_large(tmp_path / "file", contents()["as an archive"], in_mode(mode)))
    assert calls.count("fsync") == 1 and calls[-1] == "fsync" and len(calls) > 1


def noting(real: Callable[..., Any], name: str, calls: list[str]) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        calls.append(name)
        return real(*args)

    return call


@pytest.mark.parametrize("mode", MODES)
def test_a_name_that_is_taken_is_left_alone(tmp_path: Path, mode: str) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(FileExistsError):
        through(durable.write_large(tmp_path / "file", [b"yours"], in_mode(mode)))
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize("mode", MODES)
def test_a_file_that_is_given_up_between_two_steps_is_removed(tmp_path: Path, mode: str) -> None:
    before = len(os.listdir("/proc/self/fd"))
    steps = durable.write_large(tmp_path / "file", in_blocks(), in_mode(mode, SLOW))
    next(steps)
    assert (tmp_path / "file").exists()
    steps.close()
    assert list(tmp_path.iterdir()) == []
    assert len(os.listdir("/proc/self/fd")) <= before


# --- calls that fail ------------------------------------------------------------------------------

CALLS: dict[str, Sequence[tuple[Any, str]]] = {
    "direct": ((fcntl, "fcntl"), (os, "pwritev"), (os, "ftruncate"), (os, "fsync"), (os, "open")),
    "early": ((os, "write"), (new_file, "start_writing"), (os, "fsync"), (os, "open")),
    "plain": ((os, "write"), (os, "fsync"), (os, "open")),
}


class Failing:
    """A function that fails at one of its calls, the first time it comes there.

    Args:
        real: What it stands in for.
        at: Which call, from 1.
        error: What it raises there.
    """

    def __init__(self, real: Callable[..., Any], at: int, error: OSError) -> None:
        self._real, self._at, self._error = real, at, error
        self.calls, self.failed = 0, False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        if self.calls == self._at:
            self.failed = True
            raise self._error
        return self._real(*args, **kwargs)


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EROFS])
@pytest.mark.parametrize(
    ("mode", "module", "name"), [(mode, *call) for mode, calls in CALLS.items() for call in calls]
)
def test_an_error_of_any_call_is_raised_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, module: Any, name: str, number: int
) -> None:
    segments, writing = in_blocks(), in_mode(mode, SLOW)
    counting = Failing(getattr(module, name), 0, OSError())
    with monkeypatch.context() as patch:
        patch.setattr(module, name, counting)
        through(durable.write_large(tmp_path / "file", segments, writing))
    (tmp_path / "file").unlink()
    assert counting.calls
    for at in range(1, counting.calls + 1):
        failing = Failing(getattr(module, name), at, OSError(number, os.strerror(number)))
        with monkeypatch.context() as patch:
            patch.setattr(module, name, failing)
            with pytest.raises(FsyncFailed if name == "fsync" else OSError) as raised:
                through(durable.write_large(tmp_path / "file", segments, writing))
        assert raised.value.errno == number
        assert list(tmp_path.iterdir()) == []
    assert writing.mode.now == mode


@pytest.mark.parametrize("number", write_mode.UNSUPPORTED)
@pytest.mark.parametrize(
    ("module", "name", "at"), [(fcntl, "fcntl", 2), (os, "pwritev", 1), (os, "pwritev", 3)]
)
def test_a_mode_refused_in_the_middle_has_the_file_begun_anew_in_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: Any, name: str, at: int, number: int
) -> None:
    segments, writing = in_blocks(), in_mode("direct", SLOW)
    failing = Failing(getattr(module, name), at, OSError(number, os.strerror(number)))
    monkeypatch.setattr(module, name, failing)
    through(durable.write_large(tmp_path / "file", segments, writing))
    assert failing.failed
    assert (tmp_path / "file").read_bytes() == b"".join(segments)
    assert writing.mode.now == "early" and writing.mode.reason.startswith("direct: ")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("number", write_mode.UNSUPPORTED)
def test_early_write_back_that_is_refused_in_the_middle_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    segments = in_blocks()
    failing = Failing(new_file.start_writing, 2, OSError(number, os.strerror(number)))
    monkeypatch.setattr(new_file, "start_writing", failing)
    through(durable.write_large(tmp_path / "file", segments, in_mode("early", SLOW)))
    assert failing.calls == 2
    assert (tmp_path / "file").read_bytes() == b"".join(segments)


@pytest.mark.parametrize("shorter_by", [PAGE_ALIGNMENT, PAGE_ALIGNMENT - 1, 5 * PAGE_ALIGNMENT + 100])
def test_short_direct_writes_are_gone_on_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shorter_by: int
) -> None:
    real = os.pwritev

    def short(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        left = max(PAGE_ALIGNMENT, sum(map(len, buffers)) - shorter_by)
        taken = []
        for buffer in buffers:
            taken.append(buffer[: -(-left // PAGE_ALIGNMENT) * PAGE_ALIGNMENT])
            left -= len(taken[-1])
            if left <= 0:
                break
        done = real(fd, taken, offset)
        return done + min(0, left)  # the kernel may say less than it wrote, and an odd number

    monkeypatch.setattr(os, "pwritev", short)
    for name, segments in contents().items():
        writing = in_mode("direct")
        through(durable.write_large(tmp_path / name, segments, writing))
        assert (tmp_path / name).read_bytes() == b"".join(segments), name
        assert writing.mode.now == "direct"


@pytest.mark.parametrize("count", [0, 100])
def test_a_direct_write_of_less_than_a_page_is_as_good_as_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    monkeypatch.setattr(os, "pwritev", lambda *_: count)
    writing = in_mode("direct")
    through(durable.write_large(tmp_path / "file", [b"content"], writing))
    assert (tmp_path / "file").read_bytes() == b"content"
    assert writing.mode.now == "early"


@pytest.mark.parametrize("mode", ["early", "plain"])
def test_short_buffered_writes_are_gone_on_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    real = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: real(fd, data[:100_001]))
    segments = contents()["as an archive"]
    through(durable.write_large(tmp_path / "file", segments, in_mode(mode)))
    assert (tmp_path / "file").read_bytes() == b"".join(segments)
