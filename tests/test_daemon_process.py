"""The daemon as a real process, driven by bare messages: starting, serving, leaving."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ckptd import load
from ckptd.disk.rootdir import DaemonRecord, Root
from ckptd.errors import CkptdError, NoDaemon, ProtocolError, RunTaken, SharedMemoryTooSmall, TimedOut
from ckptd.link import wire
from ckptd.snapshot.slots import Slot, SlotState
from daemon_parts import BareClient, DaemonProcess, Places, eventually, new_client_id, places_in
from open_files import open_files
from told_signals import hearing_ctrl_c, stop

pytestmark = pytest.mark.slow

Start = Callable[..., DaemonProcess]
Connect = Callable[..., BareClient]


@pytest.fixture
def places(tmp_path: Path) -> Iterator[Places]:
    with places_in(tmp_path) as made:
        yield made


@pytest.fixture
def start(places: Places) -> Iterator[Start]:
    started: list[DaemonProcess] = []

    def begin(*args: str, env: dict[str, str] | None = None) -> DaemonProcess:
        started.append(DaemonProcess(places, *args, env=env))
        return started[-1].ready()

    yield begin
    for daemon in started:
        daemon.kill()


@pytest.fixture
def connected(places: Places) -> Iterator[Connect]:
    made: list[BareClient] = []

    def attach(run: str = "default", client_id: str | None = None) -> BareClient:
        made.append(BareClient(places.root, run, client_id))
        made[-1].attach()
        return made[-1]

    yield attach
    for client in made:
        client.close()


def saved_bytes(places: Places, name: str, run: str = "default") -> bytes:
    return bytes(load(places.root / run / name)["model"]["w"].numpy())


def nothing_is_left(places: Places) -> bool:
    record = places.root / ".ckptd" / "daemon.json"
    return not (places.slots() or places.sockets() or places.leftovers() or record.exists())


def ended(pid: int) -> bool:
    return not Path(f"/proc/{pid}/exe").exists()


# --- serving ----------------------------------------------------------------------------------------


def test_a_snapshot_is_committed_verified_and_loads_and_a_clean_exit_leaves_nothing(
    places: Places, start: Start, connected: Connect
) -> None:
    daemon, client = start(), connected()
    client.reserve(1000)
    assert client.save(1, b"a" * 1000).sequence == 1
    assert client.wait_for(1, "committed").name == "step-000000001"
    client.wait_for(1, "verified")
    verifier = client.status()["verifier"]["pid"]
    assert client.drain(verified=True) == 0
    client.detach()
    daemon.send_signal(signal.SIGTERM)
    assert daemon.wait() == 0
    assert saved_bytes(places, "step-000000001") == b"a" * 1000
    assert nothing_is_left(places) and list(places.shm.iterdir()) == []
    eventually(lambda: ended(verifier))


def test_ckptd_start_prints_one_line_per_snapshot_and_drains_on_ctrl_c(
    places: Places, connected: Connect
) -> None:
    command = [sys.executable, "-m", "ckptd_daemon.cli.main", "start", "--root", str(places.root)]
    with hearing_ctrl_c():
        daemon = subprocess.Popen(
            command, env=os.environ | places.env, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
    with daemon:
        assert daemon.stdout is not None
        assert "serving" in daemon.stdout.readline()
        client = connected("gpt")
        client.reserve(10)
        client.save(1, b"a" * 10, step=1200)
        client.wait_for(1, "committed")
        client.detach()
        os.killpg(daemon.pid, signal.SIGINT)
        lines = daemon.stdout.read().splitlines()
        assert daemon.wait(60) == 0
    assert len(lines) == 1
    assert "gpt step 1200: committed as step-000001200" in lines[0]


def test_the_acknowledged_slot_can_be_filled_again_at_once(start: Start, connected: Connect) -> None:
    start()
    client = connected()
    (slot,) = client.reserve(100, slots=1)
    for number in range(1, 6):
        client.save(number, bytes([number]) * 100, slot)
        assert client.wait_for(number, "committed", "failed").slot_free
        assert slot.header().state is SlotState.FREE
    assert client.drain() == 0


def test_a_second_daemon_leaves_with_its_own_exit_code_and_touches_nothing(
    places: Places, start: Start
) -> None:
    first = start()
    before = (places.root / ".ckptd" / "daemon.json").read_bytes(), places.sockets()
    second = DaemonProcess(places)
    assert second.wait() == 6
    assert str(first.pid) in second.output()
    second.kill()
    assert before == ((places.root / ".ckptd" / "daemon.json").read_bytes(), places.sockets())
    start_answers = BareClient(places.root)
    assert start_answers.status()["daemon"]["pid"] == first.pid
    start_answers.close()


def test_the_run_has_one_live_client_and_the_second_is_told_whose_it_is(
    start: Start, connected: Connect
) -> None:
    start()
    connected("gpt")
    with pytest.raises(RunTaken, match=f"pid {os.getpid()}"):
        connected("gpt")
    connected("other").reserve(10)


def test_larger_slots_replace_those_that_became_too_small(
    places: Places, start: Start, connected: Connect
) -> None:
    start()
    client = connected()
    small = {slot.name for slot in client.reserve(100)}
    assert small == {slot.name for slot in client.reserve(100)}
    large = client.reserve(100_000)
    assert {path.name for path in places.slots()} == {slot.name for slot in large}
    assert not small & {slot.name for slot in large} and len(large) == 2
    assert len(client.reserve(100_000, slots=1)) == 1


def test_slots_that_do_not_fit_are_refused_before_any_is_made(
    places: Places, start: Start, connected: Connect
) -> None:
    start()
    client = connected()
    with pytest.raises(SharedMemoryTooSmall, match=r"no room for the slots \(2 slots of 32\.0 TiB\)"):
        client.reserve(2**45)
    assert places.slots() == []
    assert len(client.reserve(100)) == 2


def test_the_verifier_has_neither_the_lock_nor_the_slots_nor_the_socket(
    places: Places, start: Start, connected: Connect
) -> None:
    start()
    client = connected()
    client.reserve(100)
    verifier = client.status()["verifier"]["pid"]
    targets = open_files(verifier)
    assert not [t for t in targets if "lock" in t or t.startswith("/dev/shm") or "zmq" in t], targets


def test_keep_last_one_keeps_the_good_one_until_its_successor_is_verified(
    places: Places, start: Start, connected: Connect
) -> None:
    start("--keep-last", "1")
    client = connected()
    client.reserve(10)
    client.save(1, b"a" * 10)
    client.wait_for(1, "verified")
    verifier = client.status()["verifier"]["pid"]
    stop(verifier)
    for number in (2, 3):
        client.save(number, b"b" * 10, list(client.slots.values())[number % 2])
        client.wait_for(number, "committed")
    assert places.checkpoints() == ["step-000000001", "step-000000002", "step-000000003"]
    os.kill(verifier, signal.SIGCONT)
    client.wait_for(3, "verified")
    assert client.drain(verified=True) == 0
    eventually(lambda: places.checkpoints() == ["step-000000003"])


# --- failures ---------------------------------------------------------------------------------------


_FULL_DISK = """
import errno, os, sys
from ckptd_daemon.core.command import main

