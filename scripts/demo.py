"""Show on this machine that a killed run resumes bit for bit, and fail when that was not shown.

Trains a small GPT without a break. Then, once with the single file and once sharded, trains it again beside
a real daemon, kills the trainer in the middle of an epoch and the daemon (SIGKILL), starts both again and
compares every loss. Then flips one bit of the newest checkpoint, and the one before it must be the latest.
Writes outputs/resume-demo.json. Exit code 0 only if all of it happened and every difference is exactly 0.0.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import shutil
import signal
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from demo_processes import Child, ckptd, fail, say, start_daemon
from demo_proof import MAX_DIFF, Kill, Outcome, measure, side_by_side

HERE = Path(__file__).resolve().parent
REPORT = HERE.parent / "outputs" / "resume-demo.json"
WORK = HERE.parent / "outputs" / "resume-demo"
RUN = "gpt"
STEPS = 120
EVERY = 10
SHOWN_EVERY = 20
TRAINER_TIMEOUT_S = 600.0
# One thread: two wait for each other at every operation, which makes a busy machine ten times slower.
MODEL = ["--width", "128", "--block", "64", "--batch-size", "16", "--corpus-bytes", "27000", "--threads", "1"]


@dataclass(frozen=True)
class Play:
    """One of the two: its name, the trainer's flags, the step to kill after, the data files it must make."""

    name: str
    flags: tuple[str, ...]
    kill_after: int
    pattern: str
    min_files: int


PLAYS = (
    Play("single", ("--shards", "auto"), 67, "ckpt.pt", 1),
    Play("sharded", ("--shards", "3"), 44, "*.shard-*.pt", 4),
)


def main() -> int:
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    began = time.monotonic()
    prepare()
    say(f"1/4 baseline: {STEPS} steps without a break, nothing saved")
    baseline = run_trainer("baseline", [])
    say(f"     {baseline['parameters']:,} parameters, {baseline['batches_per_epoch']} batches an epoch")
    outcomes = {}
    for number, play in enumerate(PLAYS, start=2):
        say(f"{number}/4 {play.name}: the same run beside a daemon, a checkpoint every {EVERY} steps, killed")
        outcomes[play.name] = kill_and_resume(play, baseline)
    say("4/4 one bit of the newest checkpoint is flipped")
    fallback = flip_a_bit(WORK / PLAYS[-1].name)
    return report(baseline, outcomes, fallback, time.monotonic() - began)


def prepare() -> None:
    """An empty work folder; the daemon of a demo that was broken off is stopped first."""
    for play in PLAYS:
        if (WORK / play.name / ".ckptd" / "daemon.json").exists():
            ckptd("stop", "--root", str(WORK / play.name), check=False)
    shutil.rmtree(WORK, ignore_errors=True)
    WORK.mkdir(parents=True)
    REPORT.unlink(missing_ok=True)


def start_trainer(name: str, flags: list[str]) -> Child:
    command = [sys.executable, str(HERE / "train_gpt.py"), "--steps", str(STEPS), *MODEL]
    return Child([*command, "--out-losses", str(WORK / f"{name}.json"), *flags])


def run_trainer(name: str, flags: list[str]) -> dict[str, Any]:
    """Run a trainer to its end and return what it reports."""
    child = start_trainer(name, flags)
    for line in child.lines(TRAINER_TIMEOUT_S):
        show(line)
    if child.wait() != 0:
        fail(f"the trainer left with {child.wait()}:\n{child.tail()}")
    result: dict[str, Any] = json.loads((WORK / f"{name}.json").read_text())
    if len(result["losses"]) != STEPS or not all(map(math.isfinite, result["losses"])):
        fail(f"the trainer reports {len(result['losses'])} losses, wanted {STEPS} finite ones")
    return result


def show(line: str) -> None:
    step = step_of(line)
    if step is None or step % SHOWN_EVERY == 0:
        say(f"     | {line}")


def step_of(line: str) -> int | None:
    return int(line.split()[1].split("/")[0]) if line.startswith("step ") else None


def kill_and_resume(play: Play, baseline: dict[str, Any]) -> Outcome:
    """Kill both in the middle of an epoch, start both again, compare."""
    root = WORK / play.name
    flags = ["--root", str(root), "--run", RUN, "--daemon", "attach", "--ckpt-every-steps", str(EVERY)]
    kill = train_and_kill(play, root, [*flags, *play.flags])
    again = run_trainer(f"{play.name}-resumed", [*flags, *play.flags])
    ckptd("drain", "--root", str(root), "--verified")
    ckptd("stop", "--root", str(root))
    outcome = measure(baseline, again, kill)
    side_by_side(baseline["losses"], again["losses"], outcome)
    return outcome


