"""Jobs for check_resume with one fault each: the exact job of jobs_exact, less or more one thing."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import ckptd
from jobs_exact import BATCH, Noisy, build, one_step, seed, train

Job = tuple[dict[str, Any], Iterator[Any]]


def _without(name: str) -> Job:
    seed()
    whole = build()
    return {key: value for key, value in whole.items() if key != name}, train(whole)


def optimizer_left_out() -> Job:
    return _without("optimizer")


def scheduler_left_out() -> Job:
    return _without("scheduler")


def ema_left_out() -> Job:
    seed()
    state = build()
    ema = torch.optim.swa_utils.AveragedModel(state["model"])

    def losses() -> Iterator[Any]:
        for loss in train(state):
            ema.update_parameters(state["model"])
            yield {"loss": loss, "to_ema": float(ema.module[0].weight.detach().mean())}

    return state, losses()


class Counter:
    def __init__(self) -> None:
        self.steps = 0


def counter_outside() -> Job:
    seed()
    state = build()
    counter = Counter()

    def losses() -> Iterator[Any]:
        for loss in train(state):
            counter.steps += 1
            yield loss.item() + 0.001 * (counter.steps // 4)

    return state, losses()


COUNTED = 0


def counted_by_a_global() -> Job:
    global COUNTED
    COUNTED = 0
    seed()
    state = build()

    def losses() -> Iterator[Any]:
        global COUNTED
        for loss in train(state):
            COUNTED += 1
            yield loss.item() + COUNTED

    return state, losses()


def steps_counted_anew() -> Job:
    seed()
    state = build()

    def losses() -> Iterator[Any]:
        batches = train(state)
        for step in range(1, 9):
            yield {"loss": next(batches), "step": step}

    return state, losses()


def plain_loader() -> Job:
    seed()
    state = build()
    del state["loader"]
    loader = DataLoader(Noisy(), BATCH, shuffle=True)

    def losses() -> Iterator[Any]:
        while True:
            for batch in loader:
                yield one_step(state, batch)

    return state, losses()


def unseeded() -> Job:
    torch.manual_seed(1)  # and nobody seeds Python's random
    state = build()
    return state, train(state)


def made_without_a_seed() -> Job:
    seed()
    model = nn.Linear(4, 1)
    torch.nn.init.constant_(model.weight, int(time.time_ns() % 1_000_000))
    return {"model": model}, iter(float(model.weight.detach().sum()) for _ in range(100))


def never_seeded_and_never_used() -> Job:
    torch.manual_seed(1)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    data = [torch.rand(4) for _ in range(8)]
    loader = ckptd.ResumableLoader(DataLoader(data, 2, shuffle=True))  # type: ignore[arg-type]

    def losses() -> Iterator[Any]:
        while True:
            for batch in loader:
                loss = model(batch).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                yield loss

    return {"model": model, "optimizer": optimizer, "loader": loader}, losses()


def own_generator() -> Job:
    seed()
    state = build()
    noise = torch.Generator().manual_seed(3)

    def losses() -> Iterator[Any]:
        for loss in train(state):
            yield loss.item() + float(torch.rand((), generator=noise))

    return state, losses()


class Draws:
    def __init__(self) -> None:
        self.rng = np.random.default_rng(3)


def numpy_generator() -> Job:
    seed()
    state = build()
    draws = Draws()

    def losses() -> Iterator[Any]:
        for loss in train(state):
            yield loss.item() + float(draws.rng.random())

    return state, losses()


class Losses:
    """An iterator that is no generator, with a memory of its own."""

    def __init__(self, state: dict[str, Any]) -> None:
        self.batches, self.offset = train(state), 0.0

    def __iter__(self) -> Iterator[float]:
        return self

    def __next__(self) -> float:
        self.offset += 1.0
        return next(self.batches).item() + self.offset


def an_iterator_of_its_own() -> Job:
    seed()
    state = build()
    return state, Losses(state)


def differs_at_the_next_epoch() -> Job:
    seed()
    state = build()

    def losses() -> Iterator[Any]:
        for passed, loss in enumerate(train(state)):
            yield loss.item() + (0.5 if state["train"].step == 6 and passed < 5 else 0.0)

    return state, losses()


def differs_from_step_6() -> Job:
    seed()
    state = build()

    def losses() -> Iterator[Any]:
        for loss in train(state):
            yield loss.item() + (time.time() if state["train"].step >= 6 else 0.0)

    return state, losses()


class Remembers(nn.Module):
    """A running mean in a buffer that no state_dict holds, and a count in a plain attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(4), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.seen += x.detach().mean(0)
        return x + 0.01 * self.seen


def buffer_not_persistent() -> Job:
    seed()
    state = build()
    state["model"] = nn.Sequential(Remembers(), state["model"])
    return state, train(state)


class Reads:
    def __init__(self) -> None:
        self.count = 0


READS = Reads()


class Fading(Dataset[Tensor]):
    """Each sample that was read, by whomever, makes the later ones fainter."""

    def __len__(self) -> int:
        return 14

    def __getitem__(self, index: int) -> Tensor:
        READS.count += 1
        return torch.full((4,), 1.0 / (READS.count + index))