limit, write = int(sys.argv.pop(1)), os.write

def write_if_there_is_room(fd, data):
    path = os.readlink(f"/proc/self/fd/{fd}")
    if path.endswith(".pt") and os.fstat(fd).st_size + len(data) > limit:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
    return write(fd, data)

os.write = write_if_there_is_room
sys.exit(main(sys.argv[1:]))
"""


def limited(places: Places, limit: int) -> DaemonProcess:
    """A daemon on a disk that is full as soon as a payload has over `limit` bytes."""
    daemon = DaemonProcess.__new__(DaemonProcess)
    daemon.places = places
    daemon.process = subprocess.Popen(
        [sys.executable, "-c", _FULL_DISK, str(limit), "--root", str(places.root)],
        env=os.environ | places.env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        return daemon.ready()
    except BaseException:
        daemon.kill()
        raise


def test_a_write_that_fails_is_told_leaves_no_residue_and_the_next_one_works(
    places: Places, connected: Connect
) -> None:
    daemon = limited(places, 100_000)
    try:
        client = connected()
        client.reserve(1_000_000)
        client.save(1, b"a" * 1_000_000)
        failed = client.wait_for(1, "failed", "committed")
        assert failed.state == "failed" and failed.slot_free
        assert failed.error is not None and failed.error.kind == "NoSpace"
        assert places.checkpoints() == []
        eventually(lambda: places.leftovers() == [])  # the run's index is written by such a name
        client.save(2, b"b" * 1000)
        assert client.wait_for(2, "failed", "committed").name == "step-000000002"
        assert client.status()["runs"][0]["failed"] == 1
    finally:
        daemon.kill()


def test_a_snapshot_of_a_dead_trainer_that_cannot_be_written_is_kept_and_written_by_the_next_start(
    places: Places, start: Start
) -> None:
    daemon = limited(places, 100_000)
    trainer(places, "big")
    daemon.kill()
    daemon = limited(places, 100_000)
    watcher = BareClient(places.root)
    assert watcher.drain() == 1
    watcher.close()
    daemon.send_signal(signal.SIGTERM)
    assert daemon.wait() == 0
    daemon.kill()
    assert len(places.slots()) == 1 and places.checkpoints() == []
    start()
    eventually(lambda: places.checkpoints() == ["step-000000001"] and not places.slots())
    assert saved_bytes(places, "step-000000001") == b"x" * 1_000_000


# --- crashes ----------------------------------------------------------------------------------------

_TRAINER = """
import os, signal, sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from daemon_parts import BareClient
kind, root, run = sys.argv[2], Path(sys.argv[3]), sys.argv[4]
client = BareClient(root, run)
client.attach()
# the last slot is filled first: what counts is the order of sealing, not that of the slots
slots = sorted(client.reserve(1_000_000), key=lambda slot: slot.name, reverse=True)
if kind == "filling":
    slots[0].begin(client.client_id, run, 1)
