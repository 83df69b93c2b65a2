"""Threads that move memory beside the caller's, without the interpreter's lock.

They know addresses and lengths, never a tensor or a buffer: whoever asks keeps both alive until `move` returns, and
no thread is in that memory any more by then, whatever happened.
"""

from __future__ import annotations

import os
import queue
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, TypeAlias

from ckptd.limits import PAGE_ALIGNMENT
from ckptd.tensors.block_moves import move_bytes

#: To which address, from which one, how many bytes.
Move: TypeAlias = tuple[int, int, int]

#: The least that one thread takes at a time: long enough for the copy to run at full speed, short enough that a thread
#: which gets no CPU holds nobody up for long at the end.
PIECE_BYTES: Final = 4 * 1024 * 1024

#: A few cores saturate a machine's memory; more would only take them from others.
_MOST_THREADS: Final = 8


class CopyThreads:
    """A few threads for the life of a client. Safe for use by several threads at once.

    They start with the first large copy. In a forked child, which has none of its parent's threads, it starts its own.

    Args:
        helpers: How many threads help the one that calls. None (default): one for each further CPU this process may
            use, up to 7.
    """

    def __init__(self, helpers: int | None = None) -> None:
        self._wanted = _spare_cpus() if helpers is None else helpers
        self._pid = os.getpid()
        self._starting = threading.RLock()  # a signal's handler may come here too
        self._asked: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._end = weakref.finalize(self, _end, self._asked, self._threads)
        self._end.atexit = False

    def __repr__(self) -> str:
        return f"<CopyThreads {len(self._threads)} of {self._wanted}>"

    def move(self, moves: Sequence[Move], beside: Callable[[], None]) -> None:
        """Make all moves, and meanwhile call `beside` in this thread, which then helps with the rest.

        A thread that has no CPU is not waited for: only one that is in the middle of a move is.

        Args:
            moves: Their memory must stay until this returns or raises; from then on nobody touches it.
            beside: What has to be done by this thread.

        Raises:
            Exception: What `beside` or any of the threads raised; which moves were made is unknown.
        """
        work = _Work(pieces(moves, self._wanted + 1))
        try:
            wanted = max(0, min(self._wanted, len(work) - 1))
            helpers = self._started(wanted) if wanted else []
            for _ in helpers[:wanted]:
                self._asked.put(work)
            beside()
            work.take_all()
        finally:
            work.end()
        if work.error is not None:
            raise work.error

    def close(self) -> None:
        """End the threads. May be called twice; a later `move` would start new ones."""
        with self._starting:
            self._end()
            self._begin()

    def _started(self, count: int) -> list[threading.Thread]:
        """At least so many threads; fewer where the system refuses more: the caller copies too."""
        if os.getpid() != self._pid:
            self._starting = threading.RLock()  # another thread of the parent may have held it at the fork
            self._begin()
        with self._starting:
            while len(self._threads) < count:
                name = f"ckptd-copy-{len(self._threads)}"
                thread = threading.Thread(target=_serve, args=(self._asked,), name=name, daemon=True)
                try:
                    thread.start()
                except RuntimeError:
                    break
                self._threads.append(thread)
            return list(self._threads)

    def _begin(self) -> None:
        self._end.detach()
        self._pid, self._asked, self._threads = os.getpid(), queue.SimpleQueue(), []
        self._end = weakref.finalize(self, _end, self._asked, self._threads)
        self._end.atexit = False


class _Work:
    """Pieces, each taken by whoever comes first."""

    def __init__(self, given: Iterable[Sequence[Move]]) -> None:
        self.error: BaseException | None = None
        self._left = deque(given)
        self._changed = threading.Condition()
        self._helping = 0

    def __len__(self) -> int:
        return len(self._left)

    def help(self) -> None:
        """Take pieces in a thread that `end` waits for."""
        with self._changed:
            self._helping += 1
        try:
            self.take_all()
        except BaseException as error:  # noqa: BLE001 - raised again by whoever asked
            self._left.clear()
            self.error = error
        finally:
            with self._changed:
                self._helping -= 1
                self._changed.notify_all()

    def take_all(self) -> None:
        while self._left:
            try:
                piece = self._left.popleft()
            except IndexError:  # another thread was faster
                return
            for move in piece:
                move_bytes(*move)

    def end(self) -> None:
        """Leave nothing to begin with, and wait for those that are in a piece, an interrupt or none."""
        interrupt: BaseException | None = None
        while True:
            try:
                self._left.clear()
                with self._changed:
                    while self._helping:
                        self._changed.wait()
                    break
            except BaseException as error:  # noqa: BLE001 - Ctrl-C: memory in use must not be given back for it
                interrupt = error
        if interrupt is not None:
            raise interrupt


def pieces(moves: Sequence[Move], threads: int) -> Iterator[list[Move]]:
    """The moves in pieces, each half of what would be a thread's share of the rest; a large move is cut.

    So there are few, as a thread needs the interpreter's lock between two; and small ones at the end.
    """
    rest = sum(nbytes for _, _, nbytes in moves)
    piece: list[Move] = []
    room = _half_a_share(rest, threads)
    for to, source, left in moves:
        while left:
            part = min(left, room)
            piece.append((to, source, part))
            to, source, left, room = to + part, source + part, left - part, room - part
            rest -= part
            if not room:
                yield piece
                piece, room = [], _half_a_share(rest, threads)
    if piece:
        yield piece


def _half_a_share(rest: int, threads: int) -> int:
    return max(PIECE_BYTES, rest // (2 * threads) // PAGE_ALIGNMENT * PAGE_ALIGNMENT)


def _spare_cpus() -> int:
    return min(len(os.sched_getaffinity(0)), _MOST_THREADS) - 1


def _serve(asked: queue.SimpleQueue[_Work | None]) -> None:
    while (work := asked.get()) is not None:
        work.help()
        del work  # it stays with nobody while this thread waits for the next


def _end(asked: queue.SimpleQueue[_Work | None], threads: list[threading.Thread]) -> None:
    for _ in threads:
        asked.put(None)
    for thread in threads:
        if thread is not threading.current_thread():
            thread.join()