def dataset_with_memory() -> Job:
    READS.count = 0
    seed()
    state = build()
    state["loader"] = ckptd.ResumableLoader(DataLoader(Fading(), BATCH, shuffle=True))
    return state, train(state)


def ignores_the_restore() -> Job:
    seed()
    state = build()

    def losses() -> Iterator[Any]:
        seed()
        yield from train(build())

    return state, losses()


class Halves:
    """Loads half of what it saves."""

    def __init__(self) -> None:
        self.value = 8

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"] // 2


def loads_something_else() -> Job:
    state, losses = _without("nothing")
    state["halves"] = Halves()
    return state, losses


def grows_a_name() -> Job:
    seed()
    state = build()

    def losses() -> Iterator[Any]:
        for loss in train(state):
            state["late"] = {"best": float(loss.detach())}
            yield loss

    return state, losses()


def ends_when_resumed() -> Job:
    seed()
    state = build()

    def losses() -> Iterator[Any]:
        batches = train(state)
        for _ in range(8 - 2 * state["train"].step):
            yield next(batches)

    return state, losses()


def raises_at_step_3() -> Job:
    seed()
    state = build()

    def losses() -> Iterator[Any]:
        for number, loss in enumerate(train(state), start=1):
            if number == 3:
                raise ArithmeticError("the third step is one too many")
            yield loss

    return state, losses()


def ends_after_3() -> Job:
    state, losses = _without("nothing")
    return state, (next(losses) for _ in range(3))


def is_killed_by_another() -> Job:
    os.kill(os.getpid(), signal.SIGKILL)
    return build(), iter(())


def hangs() -> Job:
    """And it has started something that would outlive it."""
    stays = subprocess.Popen(["sleep", "600"])
    print(f"pid {os.getpid()}\npid {stays.pid}", flush=True)
    seed()
    state = build()

    def losses() -> Iterator[Any]:
        yield next(train(state))
        print("going to sleep", flush=True)
        time.sleep(600)

    return state, losses()


def cant_be_stored() -> Job:
    state, losses = _without("nothing")
    state["function"] = print
    return state, losses


def gives_no_pair() -> Any:
    return build()


def gives_a_function() -> Any:
    state = build()
    return state, train


def yields_no_number() -> Any:
    return build(), iter(["a", "b"])


def needs_an_argument(width: int) -> Any:
    return width


def draws_from_numpy_late() -> Job:
    torch.manual_seed(1)
    random.seed(1)
    weight = torch.zeros(2)

    def losses() -> Iterator[Any]:
        for step in range(100):
            yield float(np.random.random()) * 0.0 if step == 2 else float(step)

    return {"weight": weight}, losses()


def plain_loader_in_the_state() -> Job:
    state, losses = plain_loader()
    return state | {"loader": DataLoader(Noisy(), BATCH)}, losses


def history_outside() -> Job:
    seed()
    state = build()
    history: list[float] = []

    def losses() -> Iterator[Any]:
        for loss in train(state):
            history.append(loss.item())
            yield sum(history) / len(history)

    return state, losses()


def _without_a_loader() -> dict[str, Any]:
    seed()
    state = build()
    del state["loader"]
    return state


def history_in_the_loop() -> Job:
    state = _without_a_loader()

    def losses() -> Iterator[Any]:
        history: list[float] = []
        while True:
            history.append(one_step(state, torch.rand(BATCH, 4)).item())
            yield sum(history) / len(history)

    return state, losses()


def counts_by_a_range_made_too_early() -> Job:
    state = _without_a_loader()

    def losses(steps: range) -> Iterator[Any]:
        for step in steps:
            loss = one_step(state, torch.rand(BATCH, 4))
            state["train"].step = step + 1
            yield loss

    return state, losses(range(state["train"].step, 100))


def weighs_by_such_a_range() -> Job:
    state = _without_a_loader()

    def losses(steps: range) -> Iterator[Any]:
        for step in steps:
            yield one_step(state, torch.rand(BATCH, 4)).item() * (step + 1)

    return state, losses(range(state["train"].step, 100))


def scaler_left_out() -> Job:
    """Powers of two scale what SGD sees and leave no trace in it."""
    seed()
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)

    def losses() -> Iterator[Any]:
        while True:
            optimizer.zero_grad()
            loss = model(torch.rand(BATCH, 4)).square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            yield loss

    return {"model": model, "optimizer": optimizer}, losses()


DRAWS = np.random.default_rng(3)


class DrawsFromAModule(Dataset[Tensor]):
    def __len__(self) -> int:
        return 14

    def __getitem__(self, index: int) -> Tensor:
        return torch.full((4,), index / 14 + float(DRAWS.random()))


def draws_from_a_module(workers: int = 0) -> Job:
    DRAWS.bit_generator.state = np.random.default_rng(3).bit_generator.state
    seed()
    state = build()
    state["loader"] = ckptd.ResumableLoader(DataLoader(DrawsFromAModule(), BATCH, num_workers=workers))
    return state, train(state)


def workers_draw_from_a_module() -> Job:
    return draws_from_a_module(1)