elif kind == "sealed":
    for number, slot in enumerate(slots, 1):
        client.seal(slot, number, bytes([number]) * 1000)
elif kind == "big":
    client.seal(slots[0], 1, b"x" * 1_000_000)
elif kind == "pushed":
    client.save(1, b"p" * 1000, slots[0])
    client.seal(slots[1], 2, b"s" * 1000)
elif kind == "stays":
    print(os.getpid(), flush=True)
    sys.stdin.read()
print(client.client_id, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def start_trainer(places: Places, kind: str, run: str = "default") -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", _TRAINER, str(Path(__file__).parent), kind, str(places.root), run],
        env=os.environ | places.env, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip


def trainer(places: Places, kind: str, run: str = "default") -> str:
    """A training process that gets so far and is killed; returns its client id."""
    with start_trainer(places, kind, run) as process:
        out, _ = process.communicate(timeout=250)
        assert process.returncode == -signal.SIGKILL
    return out.strip()


@pytest.mark.parametrize(
    "point",
    [
        "before-temp", "after-temp", "after-file", "before-index", "after-index", "after-folder-sync",
        "after-rename", "after-run-sync",
    ],
)  # fmt: skip
def test_a_daemon_killed_anywhere_in_a_commit_loses_nothing_and_writes_it_once(
    places: Places, start: Start, connected: Connect, point: str
) -> None:
    daemon = start(env={"CKPTD_CRASH_AT": point})
    client = connected()
    (slot, _) = client.reserve(1000)
    generation = client.seal(slot, 1, b"a" * 1000)
    with contextlib.suppress(NoDaemon):  # the answer may die with it
        client.push(slot, generation, 1)
    assert daemon.wait() == -signal.SIGKILL
    with pytest.raises(CkptdError):
        client.wait_for(1, "committed")
    assert not [notice for notice in client.notices if notice.state in ("committed", "verified")]
    start()
    client.reconnect()
    assert client.attach().pending == 0
    client.push(slot, generation, 1)
    assert client.drain(verified=True) == 0
    assert client.resolve(1).state == "verified"
    eventually(lambda: places.leftovers() == [])  # the index is written after the verdict, by such a name
    assert places.checkpoints() == ["step-000000001"]
    assert saved_bytes(places, "step-000000001") == b"a" * 1000
    assert slot.header().state is SlotState.FREE
    index = json.loads((places.root / "default" / "step-000000001" / "index.json").read_text())
    assert index["sequence"] == 1
    client.save(2, b"b" * 1000, slot)
    assert client.wait_for(2, "committed").sequence > 1


def test_what_a_dead_trainer_sealed_is_written_in_order_though_it_was_never_pushed(
    places: Places, start: Start
) -> None:
    daemon = start()
    trainer(places, "sealed")
    eventually(lambda: len(places.checkpoints()) == 2)
    for number in (1, 2):
        name = f"step-{number:09d}"
        index = json.loads((places.root / "default" / name / "index.json").read_text())
        assert (index["snapshot"], index["sequence"]) == (number, number)
    eventually(lambda: not places.slots())
    daemon.send_signal(signal.SIGTERM)
    assert daemon.wait() == 0


def test_trainer_and_daemon_killed_together_lose_nothing_that_was_sealed(
    places: Places, start: Start
) -> None:
    daemon = start()
    stop(daemon.pid)  # it hears neither of the push nor of the death
    with start_trainer(places, "stays") as process:
        os.kill(daemon.pid, signal.SIGCONT)
        assert process.stdout is not None and process.stdout.readline()
        daemon.kill()
        process.kill()
    assert len(places.slots()) == 2
    start()
    eventually(lambda: not places.slots())


def test_what_was_sealed_is_written_though_the_roots_id_was_lost_before_the_next_start(
    places: Places, start: Start, connected: Connect
) -> None:
    daemon, client = start(), connected()
    (slot, _) = client.reserve(1000)
    daemon.kill()
    client.seal(slot, 1, b"a" * 1000)
    (places.root / ".ckptd" / "root.json").unlink()
    again = start()
    eventually(lambda: places.checkpoints() == ["step-000000001"])
    assert len(places.sockets()) == 2  # one for messages, one for streams
    client.root = Root.for_reading(places.root)
    client.reconnect()
    client.attach()
    client.detach()
    again.send_signal(signal.SIGTERM)
    assert again.wait() == 0
    assert nothing_is_left(places) and list(places.shm.iterdir()) == []


def test_the_slots_of_a_killed_trainer_are_freed_and_those_of_another_run_are_untouched(
    places: Places, start: Start, connected: Connect
) -> None:
    daemon = start()
    other = connected("other")
    mine = {slot.name for slot in other.reserve(100)}
    filling = next(iter(other.slots.values()))
    filling.begin(other.client_id, "other", 1)
    trainer(places, "filling")
    eventually(lambda: {path.name for path in places.slots()} == mine)
    daemon.kill()
    start()
    assert {path.name for path in places.slots()} == mine
    assert filling.header().state is SlotState.FILLING


def test_a_restarted_daemon_keeps_the_slots_of_a_live_client_and_takes_its_push(
    places: Places, start: Start, connected: Connect
) -> None:
    daemon = start()
    client = connected()
    filling, free = client.reserve(1000)
    filling.begin(client.client_id, "default", 1)
    daemon.kill()
    start()
    client.reconnect()
    attached = client.attach()
    assert {info.name for info in attached.slots} == {filling.name, free.name}
    assert {slot.name for slot in client.reserve(1000)} == {filling.name, free.name}
    filling.release()
    assert client.save(1, b"a" * 1000, filling).sequence == 1
    assert client.wait_for(1, "committed", "failed").state == "committed"
    client.save(2, b"b" * 1000, free)  # this one was never filled before the restart
    assert client.wait_for(2, "committed", "failed").state == "committed"


def test_a_snapshot_sealed_while_no_daemon_was_there_is_taken_when_one_comes(
    places: Places, start: Start, connected: Connect
) -> None:
    daemon = start()
    client = connected()
    slot, _ = client.reserve(1000)
    daemon.kill()
    generation = client.seal(slot, 1, b"a" * 1000)
    start()
    eventually(lambda: places.checkpoints() == ["step-000000001"])
    client.reconnect()
    client.attach()
    client.push(slot, generation, 1)
    assert client.drain() == 0
    assert places.checkpoints() == ["step-000000001"]


def test_a_new_client_of_the_same_process_may_have_the_run_that_was_left_without_a_word(
    places: Places, start: Start, connected: Connect
) -> None:
    daemon = start()
    old = connected()
    slot, _ = old.reserve(1000)
    daemon.kill()
    old.seal(slot, 1, b"a" * 1000)
    start()
    new = connected()
    assert new.client_id != old.client_id
    assert new.drain() == 0
    assert places.checkpoints() == ["step-000000001"]
    eventually(lambda: not places.slots())


def test_the_run_of_a_killed_trainer_is_free_at_once_and_what_it_left_is_counted(
    places: Places, start: Start, connected: Connect
) -> None:
    start()
    with start_trainer(places, "stays") as process:
        assert process.stdout is not None and process.stdout.readline()
        with pytest.raises(RunTaken, match=f"pid {process.pid}"):
            connected()
        process.kill()
        process.wait()
    client = connected()
    assert client.drain() == 0


@pytest.mark.timeout(900)
def test_twenty_rounds_of_killing_both_leave_shared_memory_at_its_baseline(
    places: Places, start: Start, connected: Connect
) -> None:
    daemon = start()
    other = connected("other")
    baseline = {slot.name for slot in other.reserve(1000)}
    kinds = ["pushed", "filling", "sealed", "stays"]
    for number in range(20):
        with start_trainer(places, kinds[number % 4], "default") as process:
            assert process.stdout is not None
            process.stdout.readline()
            daemon.kill()
            process.kill()
        daemon = start()
        eventually(lambda: {path.name for path in places.slots()} == baseline)
    eventually(lambda: places.leftovers() == [])  # what was adopted is verified, and the index written
    watcher = BareClient(places.root)
    assert watcher.drain(verified=True) == 0
    watcher.close()
    daemon.kill()  # retention comes after the verdict
    # 5 rounds each of "pushed" and "sealed", two snapshots in either; nothing twice, nothing lost
    snapshots = [
        (index["client_id"], index["snapshot"])
        for index in (json.loads(p.read_text()) for p in (places.root / "default").glob("step-*/index.json"))
    ]
    assert len(snapshots) == len(set(snapshots))


def test_leftovers_of_every_temporary_name_are_gone_after_a_start(
    places: Places, start: Start, connected: Connect
) -> None:
    daemon = start()
    client = connected()
    client.reserve(10)
    client.save(1, b"a" * 10)
    client.wait_for(1, "committed")
    daemon.kill()
    run_dir = places.root / "default"
    uuid = "ab" * 16
    (run_dir / f".tmp-2-{uuid}").mkdir()
    (run_dir / f".tmp-2-{uuid}" / "ckpt.pt").write_text("half")
    (run_dir / f".tmp-3-{uuid}").write_text("a file")
    (run_dir / f".trash-4-{uuid}").symlink_to(run_dir / "step-000000001")
    (run_dir / "decisions" / f".tmp-0-{uuid}").write_text("half")
    (places.root / ".ckptd" / f".tmp-0-{uuid}").write_text("half")
    (run_dir / ".tmp-not-ours").mkdir()
    start()
    # The index is written by way of one, too.
    eventually(lambda: [path.name for path in places.leftovers()] == [".tmp-not-ours"])
    assert places.checkpoints() == ["step-000000001"]
    client.reconnect()
    client.attach()
    client.reserve(10)
    client.save(2, b"b" * 10)
    assert client.wait_for(2, "committed").sequence == 5  # above everything that was ever seen, trash too


# --- a daemon that is stopped, slow or gone -----------------------------------------------------------


def test_a_stopped_daemon_costs_no_more_than_the_callers_bound_and_never_a_false_committed(
    places: Places, start: Start, connected: Connect
) -> None:
    daemon = start()
    client = connected()
    slot, _ = client.reserve(1000)
    stop(daemon.pid)
    generation = client.seal(slot, 1, b"a" * 1000)
    began = time.monotonic()
    message = wire.Push(id=0, client_id=client.client_id, slot=slot.name, generation=generation, snapshot=1)
    with pytest.raises(TimedOut, match="kill -CONT"):
        client.connection.ask(message, wire.Accepted, 0.5)
    assert time.monotonic() - began < 30
    assert client.connection.poll(0.0) == []
    os.kill(daemon.pid, signal.SIGCONT)
    assert client.wait_for(1, "committed").name == "step-000000001"


# --- roots and sockets ------------------------------------------------------------------------------


def test_a_root_path_of_150_characters_and_a_sibling_with_the_same_start_work_side_by_side(
    places: Places, start: Start
) -> None:
    base = places.root
    names = ["x" * 150 + "a", "x" * 150 + "b"]
    daemons, clients = [], []
    try:
        for name in names:
            places.root = base.parent / name
            daemons.append(DaemonProcess(places).ready())
            client = BareClient(places.root)
            client.attach()
            client.reserve(10)
            client.save(1, name[-1].encode() * 10)
            client.wait_for(1, "committed")
            clients.append(client)
        endpoints = {client.status()["daemon"]["endpoint"] for client in clients}
        assert len(endpoints) == 2
        for name in names:
            places.root = base.parent / name
            assert saved_bytes(places, "step-000000001") == name[-1].encode() * 10
    finally:
        for client in clients:
            client.close()
        for daemon in daemons:
            daemon.kill()


def test_stale_sockets_are_removed_and_regular_files_and_other_roots_sockets_are_not(
    places: Places, start: Start
) -> None:
    daemon = start()
    root = Root.for_reading(places.root)
    stale = places.sockets()
    daemon.kill()
    assert len(stale) == 2 and all(path.exists() for path in stale)
    regular = places.runtime / f"{root.socket_prefix}0123456789abcdef.sock"
    regular.write_text("mine")
    foreign = places.runtime / "ffffffffffff-0123456789abcdef.sock"
    os.mkfifo(foreign)
    start()
    assert not any(path.exists() for path in stale)
    assert regular.read_text() == "mine" and foreign.exists()


def test_a_runtime_folder_that_makes_the_socket_path_too_long_is_refused_at_the_start(
    places: Places,
) -> None:
    long = places.runtime / ("y" * 100)
    daemon = DaemonProcess(places, env={"CKPTD_RUNTIME_DIR": str(long)})
    assert daemon.wait() == 2
    assert "107" in daemon.output()
    daemon.kill()
    assert not (places.root / ".ckptd" / "daemon.json").exists()


def test_a_root_that_is_a_file_is_refused_and_left_alone(places: Places) -> None:
    places.root.write_text("mine")
    daemon = DaemonProcess(places)
    assert daemon.wait() == 2
    daemon.kill()
    assert places.root.read_text() == "mine"


def test_wrong_settings_stop_the_start_and_change_nothing(places: Places) -> None:
    service = places.root / ".ckptd"
    service.mkdir(parents=True)
    (service / "ckptd.toml").write_text("[policy]\nkeep_lots = 5\n")
    daemon = DaemonProcess(places)
    assert daemon.wait() == 2
    assert "keep_lots" in daemon.output()
    daemon.kill()
    assert places.sockets() == []


# --- leaving ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_after_a_signal_attached_clients_are_served_until_they_leave_and_nobody_new_is_let_in(
    places: Places, start: Start, connected: Connect, number: signal.Signals
) -> None:
    daemon = start("--grace-s", "60")
    client = connected()
    slot, _ = client.reserve(1000)
    newcomer = BareClient(places.root, "other")
    os.killpg(daemon.pid, number)
    eventually(lambda: client.status()["daemon"]["state"] == "leaving")
    client.save(1, b"a" * 1000, slot)
    assert client.wait_for(1, "committed").state == "committed"
    with pytest.raises(NoDaemon, match="leaving"):
        newcomer.attach()
    newcomer.close()
    client.seal(slot, 2, b"b" * 1000)  # sealed, not pushed, when it leaves
    client.detach()
    assert daemon.wait() == 0
    assert places.checkpoints() == ["step-000000001", "step-000000002"]
    assert nothing_is_left(places)


