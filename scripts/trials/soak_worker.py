"""The processes of a soak, which live as long as it does.

soak_worker.py trains ROOT JOURNAL STOP SEED: one client after the other, with settings, pauses and sizes drawn from the
seed; each snapshot's digest goes to the journal before it is taken.
soak_worker.py restores ROOT JOURNAL STOP SEED: the latest valid checkpoint, again and again, in a fresh model; what it
restored goes to the journal.
"""

from __future__ import annotations

import random
import sys
import time
import warnings
from pathlib import Path

import torch
from trainer import Journal, build, live_digest, train_step

import ckptd
from ckptd.errors import CkptdError
from ckptd.format.records import read_index

RUN = "soak"


def train_on(root: str, journal: Journal, stop: Path, drawn: random.Random) -> None:
    model, optimizer = build()
    train = ckptd.TrainState()
    state = {"model": model, "optimizer": optimizer, "train": train}
    while not stop.exists():
        settings = drawn.choice(SETTINGS)
        with ckptd.Client(root=root, run=RUN, **settings) as client:
            client.restore(state)
            for _ in range(drawn.randint(10, 60)):
                save_one(client, state, journal)
                time.sleep(drawn.choice((0.0, 0.0, 0.01, 0.05)))
                if stop.exists():
                    break


def save_one(client: ckptd.Client, state: dict[str, object], journal: Journal) -> None:
    model, optimizer, train = state["model"], state["optimizer"], state["train"]
    train.step += 1
    train.losses.append(train_step(model, optimizer))
    del train.losses[:-100]
    digest = live_digest(model, optimizer, train)
    journal.write("begin", step=train.step, digest=digest)
    client.snapshot(train.step, state, metrics={"trainer": journal.trainer})


def restore_again(root: str, journal: Journal, stop: Path, drawn: random.Random) -> None:
    with ckptd.Client(root=root, run="elsewhere") as client:
        while not stop.exists():
            time.sleep(drawn.uniform(0.0, 0.4))
            model, optimizer = build()
            state = {"model": model, "optimizer": optimizer, "train": ckptd.TrainState()}
            try:
                found = ckptd.latest_valid(root, RUN)
                if found is None:
                    continue
                index = read_index(found.path)
                client.restore(state, source=found.path)
            except (CkptdError, OSError) as error:
                journal.write("missed", error=f"{type(error).__name__}: {error}")
                continue
            journal.write("restored", step=index.step, digest=live_digest(model, optimizer, state["train"]))


SETTINGS = (
    {}, {"slots": 1}, {"overlap": True}, {"transport": "stream"}, {"on_busy": "skip"}, {"on_busy": "supersede"},
    {"sharding": ckptd.Sharding(shards=3)},
)  # fmt: skip


def main() -> None:
    what, root, journal, stop, seed = sys.argv[1:]
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", ckptd.CheckpointWarning)  # what is skipped is said, and meant
    do = {"trains": train_on, "restores": restore_again}[what]
    do(root, Journal(Path(journal)), Path(stop), random.Random(int(seed)))


if __name__ == "__main__":
    main()
