"""The root: the folder that holds the runs, and the private folders that belong to it elsewhere.

Slots and sockets are found by an id that is stored in the root and bound to its device and inode: a root that
was moved keeps its id, a root that was copied gets another, so that two never share a slot or a socket. When
the stored id is lost, the slots lead back to it: see ckptd.disk.slot_folder.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ckptd.disk import durable
from ckptd.disk.daemon_record import DaemonRecord, own_start, process_started
from ckptd.disk.root_id import read_id, read_or_make_id
from ckptd.disk.slot_folder import slot_folder_name
from ckptd.errors import NO_SPACE, BadRoot, CkptdError, NoSpace
from ckptd.names import SERVICE_DIR, check_run_name

__all__ = ["DaemonRecord", "Root", "own_start", "private_dir", "process_started"]

_MAX_ROOT_PATH_BYTES: Final = 4096 - 256  # Linux takes 4095 in all; the longest of ours below it have 200
_MAX_SOCKET_PATH_BYTES: Final = 107  # sun_path holds 108, with the final NUL


@dataclass(frozen=True, slots=True)
class Root:
    """A root folder that was checked.

    Attributes:
        path: Absolute, links resolved.
        id: 32 hex digits; "" when it was opened for reading and never used by a writer.
    """

    path: Path
    id: str

    @classmethod
    def open(cls, path: str | os.PathLike[str], *, create: bool) -> Root:
        """Open a root to write to.

        Args:
            path: The folder.
            create: Make it, durably, with its missing parents.

        Raises:
            BadRoot: A file, missing (and not create), not writable, owned by another user.
            NoSpace: The disk or the quota is full.
        """
        resolved = _checked_root(Path(path), create=create, writing=True)
        service = resolved / SERVICE_DIR
        try:
            _make_service_dir(service)
            return cls(resolved, read_or_make_id(resolved, service, _shm_parent()))
        except OSError as error:
            raise _unusable("the root can't be written to", resolved, error) from error

    @classmethod
    def for_reading(cls, path: str | os.PathLike[str]) -> Root:
        """Open a root to read from; writes nothing, and works on read-only media.

        Raises:
            BadRoot: Missing, or no folder.
        """
        resolved = _checked_root(Path(path), create=False, writing=False)
        return cls(resolved, read_id(resolved, resolved / SERVICE_DIR) or "")

    @property
    def service_dir(self) -> Path:
        """ROOT/.ckptd"""
        return self.path / SERVICE_DIR

    def run_dir(self, run: str) -> Path:
        """ROOT/RUN; may not exist.

        Raises:
            InvalidArgument: Not a run name.
        """
        return self.path / check_run_name(run)

    @property
    def slot_path(self) -> Path:
        """The folder of this root's slots; may not exist."""
        return _shm_parent() / slot_folder_name(self._needed_id())

    def slot_dir(self) -> Path:
        """The folder of this root's slots, made when missing, and checked.

        Raises:
            BadRoot: It is a link, another user's, or open to others.
        """
        parent = _shm_parent()
        if "CKPTD_SHM_DIR" in os.environ:
            try:
                parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            except OSError as error:
                raise _unusable("CKPTD_SHM_DIR is no folder", parent, error) from error
        return private_dir(self.slot_path)

    def runtime_dir(self) -> Path:
        """The folder for sockets, made when missing, and checked.

        Raises:
            BadRoot: It is a link, another user's, or open to others.
        """
        return private_dir(_runtime_path())

    @property
    def socket_prefix(self) -> str:
        """File names of this root's sockets begin so."""
        return self._needed_id()[:12] + "-"

    def new_socket_path(self) -> Path:
        """A path nobody uses for a socket of this root.

        Raises:
            BadRoot: The runtime folder can't be used, or its path is too long for a socket.
        """
        path = self.runtime_dir() / f"{self.socket_prefix}{secrets.token_hex(8)}.sock"
        if (length := len(os.fsencode(path))) > _MAX_SOCKET_PATH_BYTES:
            raise BadRoot(
                "socket path too long", where=str(path), seen=f"{length} bytes",
                wanted=f"at most {_MAX_SOCKET_PATH_BYTES}", todo="set CKPTD_RUNTIME_DIR to a shorter folder",
            )  # fmt: skip
        return path

    def _needed_id(self) -> str:
        if not self.id:
            raise BadRoot(
                "the root was never used by a writer",
                where=str(self.path),
                todo="start a daemon or client on it",
            )
        return self.id


