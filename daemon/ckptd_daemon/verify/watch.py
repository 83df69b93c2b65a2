"""Events about new checkpoint folders: the only user of watchdog.

One watch on the root and one on each run, none inside checkpoints: a run of 10,000 checkpoints costs two of
the user's inotify watches, not 10,000, and a checkpoint being written causes no event for each of its writes.
What changes *inside* a folder is found by the listing that the verifier repeats anyway.

Events are a shortcut, never the proof that nothing happened: when they fail in any way (no instance, no
watch, queue overflow, a thread of watchdog's dying) the watch says so once, with the limit's name; stop it
then.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import threading
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, Final

from watchdog.events import FileSystemEvent, FileSystemEventHandler
from watchdog.observers import Observer

_SYSCTL: Final = Path("/proc/sys/fs/inotify")


class Watch:
    """Watches one root; calls back from threads of its own.

    Args:
        root: The root.
        on_appeared: Called with (run, name) when something of that name appeared in a run, and with
            (name, None) when something appeared in the root. The name may be anything, also a file's.
        on_lost: Called once with the reason when events can no longer be trusted. Call `stop` then, from
            another thread.
        observer: Makes the observer; another one in tests.
    """

    def __init__(
        self, root: Path, on_appeared: Callable[[str, str | None], None], on_lost: Callable[[str], None],
        *, observer: Callable[[], Any] = Observer,
    ) -> None:  # fmt: skip
        self._root = root
        self._on_appeared = on_appeared
        self._on_lost = on_lost
        self._make = observer
        self._observer: Any = None
        self._runs: dict[
            str, tuple[tuple[int, int], Any]
        ] = {}  # run → (device and inode, watchdog's own watch)
        self._losses = _Losses(self._lost)
        self._said = False

    def start(self) -> str:
        """Start watching the root; "" when it works, else why not. Follow the runs next."""
        self._said = False
        self._losses.attach()
        try:
            self._observer = self._make()
            self._observer.schedule(_Handler(self._root_event), str(self._root), recursive=False)
            self._observer.start()
        except OSError as error:
            self.stop()
            return limit_named(error)
        return ""

    def follow(self, runs: Iterable[str]) -> tuple[list[str], str]:
        """Watch exactly these runs from now on.

        Returns:
            The runs newly watched (list them once more: what appeared before the watch caused no event), and
            why events can't be trusted any more, or "".
        """
        if self._observer is None:
            return [], "not started"
        wanted = dict(_folders(self._root, runs))
        for run in [run for run, (identity, _) in self._runs.items() if wanted.get(run) != identity]:
            self._unfollow(run)
        added = [run for run in wanted if run not in self._runs]
        for run in added:
            try:
                handler = _Handler(partial(self._on_appeared, run))
                watch = self._observer.schedule(handler, str(self._root / run), recursive=False)
            except FileNotFoundError:
                continue
            except OSError as error:
                return added, limit_named(error)
            self._runs[run] = (wanted[run], watch)
        return added, "" if self._alive() else "a thread of the watcher has ended"

    def stop(self) -> None:
        """Stop; `start` may be called again."""
        self._losses.detach()
        observer, self._observer = self._observer, None
        self._runs.clear()
        if observer is not None:
            with contextlib.suppress(RuntimeError, OSError, KeyError):
                observer.stop()
                if observer.is_alive():
                    observer.join(5.0)

    def _unfollow(self, run: str) -> None:
        _, watch = self._runs.pop(run)
        with contextlib.suppress(
            KeyError, RuntimeError, OSError
        ):  # its folder is gone and watchdog may know already
            self._observer.unschedule(watch)

    def _alive(self) -> bool:
        emitters = list(self._observer.emitters)
        return bool(self._observer.is_alive() and all(e.is_alive() or _gone(e) for e in emitters))

    def _root_event(self, name: str) -> None:
        self._on_appeared(name, None)

    def _lost(self, reason: str) -> None:
        if not self._said:
            self._said = True
            self._on_lost(reason)


class _Handler(FileSystemEventHandler):
    """Passes on the name of what appeared, by creation or by a move from anywhere."""

    def __init__(self, appeared: Callable[[str], None]) -> None:
        self._appeared = appeared

    def on_created(self, event: FileSystemEvent) -> None:
        self._appeared(os.path.basename(os.fsdecode(event.src_path)))

    def on_moved(self, event: FileSystemEvent) -> None:
        self._appeared(os.path.basename(os.fsdecode(event.dest_path)))


class _Losses(logging.Handler):
    """Hears of lost events where watchdog tells of them: in its warnings, and by threads that die."""

    def __init__(self, lost: Callable[[str], None]) -> None:
        super().__init__(logging.WARNING)
        self._lost = lost
        self._hook: Any = None

    def attach(self) -> None:
        if self._hook is None:
            logging.getLogger("watchdog").addHandler(self)
            self._hook, threading.excepthook = threading.excepthook, self._thread_died

    def detach(self) -> None:
        if self._hook is not None:
            logging.getLogger("watchdog").removeHandler(self)
            threading.excepthook, self._hook = self._hook, None

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        self._lost(
            f"{_sysctl('max_queued_events')} was too short: events were lost" if "overflow" in text else text
        )

    def _thread_died(self, args: Any) -> None:
        if not type(args.thread).__module__.startswith("watchdog"):
            self._hook(args)
        elif isinstance(args.exc_value, OSError):
            self._lost(limit_named(args.exc_value))
        else:
            self._lost(f"the watcher failed: {args.exc_value!r}")


def limit_named(error: OSError) -> str:
    """The error in words, with the limit that was met and its value."""
    if error.errno == errno.ENOSPC:
        return f"no inotify watch is left: {_sysctl('max_user_watches')}"
    if error.errno == errno.EMFILE:
        return f"no inotify instance is left: {_sysctl('max_user_instances')} (or ulimit -n is too low)"
    return f"inotify: {error}"


def _sysctl(name: str) -> str:
    try:
        return f"fs.inotify.{name} = {(_SYSCTL / name).read_text().strip()}"
    except OSError:
        return f"fs.inotify.{name}"


def _folders(root: Path, runs: Iterable[str]) -> Iterable[tuple[str, tuple[int, int]]]:
    for run in runs:
        with contextlib.suppress(OSError):
            status = os.stat(root / run, follow_symlinks=False)
            yield run, (status.st_dev, status.st_ino)


def _gone(emitter: Any) -> bool:
    return not os.path.isdir(os.fsdecode(emitter.watch.path))