@pytest.mark.parametrize("ignored", [signal.SIGHUP, signal.SIGINT])
def test_what_is_ignored_at_its_start_as_under_nohup_doesnt_end_it(
    places: Places, connected: Connect, ignored: signal.Signals
) -> None:
    code = f"import os, signal, sys; signal.signal({int(ignored)}, signal.SIG_IGN); os.execv(sys.argv[1], sys.argv[1:])"
    command = [sys.executable, "-m", "ckptd_daemon.cli.main", "start", "--root", str(places.root)]
    with subprocess.Popen(
        [sys.executable, "-c", code, *command],
        env=os.environ | places.env, stdout=subprocess.PIPE, text=True, start_new_session=True,
    ) as daemon:  # fmt: skip
        assert daemon.stdout is not None and "serving" in daemon.stdout.readline()
        os.killpg(daemon.pid, ignored)
        client = connected("gpt")  # nobody new is let in by one that leaves
        assert client.status()["daemon"]["state"] == "serving"
        client.detach()
        daemon.send_signal(signal.SIGTERM)
        assert daemon.wait(60) == 0


def test_when_the_grace_is_over_the_daemon_leaves_and_keeps_the_slots_of_the_client_that_did_not(
    places: Places, start: Start, connected: Connect
) -> None:
    daemon = start("--grace-s", "0.2")
    client = connected()
    slot, other = client.reserve(1000)
    client.save(1, b"a" * 1000, slot)
    generation = client.seal(other, 2, b"b" * 1000)
    daemon.send_signal(signal.SIGTERM)
    assert daemon.wait() == 0
    assert places.checkpoints() == ["step-000000001"]
    assert len(places.slots()) == 2
    start()
    eventually(lambda: len(places.checkpoints()) == 2)
    client.reconnect()
    client.attach()
    client.push(other, generation, 2)
    assert client.drain() == 0 and len(places.checkpoints()) == 2


