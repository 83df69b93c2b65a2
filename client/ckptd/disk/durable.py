"""The only owner of fsync, replace and rename: what must reach the disk, and in which order.

Every function says what is on disk when it raises. An fsync that failed is never retried on the same file:
the kernel may already have dropped the dirty pages, and a second fsync would then lie. It is raised as
FsyncFailed, so that the caller can drop the file and write it again from its source.

Modes come from the umask, as for any program's files (0644 under 022, 0640 under 027).

Temporary names in the same folder are those of `names.work_folder("tmp", …)`, so that one sweep under the
root's lock finds what a crash left behind.
"""

from __future__ import annotations

import errno
import os
import shutil
import signal
import stat
from collections.abc import Generator, Iterable
from pathlib import Path
from typing import Any, Final

from ckptd.disk import own_leftovers
from ckptd.disk.chunks import Chunk, even_chunks
from ckptd.disk.new_file import (
    Steps,
    Written,
    create,
    created,
    sent_off,
    write_all,
    write_and_hash,
    write_steps,
)
from ckptd.disk.own_leftovers import unlink_quietly
from ckptd.disk.writing import Writing
from ckptd.names import work_folder

_CRASH_ENV: Final = "CKPTD_CRASH_AT"


class FsyncFailed(OSError):
    """The kernel could not write the bytes back. The file (or folder entry) must be treated as lost."""


def crash_point(name: str) -> None:
    """Die here by SIGKILL if the environment asks for it (CKPTD_CRASH_AT=name); only tests do.

    The names are those in the docstring of `ckptd.disk.commit`.
    """
    if os.environ.get(_CRASH_ENV) == name:
        os.kill(os.getpid(), signal.SIGKILL)


def fsync_dir(path: Path) -> None:
    """Make the names in folder path durable.

    Raises:
        FsyncFailed: They may not survive a power cut.
        OSError: The folder can't be opened.
    """
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        _fsync(fd, path)
    finally:
        os.close(fd)


def sync_upwards(path: Path) -> None:
    """Make the names of folder path and of the folders above it durable, up to where its file system begins.

    Whoever made one of them may have been killed before its sync, and nothing shows that. A folder above that is
    closed to us was not made by us.

    Raises:
        OSError: As for fsync_dir.
    """
    fsync_dir(path)
    device = os.stat(path).st_dev
    for above in path.parents:
        if os.stat(above).st_dev != device:
            return
        try:
            fsync_dir(above)
        except PermissionError:
            return


def write_new(path: Path, segments: Iterable[Chunk]) -> Written:
    """Create path, which must not exist, write the segments, sync and close it.

    The bytes are hashed as they are written, not read back. The folder is not synced.

    Raises:
        FileExistsError: path exists (also as a dangling link); it is untouched.
        FsyncFailed: The file is removed again, and its bytes are lost.
        OSError: Disk full, I/O error, no permission. What was written of the file is removed again.
    """
    with created(path) as fd:
        written = write_and_hash(fd, segments)
        _fsync(fd, path)
    return written


def write_begun(path: Path, segments: Iterable[Chunk]) -> Generator[Written, None, None]:
    """write_new in two steps: the first has it written and on its way to the medium, the second synced and closed.

    Raises:
        OSError: As for write_new. A file that is given up between the two is removed too.
    """
    with created(path) as fd:
        written = write_and_hash(fd, segments)
        del segments  # whoever keeps this open keeps none of the snapshot's memory
        _send_off(fd, path)
        yield written
        _fsync(fd, path)


def write_large(path: Path, segments: Iterable[Chunk], writing: Writing) -> Steps:
    """write_new for a large file, a block with each step, in the mode and at the rate of its root; not hashed.

    Args:
        path: The file.
        segments: Its content; gone through again should the file system refuse the mode.
        writing: How.

    Raises:
        OSError: As for write_new. A file that is given up between two steps is removed too.
    """
    return write_steps(path, segments, writing, _fsync)


def replace_file(path: Path, chunks: Iterable[Chunk], *, sync: bool = True) -> int:
    """Write chunks to path, all or nothing, and return the bytes written.

    Args:
        path: Replaced when it exists; a link is replaced itself, not what it points to.
        chunks: The new content, in order.
        sync: False for a cache only: the file is whole at every instant, but after a power cut it may be the
            old one, gone or empty.

    Raises:
        OSError: Disk full, I/O error, no permission. path is untouched, unless only the sync of its folder
            failed: then it is new, but may not survive a power cut.
    """
    # write → fsync(file) → close → replace → fsync(folder)
    temp = path.with_name(work_folder("tmp", 0))
    try:
        count = write_new(temp, chunks).bytes if sync else _write_unsynced(temp, chunks)
        os.replace(temp, path)
    except BaseException as error:
        unlink_quietly(temp)
        if isinstance(error, OSError) and error.filename is None:  # a write knows no name
            error.filename = str(path)
        raise
    if sync:
        fsync_dir(path.parent)
    return count


