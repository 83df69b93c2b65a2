"""Every call of the system fails, with every error it can really end with: once and for a while, in every process.

First in this process, story by story, until a whole round meets no fault; while a process saves without a daemon; while
a real daemon starts; then in one that serves, its verifier and a trainer; below Python, by strace; in one that may
take no more memory; and on real file systems that are full, or cut off before each call.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

import pytest
from part import Deadline, Findings, Part, say
from short_of_memory import lift, limit

from ckptd_places import daemon_of
from failing_alone import WRITERS, tell_alone
from failing_daemon import Trainer, trainer_of
from failing_start import Starts
from failing_stories import STORIES, tell
from kept_promises import KEEP
from nth_call import KINDS
from real_disk_stories import cut_at_each_change, while_short
from real_disks import ERROR, FLUSHES, disk

#: Of the time: a daemon's disk in this process, no daemon, starts, real processes, strace, memory, real disks.
_SHARES: Final = (0.3, 0.1, 0.1, 0.2, 0.1, 0.05, 0.15)
#: When a call of whom fails; a start that fails is tried again after half a minute, so it isn't among them.
_WHEN: Final = (
    ("serving", "daemon"),
    ("serving", "verifier"),
    ("attaching", "client"),
    ("attaching", "daemon"),
)
#: About how many calls of a kind a start makes, where it makes many.
_CALLS_OF_A_START: Final = {
    "open": 60, "stat": 120, "close": 60, "list": 12, "change": 25, "write": 8, "mkdir": 12,
}  # fmt: skip
#: For strace: system calls below Python, and what they are made to say.
_BELOW: Final = (
    ("fsync", "EIO"), ("fsync", "EINTR"), ("openat", "EMFILE"), ("openat", "EINTR"), ("write", "EINTR"),
    ("write", "ENOSPC"), ("renameat,rename,renameat2", "EIO"), ("mmap", "ENOMEM"), ("close", "EINTR"),
    ("newfstatat,fstat", "ENOMEM"), ("getdents64", "EIO"), ("pwrite64,pwritev", "EIO"), ("unlinkat,unlink", "EIO"),
)  # fmt: skip


def run(minutes: float, seed: int, folder: Path, findings: Findings) -> None:
    """As scripts/torture runs it."""
    chance = random.Random(seed)
    logging.disable(logging.CRITICAL)
    began = time.monotonic()
    parts = (
        _in_this_process, _without_a_daemon, _at_a_start, _in_real_processes, _below_python, _short_of_memory,
        _on_real_disks,
    )  # fmt: skip
    for part, until in zip(parts, _cumulated(), strict=True):
        left = Deadline(max(0.0, minutes * until - (time.monotonic() - began) / 60))
        try:
            part(findings, chance, folder, left)
        except pytest.skip.Exception as why:
            findings.not_tried[part.__name__.strip("_")] = str(why)
        say(f"{part.__name__}: {sum(findings.tried.values())} tried, {len(findings.faults)} faults")


def _cumulated() -> Iterator[float]:
    total = 0.0
    for share in _SHARES:
        total += share
        yield total


def _in_this_process(findings: Findings, chance: random.Random, folder: Path, left: Deadline) -> None:
    """All of it in a random order; with too little time every so many-th call, from a random one on."""
    sweeps = _shuffled(STORIES, chance)
    for number, (name, kind, how, lasting) in enumerate(sweeps):
        if left.over():
            findings.not_tried["sweeps in this process"] = (
                f"{len(sweeps) - number} of {len(sweeps)}: no time left"
            )
            return
        every = chance.choice((1, 2, 3))
        _sweep(findings, name, (kind, how), lasting, (chance.randint(1, every), every), left)


def _shuffled(names: Iterable[str], chance: random.Random) -> list[tuple[str, str, str, bool]]:
    """Each story with each kind of call and each of its errors, once and lasting."""
    sweeps = [
        (name, kind, how, lasting)
        for name in names
        for kind, hows in KINDS.items()
        for how in hows
        for lasting in (False, True)
    ]
    chance.shuffle(sweeps)
    return sweeps


def _sweep(
    findings: Findings,
    name: str,
    fault: tuple[str, str],
    lasting: bool,
    calls: tuple[int, int],
    left: Deadline,
) -> None:
    kind, how = fault
    memory = Path(tempfile.mkdtemp(prefix="faults-", dir=os.environ["CKPTD_SHM_DIR"]))
    lasts = " and all after it" if lasting else ""
    first, every = calls
    try:
        for told in tell(
            STORIES[name], kind, lambda _: how, memory, lasting=lasting, first=first, every=every
        ):
            findings.tried[f"{kind} failed in this process"] += told.met > 0
            for wrong in told.wrong:
                where = f"{name}: call {told.number}{lasts} of {kind} says {how}"
                findings.fault(f"{where}: {wrong}")
            if left.over():
                break
    finally:
        shutil.rmtree(memory, ignore_errors=True)


def _without_a_daemon(findings: Findings, chance: random.Random, folder: Path, left: Deadline) -> None:
    sweeps = _shuffled(WRITERS, chance)
    for number, (name, kind, how, lasting) in enumerate(sweeps):
        if left.over():
            findings.not_tried["sweeps without a daemon"] = (
                f"{len(sweeps) - number} of {len(sweeps)}: no time left"
            )
            return
        every = chance.choice((1, 5, 13))
        with tempfile.TemporaryDirectory(prefix="faults-", dir=os.environ["CKPTD_SHM_DIR"]) as memory:
            for told in tell_alone(
                WRITERS[name], kind, lambda _, how=how: how, Path(memory), lasting=lasting,
                first=chance.randint(1, every), every=every,
            ):  # fmt: skip
                findings.tried[f"{kind} failed in {name}"] += told.met > 0
                for wrong in told.wrong:
                    lasts = " and all after it" if lasting else ""
                    findings.fault(f"{name}: call {told.number}{lasts} of {kind} says {how}: {wrong}")
                if left.over():
                    break


def _at_a_start(findings: Findings, chance: random.Random, folder: Path, left: Deadline) -> None:
    """In turn of a root that isn't there yet and of one that has checkpoints."""
    own = Path(tempfile.mkdtemp(dir=folder))
    starts, rounds = Starts(own / "root", own / "orders"), 0
    while not left.over():
        rounds += 1
        if rounds % 2:
            starts = Starts(own / f"made-{rounds}" / "fresh" / "root", own / "orders")
        kind = chance.choice(list(KINDS))
        how, lasting = chance.choice(KINDS[kind]), chance.random() < 0.5
        number = chance.randint(1, _CALLS_OF_A_START.get(kind, 6))
        told = starts.round(kind, number, how, lasting=lasting)
        findings.tried[f"{kind} failed in a daemon that starts"] += told.met > 0
        for wrong in told.wrong:
            findings.fault(f"start: call {number} of {kind} says {how} (lasting: {lasting}): {wrong}")