def train_and_kill(play: Play, root: Path, flags: list[str]) -> Kill:
    """Start daemon and trainer, kill both, start the daemon again and ask it for the latest checkpoint."""
    policy = ["--keep-last", "3", "--keep-best", "1", "--monitor", "loss:min"]
    daemon = start_daemon(root, ["--run", RUN, *policy])
    child = start_trainer(play.name, flags)
    for line in child.lines(TRAINER_TIMEOUT_S):
        show(line)
        if step_of(line) == play.kill_after:
            break
    else:
        fail(f"the trainer left with {child.wait()} before step {play.kill_after}:\n{child.tail()}")
    exits = child.sigkill(), daemon.sigkill()
    # It went on until the signal came, on a busy machine past the next checkpoint.
    last = max([play.kill_after, *(step_of(line) or 0 for line in child.lines(TRAINER_TIMEOUT_S))])
    say(f"     SIGKILL after step {last}: trainer left with {exits[0]}, daemon with {exits[1]}")
    if exits != (-signal.SIGKILL, -signal.SIGKILL):
        fail(f"they did not die of SIGKILL:\n{child.tail()}\n{daemon.tail()}")
    start_daemon(root, [])  # adopts what lay sealed in shared memory; the policy is in the root
    ckptd("drain", "--root", str(root))
    latest = Path(ckptd("latest", "--root", str(root), "--run", RUN).stdout.strip())
    files = sorted(file.name for file in latest.iterdir())
    say(f"     latest after the daemon's restart: {latest.name} ({', '.join(files)})")
    if len(list(latest.glob(play.pattern))) < play.min_files:
        fail(f"{latest} has not the files of the {play.name} layout: {', '.join(files)}")
    return Kill(after_step=last, trainer_exit=exits[0], daemon_exit=exits[1], latest=latest, files=files)


def flip_a_bit(root: Path) -> dict[str, str]:
    """Flip one bit in the largest file of the newest checkpoint: the one before it must be the latest now."""
    ask = ("latest", "--root", str(root), "--run", RUN)
    newest = Path(ckptd(*ask).stdout.strip())
    victim = max(newest.iterdir(), key=lambda file: file.stat().st_size)
    with victim.open("r+b") as file:
        file.seek(victim.stat().st_size // 2)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))
    answer = ckptd(*ask)
    fallen_back = Path(answer.stdout.strip())
    reason = answer.stderr.strip()
    say(f"     $ ckptd latest    (one bit of {newest.name}/{victim.name} flipped)")
    say("\n".join(f"     {line}" for line in (*reason.splitlines(), str(fallen_back))))
    if fallen_back == newest or not fallen_back.is_dir():
        fail(f"latest is {fallen_back}, wanted the one before {newest}")
    if newest.name not in reason or victim.name not in reason:
        fail(f"`ckptd latest` does not name {newest.name} and {victim.name} as the reason: {reason!r}")
    say("     $ ckptd list")
    ckptd("list", "--root", str(root), shown=True)
    return {"flipped": f"{newest.name}/{victim.name}", "latest": fallen_back.name, "reason": reason}


def report(
    baseline: dict[str, Any], outcomes: dict[str, Outcome], fallback: dict[str, str], seconds: float
) -> int:
    """Write the report, say the result, and return the exit code."""
    largest = max(outcome.max_loss_diff_after_resume for outcome in outcomes.values())
    history = max(outcome.max_loss_diff_before_resume for outcome in outcomes.values())
    exact = largest == 0.0 and history == 0.0
    data = {
        "max_loss_diff_after_resume": {name: o.max_loss_diff_after_resume for name, o in outcomes.items()},
        "exactly_zero": exact,
        "plays": {name: asdict(outcome) for name, outcome in outcomes.items()},
        "bit_flip": fallback,
        "model": {key: baseline[key] for key in ("parameters", "batches_per_epoch")} | {"steps": STEPS},
        "machine": {
            "python": platform.python_version(),
            "cpus": os.cpu_count(),
            "system": platform.platform(),
        },
        "seconds": round(seconds, 1),
    }
    REPORT.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
    say(f"wrote {REPORT.relative_to(HERE.parent)} in {seconds:.0f} s")
    if largest >= MAX_DIFF:
        fail(f"a loss after the resume differs by {largest!r}, wanted less than {MAX_DIFF}")
    if not exact:
        fail(f"losses differ by {max(largest, history)!r}; on one machine they must be exactly equal")
    say("PASSED: killed twice, resumed in the middle of an epoch, every loss exactly equal (difference 0.0)")
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        sys.exit(main())
    finally:
        Child.end_all()
