#!/usr/bin/env python
"""Train a small GPT on the source of Python's standard library, with checkpoints that resume bit for bit.

An ordinary training script: without --root it doesn't save; with it, run the same command again after any
kill and it goes on where the latest valid checkpoint stands. What has to do with ckptd is in `main`, `train`
and the state that `build` returns.

    python scripts/train_gpt.py --steps 200 --root checkpoints --ckpt-every-steps 20
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sysconfig
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

import ckptd


def read_corpus(max_bytes: int) -> bytes:
    """The first max_bytes of the standard library's own source, in the order of the sorted file names."""
    root = Path(sysconfig.get_paths()["stdlib"])
    skipped = {"site-packages", "dist-packages", "__pycache__"}
    files = sorted(
        p for p in root.rglob("*.py") if p.is_file() and not skipped & set(p.relative_to(root).parts)
    )
    text = bytearray()
    for file in files:
        text += file.read_bytes()
        if len(text) >= max_bytes:
            break
    if len(text) < max_bytes:
        raise SystemExit(f"train_gpt: {root} has {len(text)} bytes of Python source, wanted {max_bytes}")
    return bytes(text[:max_bytes])


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """Windows of `block` bytes and the bytes that follow each; their places jitter by a random draw."""

    def __init__(self, corpus: bytes, block: int) -> None:
        self.tokens = torch.from_numpy(np.frombuffer(corpus, dtype=np.uint8).astype(np.int64))
        self.block = block

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.block - 1

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        start = index * self.block + random.randrange(self.block)
        window = self.tokens[start : start + self.block + 1]
        return window[:-1], window[1:]


class Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(dropout)
        )

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """Bytes in, logits of the next byte out; the output layer is the embedding (tied)."""

    def __init__(self, *, block: int, width: int, layers: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(256, width), nn.Embedding(block, width)
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256, bias=False)
        self.apply(self._start_small)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.drop(self.embed(tokens) + self.place(torch.arange(tokens.shape[1])))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    @staticmethod
    def _start_small(module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)


def make_optimizer(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    """AdamW with two groups: matrices decay, biases and norms don't."""
    decay = [p for p in model.parameters() if p.ndim >= 2]
    rest = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95))


def warmup_then_cosine(step: int, *, warmup: int, total: int) -> float:
    """The learning rate's factor before step `step` (from 0)."""
    if step < warmup:
        return (step + 1) / warmup
    return 0.1 + 0.45 * (1 + math.cos(math.pi * (step - warmup) / max(1, total - warmup)))


def endless(loader: ckptd.ResumableLoader) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches of one epoch after the other; a loader that was restored goes on in the middle of one."""
    while True:
        yield from loader


def train(
    args: argparse.Namespace, state: dict[str, Any], client: ckptd.Client | None, first_step: int
) -> None:
    """Run the steps that are left, saving as the client's cadence says."""
    model, optimizer, scheduler = state["model"], state["optimizer"], state["scheduler"]
    loader, counters = state["loader"], state["train"]
    model.train()
    batches = endless(loader)
    ticket = None
    for step in range(first_step, args.steps + 1):
        tokens, targets = next(batches)
        loss = functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        lr = scheduler.get_last_lr()[0]
        optimizer.step()
        scheduler.step()

        counters.step, counters.epoch, counters.batch_in_epoch = step, loader.epoch, loader.batch_in_epoch
        counters.losses.append(loss.item())
        print(
            f"step {step}/{args.steps}  epoch {loader.epoch}  batch {loader.batch_in_epoch}/{len(loader)}"
            f"  loss {loss.item():.4f}  lr {lr:.2e}",
            flush=True,
        )
        if client is not None:
            ticket = client.maybe_snapshot(step, state, metrics={"loss": loss.item()})
    if client is not None and ticket is None and first_step <= args.steps:
        client.snapshot(args.steps, state)  # the end, whatever the cadence says