def _in_real_processes(findings: Findings, chance: random.Random, folder: Path, left: Deadline) -> None:
    with _trainer(folder) as trainer:
        record = daemon_of(trainer.root)
        while not left.over():
            when, who = chance.choice(_WHEN)
            kind = chance.choice(list(KINDS))
            how, lasting = chance.choice(KINDS[kind]), chance.random() < 0.5
            number = chance.randint(1, 40)
            met, wrong = trainer.round(when, who, kind, number, how, lasting=lasting)
            findings.tried[f"{kind} failed in the {who}, {when}"] += met > 0
            for one in wrong:
                findings.fault(
                    f"{when}: call {number} of {kind} of the {who} says {how} (lasting: {lasting}): {one}"
                )
        if daemon_of(trainer.root) != record:
            findings.fault("the daemon didn't live through it")
        _check_left(findings, trainer)


def _check_left(findings: Findings, trainer: Trainer) -> None:
    until = time.monotonic() + 30  # what couldn't be removed is tried again every ten seconds
    while trainer.left_over() and time.monotonic() < until:
        time.sleep(0.2)
    for path in trainer.left_over():
        findings.fault(f"left over: {path}")


@contextlib.contextmanager
def _trainer(folder: Path) -> Iterator[Trainer]:
    made = Path(tempfile.mkdtemp(dir=folder))
    with trainer_of(made / "root", made / "orders") as trainer:
        yield trainer


