"""For tests: the demo's GPT, scripts/train_gpt.py, its own loop, smaller."""

from __future__ import annotations

import argparse
import functools
import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ckptd

SCRIPT = Path(__file__).resolve().parent.parent / "scripts" / "train_gpt.py"
BATCHES = 4  # an epoch
_SMALL = (
    "--block 12 --width 16 --layers 2 --heads 2 --batch-size 4 --corpus-bytes 240 --warmup 4 --dropout 0.2"
)


@functools.cache
def train_gpt() -> Any:
    """The script as a module; it reads the standard library once for all the jobs of a process."""
    spec = importlib.util.spec_from_file_location("train_gpt", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.read_corpus = functools.cache(module.read_corpus)
    return module


def arguments(steps: int, *more: str) -> list[str]:
    """The script's command line."""
    return ["train_gpt.py", *_SMALL.split(), "--threads", "1", "--steps", str(steps), *more]


def parsed(steps: int, *more: str) -> argparse.Namespace:
    before, sys.argv = sys.argv, arguments(steps, *more)
    try:
        found: argparse.Namespace = train_gpt().parse_arguments()
    finally:
        sys.argv = before
    return found


class GptJob:
    """`build` and `train` of the script, with the client's place taken by who watches."""

    def __init__(self, steps: int, workers: int, seed: int) -> None:
        self._args = parsed(steps, "--workers", str(workers), "--seed", str(seed))
        self.state: dict[str, Any] = train_gpt().build(self._args)

    def run(self, until: str, after: Callable[[str, Any], None]) -> None:
        loader = WatchedLoader(self.state["loader"])
        watched = {**self.state, "loader": loader}

        def at(step: int, metrics: dict[str, float]) -> None:
            rates = self.state["scheduler"].get_last_lr()
            after(str(step), (metrics["loss"], loader.batch, rates))

        args = argparse.Namespace(**{**vars(self._args), "steps": int(until)})
        train_gpt().train(args, watched, Watcher(at), self.state["train"].step + 1)


class WatchedLoader:
    """The loader, and the batch it gave last."""

    def __init__(self, loader: ckptd.ResumableLoader) -> None:
        self._loader = loader
        self.batch: Any = None

    def __iter__(self) -> Iterator[Any]:
        for batch in self._loader:
            self.batch = batch[0].tolist()
            yield batch

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


class Watcher:
    """What the script takes for its client."""

    def __init__(self, at: Callable[[int, dict[str, float]], None]) -> None:
        self._at = at

    def maybe_snapshot(self, step: int, state: Any, *, metrics: dict[str, float]) -> Any:
        self._at(step, metrics)
        return self  # as a ticket: this step needs no other save
