"""Files of a root that somebody made on purpose: each reader takes what could be, or refuses it by its own error.

What is changed is signed again as whoever made the file would: the hash in it is no defence against its author.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
import random
import stat
from collections.abc import Callable
from pathlib import Path
from pipes import waits_for_the_pipe
from typing import Any

import pytest

from ckptd.disk.daemon_record import DaemonRecord
from ckptd.disk.decisions import read_decisions, write_birth, write_fork
from ckptd.disk.lock import RootLock, holder
from ckptd.disk.rootdir import Root
from ckptd.disk.slot_folder import record_root, recorded_ids
from ckptd.errors import BadRoot, CkptdError, CorruptCheckpoint, InvalidArgument, ProtocolError
from ckptd.format.plan import plan_checkpoint
from ckptd.format.records import index_from_bytes, index_to_bytes
from ckptd.format.strict_json import canonical
from ckptd.format.table_rows import faults_in_files, table_from_bytes
from ckptd.format.tensor_table import canonical_table
from ckptd.limits import MAX_MESSAGE_BYTES, MAX_REQUEST_BYTES
from ckptd.link import wire
from ckptd_daemon.series.settings_file import settings_from_toml
from snapshots import descriptor
from test_records import INDEX

ROUNDS = 250

HOSTILE: tuple[Any, ...] = (
    None, True, -1, 0, 2**62, 2**63, 2**64, -(2**64), 10**400, 1e308, -0.0, "", "..", "../../etc/passwd", "/etc/passwd",
    "a\0b", "\ud800", "x" * 70_000, "ckpt.pt", "step-000000001", [], {}, [[]] * 50, {"a": {"a": {"a": {}}}},
    {"__float__": "nan"}, {"__float__": 1}, [0] * 100, [2**62] * 64,
)  # fmt: skip


def nodes(tree: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths of all values in it."""
    keys = list(tree) if isinstance(tree, dict) else range(len(tree)) if isinstance(tree, list) else []
    below = [found for key in keys for found in nodes(tree[key], (*path, key))]
    return [*([path] if path else []), *below]


def changed(tree: Any, chance: random.Random) -> Any:
    """A copy in which a value or a few are others, gone, or more."""
    tree = copy.deepcopy(tree)
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        found = nodes(tree)
        *way, last = chance.choice(found)
        parent = tree
        for key in way:
            parent = parent[key]
        what = chance.randrange(6)
        if what == 0:
            del parent[last]
        elif what == 1 and isinstance(parent, dict):
            parent[chance.choice(("extra", "__float__", ""))] = copy.deepcopy(chance.choice(HOSTILE))
        elif what == 1:
            parent.append(copy.deepcopy(parent[last]))
        else:
            parent[last] = copy.deepcopy(chance.choice(HOSTILE))
        if not nodes(tree):
            break
    return tree


def try_all(
    tree: Any, sign: Callable[[Any], bytes], read: Callable[[bytes], object], refused: type[CkptdError]
) -> int:
    """How many were refused; any other error than that is raised."""
    chance, count = random.Random(1), 0
    for _ in range(ROUNDS):
        try:
            read(sign(changed(tree, chance)))
        except refused:
            count += 1
        except (TypeError, ValueError) as error:
            if "JSON serializable" not in str(error):
                raise
    return count


def signed_as(key: str, spell: Callable[[Any], bytes] = canonical) -> Callable[[Any], bytes]:
    """Who puts the hash over the rest into `key`, as the product does."""

    def sign(tree: Any) -> bytes:
        rest = {name: value for name, value in tree.items() if name != key}
        return spell(rest | {key: hashlib.sha256(spell(rest)).hexdigest()})

    return sign


def test_of_an_index_only_what_names_files_of_its_own_folder_is_taken() -> None:
    def read(data: bytes) -> None:
        index = index_from_bytes(data, "here")
        names = [shard.path for shard in index.shards]
        assert all(os.path.basename(name) == name and name.endswith(".pt") for name in names)

    tree = json.loads(index_to_bytes(INDEX))
    assert try_all(tree, signed_as("index_sha256"), read, CorruptCheckpoint) > ROUNDS // 2


def test_of_a_table_only_what_lies_in_its_files_is_taken() -> None:
    plan = plan_checkpoint(descriptor(1))
    sizes = {file.path: file.size for file in plan.files}

    def read(data: bytes) -> None:
        rows = table_from_bytes(data, "here")
        if not faults_in_files(rows, sizes):
            assert all(0 <= row.offset <= row.offset + row.bytes <= sizes[row.file] for row in rows)

    tree = json.loads(plan.table)
    assert try_all(tree, canonical_table, read, CorruptCheckpoint) > ROUNDS // 2


def test_a_decision_that_can_not_be_is_listed_as_unreadable_and_stops_nothing(tmp_path: Path) -> None:
    write_birth(tmp_path, "ab" * 16)
    write_fork(tmp_path, 7, 3, "step-000000007")
    (fork,) = (tmp_path / "decisions").glob("*-fork-*")
    tree = json.loads(fork.read_bytes())

    def read(data: bytes) -> None:
        fork.write_bytes(data)
        found = read_decisions(tmp_path)
        assert found.birth_run_id == "ab" * 16
        assert len(found.forks) + len(found.unreadable) == 1 and not found.errors

    try_all(tree, signed_as("sha256"), read, CorruptCheckpoint)