def private_dir(path: Path) -> Path:
    """Make folder path if missing (its parents too) and check that it is ours alone: no link, mode 0700.

    Raises:
        BadRoot: It is not, or can't be made.
        NoSpace: It can't be made, for want of space.
    """
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)
        found = os.lstat(path)
    except OSError as error:
        raise _unusable("can't make a private folder", path, error) from error
    if problem := _not_private(found):
        raise BadRoot(
            "not a private folder", where=str(path), seen=problem, wanted="a folder of ours with mode 0700",
            todo="remove it, or point CKPTD_RUNTIME_DIR and CKPTD_SHM_DIR elsewhere",
        )  # fmt: skip
    return path


def _not_private(found: os.stat_result) -> str:
    if not stat.S_ISDIR(found.st_mode):
        return "a link" if stat.S_ISLNK(found.st_mode) else "not a folder"
    if found.st_uid != os.geteuid():
        return f"owned by uid {found.st_uid}"
    mode = stat.S_IMODE(found.st_mode)
    return f"mode {mode:04o}" if mode & 0o077 else ""


def _shm_parent() -> Path:
    return Path(os.environ.get("CKPTD_SHM_DIR") or "/dev/shm")


def _runtime_path() -> Path:
    if chosen := os.environ.get("CKPTD_RUNTIME_DIR"):
        return Path(chosen).absolute()
    if session := os.environ.get("XDG_RUNTIME_DIR"):
        with contextlib.suppress(OSError):
            if not _not_private(os.lstat(session)) and os.access(session, os.W_OK):
                return Path(session).absolute() / "ckptd"
    return Path(f"/tmp/ckptd-{os.geteuid()}")


def _checked_root(path: Path, *, create: bool, writing: bool) -> Path:
    _check_spelling(path)
    where = str(path.absolute())
    try:
        if create:
            path.absolute().mkdir(parents=True, exist_ok=True)
        found = path.stat()
    except FileNotFoundError as error:
        if create:
            raise BadRoot("the root can't be made", where=where, seen=str(error)) from error
        raise BadRoot(
            "no such folder", where=where,
            todo=f"check the path, or have it made: ckptd start --root {where} --detach, "
            'or a client with daemon="auto"',
        ) from error  # fmt: skip
    except (FileExistsError, NotADirectoryError) as error:
        raise BadRoot("a file, not a folder", where=where, todo="pick another path") from error
    except OSError as error:
        raise _unusable("the root can't be used", where, error) from error
    if not stat.S_ISDIR(found.st_mode):
        raise BadRoot("a file, not a folder", where=where, todo="pick another path")
    if writing and found.st_uid != os.geteuid() and os.geteuid() != 0:
        raise BadRoot(
            "another user's folder",
            where=where,
            seen=f"owned by uid {found.st_uid}",
            wanted=f"uid {os.geteuid()}",
        )
    if writing and not os.access(path, os.W_OK | os.X_OK):
        raise BadRoot(
            "the root can't be written to", where=where, todo="check its permissions, or pick another folder"
        )
    return path.resolve()


def _unusable(what: str, where: str | Path, error: OSError) -> CkptdError:
    """A folder that we need can't be had: for want of space, which passes, or for good."""
    if error.errno in NO_SPACE:
        return NoSpace(
            what, where=str(where), seen=str(error), todo="free some space, or pick another folder"
        )
    return BadRoot(
        what, where=str(where), seen=str(error),
        todo="check the disk and how it is mounted, or pick another folder",
    )  # fmt: skip


def _check_spelling(path: Path) -> None:
    """Refuse, before anything is made, a path that records, messages and logs couldn't hold, which are UTF-8."""
    given = os.fsencode(path)
    real = given if b"\0" in given else os.fsencode(os.path.realpath(path))
    problem = wanted = ""
    if b"\0" in real:
        problem, wanted = "a NUL byte in it", "none"
    elif len(real) > _MAX_ROOT_PATH_BYTES:
        problem, wanted = f"{len(real)} bytes", f"at most {_MAX_ROOT_PATH_BYTES}"
    elif real.decode("utf-8", "ignore").encode() != real:
        problem, wanted = "bytes that aren't UTF-8", "UTF-8"
    if problem:
        where = given[:200].decode("utf-8", "backslashreplace").replace("\0", "\\0")
        raise BadRoot(
            "not a usable path",
            where=where,
            seen=problem,
            wanted=wanted,
            todo="rename or pick another folder",
        )


def _make_service_dir(service: Path) -> None:
    with contextlib.suppress(FileExistsError):
        service.mkdir(mode=0o700)
    durable.sync_upwards(service.parent)  # the root too: a run's folder may have been made by who was killed
