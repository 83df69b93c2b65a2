"""The trainer that scripts/trials/kills.py kills: real model, real optimizer, a snapshot after every few steps.

What it was told goes to a journal, one JSON object per line, each in one write, which SIGKILL can't tear.
Usage: trainer.py ROOT RUN JOURNAL STOP_FILE; says "ready" once torch is loaded and waits on stdin for its client's
settings, a line of JSON.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(1, str(Path(__file__).resolve().parent.parent.parent / "tests"))

import torch
from torch import nn

import ckptd
from killing import Killing

SNAPSHOT_EVERY_STEPS = 2


class Journal:
    """Append-only, one write per event.

    Attributes:
        trainer: The trainer's number, from the file's name; its checkpoints carry it as a metric.
        streams: Nothing lies in slots.
    """

    def __init__(self, path: Path) -> None:
        self.trainer = int(path.name.rpartition("-")[2])
        self.streams = False
        self._sealed: set[int] = set()
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def seal(self, snapshot: int) -> None:
        """It lies in a slot now: written down once."""
        if snapshot not in self._sealed:
            self._sealed.add(snapshot)
            self.write("sealed", snapshot=snapshot)

    def write(self, event: str, **fields: Any) -> None:
        os.write(self._fd, (json.dumps({"event": event, "trainer": self.trainer, **fields}) + "\n").encode())


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(96, 384), nn.Tanh(), nn.Linear(384, 96))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    batch = torch.randn(8, 96)
    loss = nn.functional.mse_loss(model(batch), batch)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
    return loss.item()


def digest_of(model: dict[str, torch.Tensor], moments: dict[str, dict[str, torch.Tensor]], train: Any) -> str:
    """One hash over everything that must come back; the checker computes it from the loaded checkpoint."""
    import hashlib

    digest = hashlib.sha256(repr((train["step"], train["losses"][-3:])).encode())
    for name in sorted(model):
        for tensor in (
            model[name],
            moments[f"model.{name}"]["exp_avg"],
            moments[f"model.{name}"]["exp_avg_sq"],
        ):
            digest.update(tensor.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def live_digest(model: nn.Module, optimizer: torch.optim.Optimizer, train: ckptd.TrainState) -> str:
    named = dict(model.named_parameters())
    moments = {f"model.{name}": optimizer.state[parameter] for name, parameter in named.items()}
    return digest_of(dict(named), moments, {"step": train.step, "losses": train.losses})


def run(client: ckptd.Client, journal: Journal, stop: Path) -> None:
    model, optimizer = build()
    train = ckptd.TrainState()
    state = {"model": model, "optimizer": optimizer, "train": train}
    resumed = client.restore(state)
    journal.write("resumed", step=resumed.step if resumed else None)
    pending: list[ckptd.Ticket] = []
    while not stop.exists():
        for _ in range(SNAPSHOT_EVERY_STEPS):
            train.step += 1
            train.losses.append(train_step(model, optimizer))
            del train.losses[:-100]
        digest = live_digest(model, optimizer, train)
        journal.write("begin", step=train.step)
        ticket = client.snapshot(train.step, state, metrics={"trainer": journal.trainer})
        journal.write("taken", snapshot=ticket.snapshot, step=train.step, digest=digest)
        pending = report(journal, [*pending, ticket])
    client.drain(60.0)
    report(journal, pending)


def report(journal: Journal, pending: list[ckptd.Ticket]) -> list[ckptd.Ticket]:
    """Write down what was acknowledged; returns the tickets that are still on their way."""
    left = []
    for ticket in pending:
        state = ticket.state
        if state in ("staged", "writing") and not journal.streams:
            journal.seal(ticket.snapshot)
        if state in ("committed", "verified"):
            journal.write("acked", snapshot=ticket.snapshot, sequence=ticket.sequence)
        elif state in ("superseded", "skipped"):
            journal.write("gone", snapshot=ticket.snapshot, state=state)
        elif state in ("failed", "corrupt"):
            journal.write("failed", snapshot=ticket.snapshot, state=state)
        else:
            left.append(ticket)
    return left


def main() -> None:
    root, run_name, journal, stop = sys.argv[1], sys.argv[2], Path(sys.argv[3]), Path(sys.argv[4])
    torch.set_num_threads(1)
    build()
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    if line := sys.stdin.readline():  # "": the parent has gone
        settings, journaled = json.loads(line), Journal(journal)
        journaled.streams = settings.get("transport") == "stream"
        journaled.write("settings", settings=settings)
        dies_at = settings.pop("dies_at", 0)  # of its changes of slots' headers: two for each snapshot
        with ckptd.Client(root=root, run=run_name, **settings) as client:
            if dies_at:
                Killing(dies_at, [os.environ["CKPTD_SHM_DIR"]], half=dies_at % 3 == 0)
            run(client, journaled, stop)


if __name__ == "__main__":
    main()