def atomic_write_json(path: str | os.PathLike[str], obj: Any) -> None:
    """Write obj as canonical JSON (sorted keys, two spaces, final newline) to path, durably, all or nothing.

    A reader sees the old file or the new one, never a part. The temporary file lies in the same folder, under
    a name nobody else uses. A failure leaves none behind; one that can't be removed then goes with this process's
    next call for that folder.

    Args:
        path: Replaced when it exists. Its folder must exist.
        obj: What the json module can spell; NaN and infinities are refused.

    Raises:
        InvalidArgument: obj is not strict JSON. Nothing is written.
        OSError: Disk full, I/O error, no permission. path is untouched, unless only the sync of its folder
            failed: then it is new, but may not survive a power cut.
    """
    from ckptd.errors import InvalidArgument
    from ckptd.format.strict_json import canonical

    try:
        data = canonical(obj)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidArgument(
            "can't be written as strict JSON", where=os.fspath(path), seen=str(error)
        ) from error
    own_leftovers.remove(Path(path).parent)
    replace_file(Path(path), [data])


def rename_new(src: Path, dst: Path, *, sync: bool = True) -> None:
    """Rename src to dst, a name nobody may hold, and make the rename durable.

    The caller is the only one who makes such names (it holds the root's lock): an empty folder or a file at
    dst would be replaced without a word, so dst is looked up first.

    Raises:
        FileExistsError: dst is taken (also by a dangling link); nothing was changed.
        FsyncFailed: dst is there, but may not survive a power cut.
        OSError: The rename failed; nothing was changed.
    """
    if is_taken(dst):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(dst))
    os.rename(src, dst)
    if sync:
        fsync_dir(dst.parent)
        if src.parent != dst.parent:
            fsync_dir(src.parent)


def is_taken(path: Path) -> bool:
    """Whether anything at all has this name, a dangling link too."""
    try:
        os.lstat(path)
    except FileNotFoundError:
        return False
    return True


def make_dirs(path: Path) -> None:
    """Create folder path and its missing parents, durably, whoever has made which of them. Existing is fine.

    Raises:
        FileExistsError: path, or a part of it, exists and is no folder.
        OSError: Some may have been made; the next call makes them durable.
    """
    path.mkdir(parents=True, exist_ok=True)
    sync_upwards(path.parent)


def make_real_dir(path: Path) -> None:
    """Create the folder path, in which we write, durably: a link in its place would lead our files out of the root.

    Raises:
        NotADirectoryError: path is a link, whatever it leads to, or no folder.
        FileNotFoundError: What it is to be made in is gone.
        OSError: It may have been made; the next call makes it durable.
    """
    if not is_taken(path):
        # Not those above: a root that was moved away is not made again at its old path.
        path.mkdir(exist_ok=True)
        sync_upwards(path.parent)
    elif stat.S_ISLNK(os.lstat(path).st_mode):
        what = "a link, not a folder: what is written there would leave the root"
        raise NotADirectoryError(errno.ENOTDIR, what, str(path))
    elif not path.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))


def make_dir_new(path: Path) -> None:
    """Create the folder path, which must not exist; its parent is not synced."""
    path.mkdir()


def remove_tree(path: Path) -> None:
    """Remove path: a file, a link (not what it points to) or a folder with all inside. Missing is fine.

    Raises:
        OSError: Something could not be removed; the rest may be gone. Nothing outside path was touched.
    """
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISDIR(mode):
        path.unlink(missing_ok=True)
        return
    shutil.rmtree(path, onerror=_raise_unless_gone)  # fd-based, follows no link


def _raise_unless_gone(_function: object, _path: object, info: tuple[Any, BaseException, Any]) -> None:
    if not isinstance(info[1], FileNotFoundError):
        raise info[1]


def _fsync(fd: int, where: Path) -> None:
    try:
        os.fsync(fd)
    except OSError as error:
        raise FsyncFailed(error.errno, f"fsync: {error.strerror}", str(where)) from error


def _send_off(fd: int, where: Path) -> None:
    """Have all of a file sent on its way. A failure that is said here may not be said again to its sync."""
    try:
        sent_off(fd, 0, 0)
    except OSError as error:
        raise FsyncFailed(error.errno, f"sync_file_range: {error.strerror}", str(where)) from error


def _write_unsynced(path: Path, chunks: Iterable[Chunk]) -> int:
    fd = create(path)
    try:
        return sum(write_all(fd, chunk) for chunk in even_chunks(chunks))
    finally:
        os.close(fd)