def test_a_second_signal_leaves_at_once_and_loses_nothing(
    places: Places, start: Start, connected: Connect
) -> None:
    daemon = start("--grace-s", "600")
    client = connected()
    slot, _ = client.reserve(1000)
    client.seal(slot, 1, b"a" * 1000)
    daemon.send_signal(signal.SIGINT)
    eventually(lambda: client.status()["daemon"]["state"] == "leaving")
    daemon.send_signal(signal.SIGINT)
    assert daemon.wait(60) == 1
    assert places.sockets() == [] and DaemonRecord.read(Root.for_reading(places.root)) is None
    start()
    eventually(lambda: places.checkpoints() == ["step-000000001"])


def test_stop_drains_and_leaves(places: Places, start: Start, connected: Connect) -> None:
    daemon = start()
    client = connected()
    slot, _ = client.reserve(1000)
    client.save(1, b"a" * 1000, slot)
    client.detach()
    client.stop()
    assert daemon.wait() == 0
    assert places.checkpoints() == ["step-000000001"] and nothing_is_left(places)


def test_an_autostarted_daemon_leaves_when_idle_and_not_while_a_client_is_attached(
    places: Places, start: Start, connected: Connect
) -> None:
    daemon, client = None, None
    while client is None:  # on a busy machine it is idle for too long before anybody comes
        with contextlib.suppress(CkptdError, AssertionError):
            daemon = start("--autostarted", "--idle-exit-s", "0.5")
            client = connected()
    assert daemon is not None
    with pytest.raises(subprocess.TimeoutExpired):
        daemon.wait(1.5)
    client.detach()
    assert daemon.wait() == 0
    assert nothing_is_left(places)


def test_a_client_that_detaches_leaves_its_free_slots_behind_no_longer(
    places: Places, start: Start, connected: Connect
) -> None:
    start()
    client = connected()
    slot, _ = client.reserve(1000)
    client.save(1, b"a" * 1000, slot)
    client.detach()
    eventually(lambda: not places.slots())
    assert places.checkpoints() == ["step-000000001"]
    with pytest.raises(ProtocolError, match="not attached"):
        client.reserve(1000)


def test_a_snapshot_nobody_heard_of_is_unknown(start: Start, connected: Connect) -> None:
    start()
    client = connected()
    assert client.resolve(7).state == "unknown"
    assert client.resolve(1, new_client_id()).state == "unknown"
    slot, _ = client.reserve(10)
    with pytest.raises(ProtocolError, match="doesn't hold"):
        client.push(slot, 1, 1)
    assert isinstance(slot, Slot)
