from __future__ import annotations

import errno
import logging
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ckptd_daemon.verify.watch import Watch, limit_named

Seen = tuple[str, str | None]
STEP = "step-000000001"


class Watched:
    """A Watch on a fresh root with run "r", and what it told."""

    def __init__(self, root: Path, **more: Any) -> None:
        self.root = root
        (root / "r").mkdir()
        self.seen: queue.Queue[Seen] = queue.Queue()
        self.lost: queue.Queue[str] = queue.Queue()
        self.watch = Watch(root, lambda run, name: self.seen.put((run, name)), self.lost.put, **more)

    def wait_for(self, wanted: Seen) -> list[Seen]:
        told = []
        while not told or told[-1] != wanted:
            told.append(self.seen.get(timeout=250))
        return told


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[Watched]:
    threads = set(threading.enumerate())
    made = Watched(tmp_path)
    assert made.watch.start() == ""
    assert made.watch.follow(["r"]) == (["r"], "")
    yield made
    made.watch.stop()
    assert set(threading.enumerate()) <= threads


def test_a_folder_that_is_made_moved_in_or_renamed_is_told(watched: Watched, tmp_path_factory: Any) -> None:
    run = watched.root / "r"
    (run / STEP).mkdir()
    watched.wait_for(("r", STEP))
    (run / ".tmp-1").mkdir()
    (run / ".tmp-1").rename(run / "step-000000002")
    watched.wait_for(("r", "step-000000002"))
    outside = tmp_path_factory.mktemp("outside") / "copy"
    outside.mkdir()
    outside.rename(run / "step-000000003")
    watched.wait_for(("r", "step-000000003"))
    (run / STEP).rename(run / "step-000000004")
    watched.wait_for(("r", "step-000000004"))


def test_a_new_run_is_told_and_can_then_be_followed(watched: Watched) -> None:
    (watched.root / "new").mkdir()
    watched.wait_for(("new", None))
    assert watched.watch.follow(["r", "new"]) == (["new"], "")
    (watched.root / "new" / STEP).mkdir()
    watched.wait_for(("new", STEP))


def test_a_run_folder_that_was_removed_and_made_again_is_followed_anew(watched: Watched) -> None:
    run = watched.root / "r"
    run.rename(watched.root / "old")
    run.mkdir()
    added, reason = watched.watch.follow(["r", "old"])
    assert (sorted(added), reason) == (["old", "r"], "")
    (run / STEP).mkdir()
    watched.wait_for(("r", STEP))
    run_two = watched.root / "old"
    run_two.rmdir()
    assert watched.watch.follow(["r"]) == ([], "")


def test_nothing_inside_a_checkpoint_is_watched(watched: Watched) -> None:
    run = watched.root / "r"
    (run / STEP).mkdir()
    watched.wait_for(("r", STEP))
    (run / STEP / "step-000000099").mkdir()
    (run / "step-000000002").mkdir()
    assert ("r", "step-000000099") not in watched.wait_for(("r", "step-000000002"))


def test_a_queue_overflow_is_a_loss_that_names_the_limit(watched: Watched) -> None:
    logging.getLogger("watchdog.observers.inotify_c").warning("Inotify queue overflowed; events were lost")
    assert watched.lost.get(timeout=250).startswith("fs.inotify.max_queued_events = ")
    logging.getLogger("watchdog").warning("and again")
    assert watched.lost.empty()  # said once


def test_a_thread_of_the_watcher_that_dies_is_a_loss(watched: Watched) -> None:
    from watchdog.utils import BaseThread

    class Dying(BaseThread):
        def run(self) -> None:
            raise OSError(errno.ENOSPC, "inotify watch limit reached")

    Dying.__module__ = "watchdog.observers.any"
    thread = Dying()
    thread.start()
    thread.join(60)
    assert "fs.inotify.max_user_watches" in watched.lost.get(timeout=250)


@pytest.mark.parametrize(
    ("number", "limit"), [(errno.ENOSPC, "max_user_watches"), (errno.EMFILE, "max_user_instances")]
)
@pytest.mark.parametrize("at", ["make", "schedule", "start"])
def test_a_limit_met_at_the_start_is_named_and_leaves_nothing_behind(
    tmp_path: Path, number: int, limit: str, at: str
) -> None:
    class Failing:
        emitters: tuple[object, ...] = ()

        def __init__(self) -> None:
            self._fail("make")

        def _fail(self, where: str) -> None:
            if at == where:
                raise OSError(number, "met")

        def schedule(self, *_: object, **__: object) -> None:
            self._fail("schedule")

        def start(self) -> None:
            self._fail("start")

        def stop(self) -> None: ...

        def is_alive(self) -> bool:
            return False

    hook = threading.excepthook
    handlers = list(logging.getLogger("watchdog").handlers)
    watched = Watched(tmp_path, observer=Failing)
    assert limit in watched.watch.start()
    assert watched.watch.follow(["r"]) == ([], "not started")
    assert threading.excepthook is hook
    assert logging.getLogger("watchdog").handlers == handlers


def test_any_other_error_is_passed_on_in_words() -> None:
    assert "Permission denied" in limit_named(OSError(errno.EACCES, os.strerror(errno.EACCES)))


@pytest.mark.slow
@pytest.mark.privileged
@pytest.mark.parametrize(
    ("limit", "value", "says"),
    [
        ("max_inotify_instances", 0, "start: no inotify instance is left: fs.inotify.max_user_instances"),
        ("max_inotify_watches", 0, "start: no inotify watch is left: fs.inotify.max_user_watches"),
        ("max_inotify_watches", 1, "follow: no inotify watch is left: fs.inotify.max_user_watches"),
    ],
)
def test_the_kernels_own_refusals_are_named(tmp_path: Path, limit: str, value: int, says: str) -> None:
    (tmp_path / "r").mkdir()
    script = (
        "import sys; from pathlib import Path; from ckptd_daemon.verify.watch import Watch\n"
        "w = Watch(Path(sys.argv[1]), print, print); s = w.start()\n"
        "print('start:', s); print('follow:', w.follow(['r'])[1]); w.stop()"
    )
    done = in_a_namespace_with(limit, value, [sys.executable, "-c", script, str(tmp_path)])
    assert says in done


def in_a_namespace_with(limit: str, value: int, command: list[str]) -> str:
    """Output of the command, run where the user has only so many of a resource."""
    shell = f'echo {value} > /proc/sys/user/{limit} || exit 77; exec "$@"'
    done = subprocess.run(
        ["unshare", "-Ur", "sh", "-c", shell, "sh", *command],
        capture_output=True, text=True, timeout=250, check=False,
    )  # fmt: skip
    if done.returncode == 77 or "unshare" in done.stderr:
        pytest.skip(f"no user namespaces with limits here: {done.stderr[:100]}")
    assert done.returncode == 0, done.stderr
    return done.stdout
