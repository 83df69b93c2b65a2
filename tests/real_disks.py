"""Small file systems of their own, where the rights allow it: full of bytes or of files, read-only, cut off."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

MIB: Final = 1024 * 1024
_SHUTDOWN: Final = 0x8004587D  #: EXT4_IOC_SHUTDOWN, XFS_IOC_GOINGDOWN
#: What the cut does with the log: writes it and all data first, writes it, or loses it.
FLUSHES: Final = {"all is written first": 0, "the log is written": 1, "the log is lost": 2}
ERROR: Final = 3  #: ext4 finds an error, and goes read-only by itself
_IMAGE_BYTES: Final = {"ext4": 16 * MIB, "xfs": 320 * MIB}


class Disk:
    """One that is mounted at `path`.

    Args:
        path: An empty folder.
        kind: "tmpfs", "ext4" or "xfs".
        options: More of mount's.
    """

    def __init__(self, path: Path, kind: str, options: str = "") -> None:
        self.path, self.kind = path, kind
        self._image, self._options = path.with_name(f"{path.name}.img"), options
        self._broken = False

    def make(self) -> None:
        """A fresh one, mounted; the test is skipped where that can't be."""
        if os.geteuid() != 0:
            pytest.skip("mounting needs root")
        self.path.mkdir(parents=True, exist_ok=True)
        if self.kind != "tmpfs":
            if shutil.which(f"mkfs.{self.kind}") is None:
                pytest.skip(f"there is no mkfs.{self.kind} here")
            with self._image.open("wb") as image:
                image.truncate(_IMAGE_BYTES[self.kind])
            _run(f"mkfs.{self.kind}", "-q", str(self._image))
        self.mount()

    def mount(self) -> None:
        if self.kind == "tmpfs":
            _run("mount", "-t", "tmpfs", "-o", self._options, "tmpfs", str(self.path))
        else:
            if self._broken:  # as the system does before it mounts such a disk
                subprocess.run(["e2fsck", "-fy", str(self._image)], capture_output=True, check=False)
                self._broken = False
            _run(
                "mount",
                "-o",
                ",".join(filter(None, ["loop", self._options])),
                str(self._image),
                str(self.path),
            )

    def unmount(self) -> None:
        _run("umount", str(self.path))

    def limit(self, more_bytes: int | None) -> None:
        """A project's quota on xfs: so much more than there is; None for no bound."""
        told = subprocess.run(
            ["du", "-sk", str(self.path)], capture_output=True, text=True, check=True
        ).stdout
        bound = 0 if more_bytes is None else int(told.split()[0]) + more_bytes // 1024
        quota = (
            "xfs_quota",
            "-x",
            "-c",
            f"project -s -p {self.path} 42",
            "-c",
            f"limit -p bhard={bound}k 42",
        )
        _run(*quota, str(self.path))

    def cut(self, flush: int) -> None:
        """From now on nothing reaches it, and every call that needs it fails."""
        if flush == ERROR:
            self._broken = True
            self._trigger().write_text("1")
            return
        fd = os.open(self.path, os.O_RDONLY)
        try:
            fcntl.ioctl(fd, _SHUTDOWN, struct.pack("I", flush))
        finally:
            os.close(fd)

    def _trigger(self) -> Path:
        lines = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
        (device,) = [Path(line[0]).name for line in lines if line[1] == str(self.path)]
        trigger = Path(f"/sys/fs/ext4/{device}/trigger_fs_error")
        if not trigger.exists():
            pytest.skip(f"there is no {trigger}")
        return trigger

    def fill(self, leave_bytes: int) -> None:
        """Write until it is full, then give that much back."""
        ballast = self.path / "ballast"
        fd = os.open(ballast, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        size = 0
        with contextlib.suppress(OSError):
            while True:
                size += os.write(fd, bytes(4096))
        with contextlib.suppress(OSError):
            os.ftruncate(fd, max(0, size - leave_bytes))
            os.fsync(fd)
        os.close(fd)

    def empty(self) -> None:
        shutil.rmtree(self.path / "many", ignore_errors=True)
        (self.path / "ballast").unlink(missing_ok=True)

    def use_up_names(self, leave: int) -> None:
        """Make files until there can be no more, then remove as many."""
        many = self.path / "many"
        many.mkdir()
        made = 0
        with contextlib.suppress(OSError):
            while True:
                (many / f"{made}").touch()
                made += 1
        for number in range(made - leave, made):
            (many / f"{number}").unlink()


@contextlib.contextmanager
def disk(path: Path, kind: str, options: str = "") -> Iterator[Disk]:
    """Mounted for the context."""
    made = Disk(path, kind, options)
    made.make()
    try:
        yield made
    finally:
        subprocess.run(["umount", str(path)], capture_output=True, check=False)
        made._image.unlink(missing_ok=True)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"{command[0]} isn't permitted here: {done.stderr.strip()}")