def build(args: argparse.Namespace) -> dict[str, Any]:
    """Everything that makes up the run's state, by the component names of its checkpoints."""
    random.seed(args.seed)
    np.random.seed(args.seed)
    torch.manual_seed(args.seed)
    data = Windows(read_corpus(args.corpus_bytes), args.block)
    loader = DataLoader(data, args.batch_size, shuffle=True, drop_last=True, num_workers=args.workers)
    model = GPT(
        block=args.block, width=args.width, layers=args.layers, heads=args.heads, dropout=args.dropout
    )
    optimizer = make_optimizer(model, args.lr)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: warmup_then_cosine(step, warmup=args.warmup, total=args.steps)
    )
    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "loader": ckptd.ResumableLoader(loader),
        "train": ckptd.TrainState(),
    }


def make_client(args: argparse.Namespace) -> ckptd.Client:
    every_steps, every_s = args.ckpt_every_steps, args.ckpt_every_seconds
    if every_steps is None and every_s is None:
        every_steps = 50
    cadence = ckptd.Cadence(every_steps=every_steps, every_s=every_s)
    sharding = ckptd.Sharding(by=args.shard_by, shards=args.shards)
    return ckptd.Client(root=args.root, run=args.run, daemon=args.daemon, cadence=cadence, sharding=sharding)


def main() -> None:
    """Build, restore, train, and write the losses."""
    args = parse_arguments()
    torch.set_num_threads(args.threads)  # a fixed number: another one adds up in another order
    torch.use_deterministic_algorithms(True)
    state = build(args)
    begun = time.monotonic()
    resumed = None
    with make_client(args) if args.root else nullcontext() as client:
        if client is not None:
            resumed = client.restore(state)
        if resumed is not None:
            counters = state["train"]
            print(
                f"resumed {resumed.path} at step {resumed.step}, epoch {counters.epoch},"
                f" batch {counters.batch_in_epoch}",
                flush=True,
            )
        first_step = resumed.next_step if resumed is not None else 1
        resumed_batch = state["train"].batch_in_epoch
        train(args, state, client, first_step)
    if args.out_losses:
        write_losses(args.out_losses, state, resumed, resumed_batch, time.monotonic() - begun)


def write_losses(path: Path, state: dict[str, Any], resumed: Any, batch: int, seconds: float) -> None:
    """What the run did, for whoever compares two of them."""
    origin = None
    if resumed is not None:
        origin = {"path": str(resumed.path), "step": resumed.step, "batch_in_epoch": batch}
    report = {
        "losses": state["train"].losses,
        "resumed": origin,
        "batches_per_epoch": len(state["loader"]),
        "parameters": sum(p.numel() for p in state["model"].parameters()),
        "seconds": seconds,
    }
    path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    saving = parser.add_argument_group("checkpoints")
    saving.add_argument("--root", type=Path, help="folder of the checkpoints; without it nothing is saved")
    saving.add_argument("--run", default="gpt", help="name of the run in the root (default: %(default)s)")
    saving.add_argument("--daemon", choices=("auto", "attach", "off"), default="auto")
    saving.add_argument("--ckpt-every-steps", type=int, metavar="N", help="save at the multiples of N")
    saving.add_argument(
        "--ckpt-every-seconds",
        type=float,
        metavar="S",
        help="save once S seconds passed; neither given: every 50 steps",
    )
    saving.add_argument("--shards", type=_shards, default="auto", help='"auto" or files per component')
    saving.add_argument("--shard-by", choices=("size", "round-robin", "param-group"), default="size")
    saving.add_argument("--out-losses", type=Path, metavar="FILE", help="write all losses as JSON at the end")
    training = parser.add_argument_group("training")
    for name, default in (("steps", 200), ("batch-size", 16), ("warmup", 10), ("seed", 0), ("threads", 2)):
        training.add_argument(f"--{name}", type=int, default=default)
    training.add_argument("--lr", type=float, default=1e-3)
    training.add_argument("--workers", type=int, default=0, help="DataLoader workers")
    training.add_argument("--corpus-bytes", type=int, default=1_000_000)
    model = parser.add_argument_group("model")
    for name, default in (("block", 64), ("width", 128), ("layers", 4), ("heads", 4)):
        model.add_argument(f"--{name}", type=int, default=default)
    model.add_argument("--dropout", type=float, default=0.1)
    return parser.parse_args()


def _shards(text: str) -> int | str:
    return text if text == "auto" else int(text)


if __name__ == "__main__":
    main()
