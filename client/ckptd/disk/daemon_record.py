"""daemon.json: who serves a root. And whether a process is still the one it was.

A process is known by pid *and* start time: a pid alone is reused. The record says where to knock; the truth
about "one writer per root" is the lock, never this file. It says which folder it is of: in a copy of a root it names
the daemon of the original, which must not be taken for the copy's.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ckptd.disk import durable
from ckptd.disk.birth_time import place_of
from ckptd.disk.folder_files import open_folder, read_small_file
from ckptd.errors import CorruptCheckpoint
from ckptd.format.strict_json import canonical, parse
from ckptd.limits import KIB

if TYPE_CHECKING:
    from ckptd.disk.rootdir import Root

_SCHEMA: Final = "ckptd.daemon-v1"
_FILE: Final = "daemon.json"
_MOST_BYTES: Final = 64 * KIB
_OF_TCP: Final = ("tcp", "tcp_server_key", "tcp_client_secret")


@dataclass(frozen=True, kw_only=True, slots=True)
class DaemonRecord:
    """The daemon that holds (or held) a root's lock.

    Attributes:
        endpoint: ZeroMQ endpoint, such as "ipc:///run/user/1000/ckptd/….sock".
        pid: Its process id, in its own pid namespace.
        pid_started: Field 22 of /proc/PID/stat: clock ticks from boot to its start.
        daemon_id: Fresh for every daemon process.
        started_at: Unix seconds; information only.
        version: Its ckptd version.
        log: Path of its log; "" for none.
        tcp: The same endpoint for who can't reach that one, such as "tcp://127.0.0.1:40117"; "" for none.
        tcp_server_key: CurveZMQ's public key of the daemon there.
        tcp_client_secret: CurveZMQ's secret key of whoever may connect there: who can read this file.
    """

    endpoint: str
    pid: int
    pid_started: int
    daemon_id: str
    started_at: float
    version: str
    log: str = ""
    tcp: str = ""
    tcp_server_key: str = ""
    tcp_client_secret: str = field(default="", repr=False)

    @classmethod
    def read(cls, root: Root) -> DaemonRecord | None:
        """The record of root, or None when there is none that can be read, or it is another root's, copied."""
        path = root.service_dir / _FILE
        try:
            folder = open_folder(path.parent)
            try:
                data = read_small_file(folder, _FILE, str(path), _MOST_BYTES)
            finally:
                os.close(folder)
            obj = parse(data, where=str(path), max_bytes=_MOST_BYTES)
            if not isinstance(obj, dict) or obj.pop("root", None) != place_of(root.path):
                return None
            return cls(**_checked(obj, str(path)))
        except (OSError, CorruptCheckpoint):
            return None  # an absent and a damaged record mean the same: nobody to knock at

    @staticmethod
    def is_closed_to_us(root: Root) -> bool:
        """Whether this user may not look for one: then it can't be told whether there is any."""
        try:
            (root.service_dir / _FILE).lstat()
        except PermissionError:
            return True
        except OSError:
            return False
        return not os.access(root.service_dir / _FILE, os.R_OK, effective_ids=True)

    def write(self, root: Root) -> None:
        """Publish this record. The caller holds the root's lock."""
        said = {name: value for name, value in asdict(self).items() if self.tcp or name not in _OF_TCP}
        record = {"schema": _SCHEMA, "root": place_of(root.path), **said}
        durable.replace_file(root.service_dir / _FILE, [canonical(record)], sync=False)

    def remove(self, root: Root) -> None:
        """Withdraw this record, unless another daemon has replaced it. The caller holds the root's lock."""
        if (now := DaemonRecord.read(root)) is None or now.daemon_id == self.daemon_id:
            with contextlib.suppress(FileNotFoundError):
                (root.service_dir / _FILE).unlink()

    def alive(self) -> bool:
        """Whether that very process still runs (on this machine, in this pid namespace)."""
        return process_started(self.pid) == self.pid_started


def process_started(pid: int) -> int | None:
    """Start time of process pid in clock ticks since boot; None when there is none, or only a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except (OSError, ValueError):
        return None
    # the name in parentheses may hold blanks and parentheses itself
    after_name = stat[stat.rfind(b")") + 2 :].split()
    if len(after_name) < 20 or after_name[0] in (b"Z", b"X"):
        return None
    return int(after_name[19])


def own_start() -> tuple[int, int]:
    """(pid, start time) of this process."""
    pid = os.getpid()
    return pid, process_started(pid) or 0


def _checked(obj: Any, where: str) -> dict[str, Any]:
    kinds = {"endpoint": str, "pid": int, "pid_started": int, "daemon_id": str, "version": str, "log": str}
    kinds |= {name: str for name in _OF_TCP if isinstance(obj, dict) and obj.get("tcp")}
    names = {one.name for one in fields(DaemonRecord)} - (set() if "tcp" in kinds else set(_OF_TCP))
    if not isinstance(obj, dict) or set(obj) != names | {"schema"} or obj["schema"] != _SCHEMA:
        raise CorruptCheckpoint("not a daemon record", where=where)
    started_at = obj["started_at"]
    if any(type(obj[name]) is not kind for name, kind in kinds.items()) or type(started_at) not in (
        int,
        float,
    ):
        raise CorruptCheckpoint("not a daemon record", where=where)
    return {name: obj[name] for name in names}