def test_a_daemons_record_and_a_roots_id_that_can_not_be_are_none(tmp_path: Path) -> None:
    root = Root.open(tmp_path / "root", create=True)
    record = DaemonRecord(
        endpoint="ipc:///x", pid=1, pid_started=2, daemon_id="d", started_at=1.0, version="0", log="l"
    )
    record.write(root)

    def read_record(data: bytes) -> None:
        (root.service_dir / "daemon.json").write_bytes(data)
        found = DaemonRecord.read(root)
        if found is not None:
            found.alive()

    def read_id(data: bytes) -> None:
        (root.service_dir / "root.json").write_bytes(data)
        found = Root.for_reading(root.path).id
        assert found in ("", root.id) or (set(found) <= set("0123456789abcdef") and len(found) == 32)

    for name, read in (("daemon.json", read_record), ("root.json", read_id)):
        tree = json.loads((root.service_dir / name).read_bytes())
        try_all(tree, canonical, read, CorruptCheckpoint)


def test_a_slot_folder_that_says_what_can_not_be_is_nobodys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CKPTD_SHM_DIR", str(tmp_path / "shm"))
    root = Root.open(tmp_path / "root", create=True)
    folder = root.slot_dir()
    record_root(folder, root.path)
    tree = json.loads((folder / "root.json").read_bytes())

    def read(data: bytes) -> None:
        (folder / "root.json").write_bytes(data)
        assert recorded_ids(tmp_path / "shm", root.path) in ([], [root.id])

    try_all(tree, canonical, read, CorruptCheckpoint)


def test_settings_that_can_not_be_are_refused_by_their_names() -> None:
    text = "[policy]\nkeep_last = 5\n\n[runs.a]\nkeep_last = 3\n\n[staging]\n\n[writing]\n"
    settings_from_toml(text.encode(), where="here")
    chance = random.Random(1)
    values = (
        "nan", "inf", "-1", "2" * 5000, "1e400", '"' + "x" * 70_000 + '"', "[" * 500 + "]" * 500, "{}", "true",
        '"../x"', "1979-05-27T07:32:00Z", '"5GB"', "{a={a={a={a=1}}}}", '"\\uD800"', "0x7fffffffffffffff",
    )  # fmt: skip
    for _ in range(ROUNDS):
        lines = text.splitlines()
        place = chance.randrange(len(lines) + 1)
        key = chance.choice(
            ("keep_last", "monitor", "keep_every", "max_client_bytes", "max_write_rate", "a.b", "x" * 300)
        )
        lines.insert(place, f"{key} = {chance.choice(values)}")
        if chance.random() < 0.2:
            lines.append(
                chance.choice(("[run]", "[[run]]", '[run."../x"]', "[run.a", "\x00", "a = 1\na = 2"))
            )
        try:
            settings_from_toml("\n".join(lines).encode(), where="here")
        except InvalidArgument as error:
            assert len(str(error)) < 3000


@pytest.mark.parametrize("what", ["fifo", "link", "folder", "huge", "device"])
def test_what_is_no_small_file_of_ours_is_never_read(tmp_path: Path, what: str) -> None:
    root = Root.open(tmp_path / "root", create=True)
    for name in ("daemon.json", "root.json"):
        path = root.service_dir / name
        path.unlink(missing_ok=True)
        if what == "fifo":
            os.mkfifo(path)
        elif what == "link":
            path.symlink_to("/proc/self/environ")
        elif what == "folder":
            path.mkdir()
        elif what == "huge":
            with path.open("wb") as file:
                file.truncate(2**40)
        else:
            path.symlink_to("/dev/zero")
    assert DaemonRecord.read(root) is None
    assert Root.for_reading(root.path).id == ""


def test_a_lock_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    root, target = Root.open(tmp_path / "root", create=True), tmp_path / "target"
    target.write_text("keep me")
    (root.service_dir / "lock").symlink_to(target)
    with pytest.raises(BadRoot):
        RootLock(root).acquire()
    assert target.read_text() == "keep me" and holder(root) is None


def test_a_lock_that_is_a_pipe_keeps_nobody_waiting_who_asks_for_its_holder(tmp_path: Path) -> None:
    root = Root.open(tmp_path / "root", create=True)
    lock = root.service_dir / "lock"
    os.mkfifo(lock)
    assert not waits_for_the_pipe(lock, lambda: holder(root))


def test_a_file_in_a_private_folders_place_is_refused_though_it_is_private(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CKPTD_RUNTIME_DIR", str(tmp_path / "sockets"))
    (tmp_path / "sockets").touch(mode=0o600)
    with pytest.raises(BadRoot, match="not a folder"):
        Root.open(tmp_path / "root", create=True).runtime_dir()


def test_files_of_the_service_folder_are_private_whatever_the_umask(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CKPTD_SHM_DIR", str(tmp_path / "shm"))
    monkeypatch.setenv("CKPTD_RUNTIME_DIR", str(tmp_path / "sockets"))
    before = os.umask(0)
    try:
        root = Root.open(tmp_path / "root", create=True)
        with RootLock(root):
            for path in (root.service_dir, root.service_dir / "lock", root.slot_dir(), root.runtime_dir()):
                assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path
    finally:
        os.umask(before)


def test_a_message_over_its_limit_is_refused_unread() -> None:
    for decode, most in ((wire.decode_request, MAX_REQUEST_BYTES), (wire.decode_stream, MAX_MESSAGE_BYTES)):
        with pytest.raises(ProtocolError, match="too long"):
            decode(bytes(most + 1))