def _below_python(findings: Findings, chance: random.Random, folder: Path, left: Deadline) -> None:
    """strace at the daemon, for one snapshot at a time: what libzmq and the interpreter do is met too.

    Whoever is hit there may end: then the trainer gets another daemon, and nothing that was acknowledged is lost.
    """
    if shutil.which("strace") is None:
        pytest.skip("there is no strace here")
    while not left.over():
        with _trainer(folder) as trainer:
            for _ in range(20):
                if left.over() or (record := daemon_of(trainer.root)) is None:
                    break
                call, how = chance.choice(_BELOW)
                number = chance.randint(1, 12)
                hit, wrong = _traced(trainer, record.pid, call, how, number, folder)
                findings.tried[f"{call} said {how} below Python"] += hit
                for one in wrong:
                    findings.fault(f"strace: call {number} of {call} of the daemon says {how}: {one}")


def _traced(
    trainer: Trainer, pid: int, call: str, how: str, number: int, folder: Path
) -> tuple[int, list[str]]:
    log = folder / "strace"
    command = ["strace", "-f", "-qq", "-o", str(log), "-e", f"trace={call}", "-p", str(pid)]
    process = subprocess.Popen(
        [*command, "-e", f"inject={call}:error={how}:when={number}"], stderr=subprocess.PIPE, text=True
    )

    def detach() -> None:
        process.terminate()
        process.communicate()

    wrong = trainer.between(lambda: _until_traced(pid, process), detach)
    return len(re.findall(r"\(INJECTED\)", log.read_text(errors="replace"))), wrong


def _until_traced(pid: int, strace: subprocess.Popen[str]) -> None:
    until = time.monotonic() + 20
    while "TracerPid:\t0" in Path(f"/proc/{pid}/status").read_text():
        if strace.poll() is not None:
            said = strace.stderr.read() if strace.stderr is not None else ""
            pytest.skip(f"strace isn't permitted here: {said.strip()}")
        if time.monotonic() > until:
            raise TimeoutError("strace didn't attach")
        time.sleep(0.01)


def _short_of_memory(findings: Findings, chance: random.Random, folder: Path, left: Deadline) -> None:
    """libzmq ends a process that has no memory for it: then the trainer gets another daemon."""
    with _trainer(folder) as trainer:
        while not left.over() and (record := daemon_of(trainer.root)) is not None:
            said = list[str]()
            wrong = trainer.between(
                lambda pid=record.pid, said=said: said.append(limit(pid, chance)), lambda pid=record.pid: lift(pid)
            )  # fmt: skip
            findings.tried["daemon that may take no more memory"] += 1
            for one in wrong:
                findings.fault(f"the daemon has {said}: {one}")


def _on_real_disks(findings: Findings, chance: random.Random, folder: Path, left: Deadline) -> None:
    while not left.over():
        kind, flush = chance.choice(
            (*[(k, f) for k in ("ext4", "xfs") for f in FLUSHES.values()], ("ext4", ERROR))
        )
        every = chance.randint(5, 9)
        mount = Path(tempfile.mkdtemp(dir=folder)) / "disk"
        with disk(mount, kind, "errors=remount-ro" if flush == ERROR else "") as small:
            first = chance.randint(1, every)
            for told in cut_at_each_change(small, flush, first=first, every=every):
                findings.tried[f"{kind} cut off, flush {flush}"] += told.met
                for wrong in told.wrong:
                    findings.fault(f"{kind} cut off before change {told.number}, flush {flush}: {wrong}")
        with disk(mount, "tmpfs", f"size={256 + 64 * KEEP}k") as small:
            for told in while_short(small, small.fill, 4096, 256 * 1024, small.empty):
                findings.tried["tmpfs full"] += told.met
                for wrong in told.wrong:
                    findings.fault(f"tmpfs with {told.number} bytes left: {wrong}")


PART = Part(
    "faults", "every system call fails, with every error, in every process; real disks full and cut off", run
)
