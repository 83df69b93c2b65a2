"""What a result was measured on: nothing that names the machine, its user or its folders."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

from settings import mount_of

_KINDS: Final = {
    "nvme": "NVMe",
    "vd": "virtio",
    "xvd": "Xen",
    "sd": "SCSI or SATA",
    "dm": "device mapper",
    "md": "RAID",
}


def describe(work: Path) -> dict[str, str]:
    """Words for people, by subject."""
    device, kind, options = mount_of(work)
    return {
        "cpu": _from("/proc/cpuinfo", "model name") or platform.machine(),
        "cores": f"{len(os.sched_getaffinity(0))} usable of {os.cpu_count()}",
        "memory": f"{_memory_gib():.0f} GiB",
        "kernel": f"{platform.system()} {platform.release().split('-')[0]}",
        "file system": f"{kind} ({options})",
        "disk": _disk(device),
        "load before": f"{os.getloadavg()[0]:.1f} processes (this benchmark makes 1 to 2)",
        "python": platform.python_version(),
        **{name: _version(name) for name in ("torch", "numpy", "safetensors", "lightning")},
    }


def _from(path: str, key: str) -> str:
    for line in Path(path).read_text("utf-8").splitlines():
        if line.startswith(key):
            return line.partition(":")[2].strip()
    return ""


def _memory_gib() -> float:
    return int(_from("/proc/meminfo", "MemTotal").split()[0]) / 2**20


def _disk(device: str) -> str:
    """The kind of disk below a device by its driver's letters, and what it says of itself."""
    try:
        block = Path(f"/sys/dev/block/{device}").resolve(strict=True)
        queue = next(one / "queue" for one in (block, block.parent) if (one / "queue").is_dir())
        spins = (queue / "rotational").read_text("utf-8").strip() == "1"
        cache = (queue / "write_cache").read_text("utf-8").strip()
        scheduler = (queue / "scheduler").read_text("utf-8").partition("[")[2].partition("]")[0]
    except (OSError, StopIteration):
        return "unknown"
    name = queue.parent.name
    kind = next((word for start, word in _KINDS.items() if name.startswith(start)), "unknown kind")
    spinning = "says it spins" if spins else "says it doesn't spin"
    return f"{kind} ({spinning}; cache: {cache}; scheduler: {scheduler or 'none'})"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
