from __future__ import annotations

import os
import subprocess
import sys

import pytest

from ckptd.disk.rootdir import own_start, process_started
from ckptd.errors import CkptdError, ProtocolError, RunTaken
from ckptd_daemon.core import sessions as module
from ckptd_daemon.core.sessions import Process, Session, Sessions, may_take_over, refusal
from daemon_parts import new_client_id


def session(run: str = "gpt", pid: int = 10, identity: bytes | None = b"x") -> Session:
    return Session(new_client_id(), run, Process(pid, 1, -1), identity)


def test_a_process_is_found_by_pid_and_start_time_and_its_death_is_seen() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    started = process_started(child.pid)
    assert started is not None
    process = Process.find(child.pid, started)
    assert process is not None and process.alive()
    assert Process.find(child.pid, started + 1) is None
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert not process.alive()  # a zombie has ended
    assert Process.find(child.pid, started) is None
    child.communicate()
    process.close()


def test_without_pidfds_the_start_time_alone_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_pidfd(pid: int) -> int:
        raise OSError(38, "not implemented")

    monkeypatch.setattr(os, "pidfd_open", no_pidfd)
    process = Process.find(*own_start())
    assert process is not None and process.pidfd == -1 and process.alive()
    assert Process.find(own_start()[0], 1) is None


@pytest.mark.parametrize("pid", [0, 2**31, 2**62])
def test_an_impossible_pid_is_nobody(pid: int) -> None:
    assert Process.find(pid, 0) is None


def test_a_free_run_is_given_and_a_taken_one_is_refused_by_pid() -> None:
    holder = session()
    assert refusal(None, None, (11, 1), "gpt") is None
    error = refusal(None, holder, (11, 1), "gpt")
    assert isinstance(error, RunTaken) and error.seen == "pid 10"
    assert error.todo == "end that process, or use another run name"


def test_a_second_client_of_the_same_process_is_told_to_close_the_first() -> None:
    error = refusal(None, session(), (10, 1), "gpt")
    assert isinstance(error, RunTaken)
    assert error.what == "this process already has a client for run gpt"
    assert error.todo == "call its close() first"


def test_a_client_may_come_back_but_not_as_another_process_or_for_another_run() -> None:
    known = session()
    assert refusal(known, known, (10, 1), "gpt") is None
    assert isinstance(refusal(known, None, (10, 1), "other"), ProtocolError)
    assert isinstance(refusal(known, known, (11, 1), "gpt"), ProtocolError)
    assert isinstance(refusal(known, known, (10, 2), "gpt"), ProtocolError)


def test_what_never_came_back_gives_way_to_its_own_process_only() -> None:
    holder = session(identity=None)
    assert may_take_over(holder, 10) and refusal(None, holder, (10, 1), "gpt") is None
    assert not may_take_over(holder, 11) and isinstance(refusal(None, holder, (11, 1), "gpt"), RunTaken)


def test_sessions_are_found_by_client_and_run_and_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_CLIENTS", 2)
    all_of_them = Sessions()
    first, second = session("a"), session("b", identity=None)
    all_of_them.add(first)
    all_of_them.add(second)
    with pytest.raises(CkptdError, match="too many clients"):
        all_of_them.add(session("c"))
    assert all_of_them.get(first.client_id) is first and all_of_them.of_run("b") is second
    assert all_of_them.attached() == [first]
    all_of_them.remove(first)
    assert all_of_them.of_run("a") is None and len(all_of_them) == 1
