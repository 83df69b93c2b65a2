"""Field case 25: scalers, averages, samplers, generators, metrics: whatever has a state goes on where it stood."""

from __future__ import annotations

import random
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn, get_swa_multi_avg_fn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, get_worker_info

import ckptd
from ckptd.errors import InvalidArgument, StateMismatch, UnstorableState
from ckptd.tensors.restoring import apply_state
from round_trip import LAYOUT_IDS, LAYOUTS, same
from sweep_run import Sweep, seed

STEPS = 8


def through(folder: Path, state: dict[str, Any], live: dict[str, Any], **how: Any) -> Any:
    """Save state, restore it into live, give the report."""
    path = ckptd.save(folder / f"c{len(list(folder.iterdir()))}", state, step=1, **how)
    return apply_state(live, ckptd.load(path))


class SmallJob:
    """A model with a buffer, its optimizer, and whatever a test adds with one method called each step."""

    def __init__(self, add: Callable[[SmallJob], Callable[[int, Tensor], None]]) -> None:
        self.model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        self.train = ckptd.TrainState()
        self.state = {"model": self.model, "optimizer": self.optimizer, "train": self.train}
        self._each_step = add(self)

    def run(self, until: str, after: Callable[[str, Any], None]) -> None:
        while str(self.train.step) != until:
            loss = self.model(torch.rand(4, 3)).square().mean()
            self._each_step(self.train.step, loss)
            self.train.step += 1
            after(str(self.train.step), loss.item())

    def update(self, loss: Tensor) -> None:
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()


def swept(folder: Path, add: Callable[[SmallJob], Callable[[int, Tensor], None]]) -> Sweep:
    """Cut at every step, and at several in one run."""
    whole = Sweep(lambda: SmallJob(add), folder, STEPS)
    whole.whole()
    for cut in whole.cuts:
        whole.check(cut)
    whole.check(*whole.cuts[::2])
    return whole


# --- gradient scaler ------------------------------------------------------------------------------


def scaling(enabled: bool) -> Callable[[SmallJob], Callable[[int, Tensor], None]]:
    def add(job: SmallJob) -> Callable[[int, Tensor], None]:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3, enabled=enabled)
        job.state["scaler"] = scaler  # type: ignore[assignment]

        def each_step(step: int, loss: Tensor) -> None:
            job.optimizer.zero_grad()
            scaler.scale(loss * (float("inf") if step == 4 else 1.0)).backward()
            scaler.step(job.optimizer)
            scaler.update()

        return each_step

    return add


def test_a_scaler_grows_and_backs_off_at_the_same_steps_at_every_cut(tmp_path: Path) -> None:
    trace = swept(tmp_path, scaling(enabled=True)).trace
    scales = [shown["scaler.'scale'"] for shown in trace.values()]
    assert sum(before != after for before, after in pairwise(scales)) == 3  # grown, halved, grown again
    assert {shown["scaler.'_growth_tracker'"] for shown in trace.values()} == {"int 0", "int 1", "int 2"}


def test_a_disabled_scaler_goes_on_as_one(tmp_path: Path) -> None:
    live = {"scaler": torch.amp.GradScaler("cpu", enabled=False)}
    through(tmp_path, {"scaler": torch.amp.GradScaler("cpu", enabled=False)}, live)
    assert live["scaler"].state_dict() == {}


def test_a_scaler_that_was_never_used_keeps_its_settings(tmp_path: Path) -> None:
    live = {"scaler": torch.amp.GradScaler("cpu", init_scale=2.0, growth_interval=9)}
    stored = torch.amp.GradScaler("cpu", init_scale=8.0, growth_factor=4.0, growth_interval=5)
    through(tmp_path, {"scaler": stored}, live)
    assert live["scaler"].state_dict() == stored.state_dict()
    assert live["scaler"].scale(torch.ones(())).item() == 8.0


# --- averages of weights --------------------------------------------------------------------------

AVERAGES: dict[str, dict[str, Any]] = {
    "mean": {},
    "mean with buffers": {"use_buffers": True},
    "one by one": {"avg_fn": lambda averaged, now, count: averaged + (now - averaged) / (count + 2)},
    "ema": {"multi_avg_fn": get_ema_multi_avg_fn(0.7), "use_buffers": True},
    "swa": {"multi_avg_fn": get_swa_multi_avg_fn()},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", AVERAGES)
def test_an_average_of_weights_goes_on_at_every_cut(name: str, tmp_path: Path) -> None:
    def add(job: SmallJob) -> Callable[[int, Tensor], None]:
        averaged = job.state["averaged"] = AveragedModel(job.model, **AVERAGES[name])  # type: ignore[assignment]

        def each_step(step: int, loss: Tensor) -> None:
            job.update(loss)
            averaged.update_parameters(job.model)  # type: ignore[attr-defined]

        return each_step

    trace = swept(tmp_path, add).trace
    assert len({shown["averaged.'module.0.weight'"] for shown in trace.values()}) == STEPS + 1
    assert len({shown["averaged.'n_averaged'"] for shown in trace.values()}) == STEPS + 1


@pytest.mark.slow
def test_stochastic_weight_averaging_goes_on_before_at_and_after_its_start(tmp_path: Path) -> None:
    def add(job: SmallJob) -> Callable[[int, Tensor], None]:
        averaged = AveragedModel(job.model)
        cosine = torch.optim.lr_scheduler.CosineAnnealingLR(job.optimizer, 20)
        swa = SWALR(job.optimizer, swa_lr=0.01, anneal_epochs=3)
        job.state |= {"averaged": averaged, "schedules": [cosine, swa]}  # type: ignore[dict-item]

        def each_step(step: int, loss: Tensor) -> None:
            job.update(loss)
            if step >= 4:
                averaged.update_parameters(job.model)
            (swa if step >= 4 else cosine).step()

        return each_step

    trace = swept(tmp_path, add).trace
    assert len({shown["optimizer.0.'lr'"] for shown in trace.values()}) > 5


# --- generators -----------------------------------------------------------------------------------

BIT_GENERATORS = sorted(
    name
    for name, kind in vars(np.random).items()
    if isinstance(kind, type) and issubclass(kind, np.random.BitGenerator) and kind is not np.random.BitGenerator
)  # fmt: skip


def drawn(generator: Any) -> list[Any]:
    """A draw of every width and kind that keeps something for the next one."""
    if isinstance(generator, torch.Generator):
        return [torch.randn(3, generator=generator).tolist(), torch.rand(1, generator=generator).tolist()]
    if isinstance(generator, random.Random):
        return [generator.gauss(0, 1), generator.random(), generator.getrandbits(70)]
    if isinstance(generator, np.random.RandomState):
        return [generator.randn(), generator.rand(), generator.randint(0, 9, 3, dtype=np.int16).tolist()]
    halves = generator.integers(0, 2**32, 1, dtype=np.uint32).tolist()  # leaves the other half of a word
    return [halves, generator.random(), generator.normal()]


def generators(number: int) -> dict[str, Any]:
    found: dict[str, Any] = {
        "python": random.Random(number),
        "torch": torch.Generator().manual_seed(number),
        "legacy": np.random.RandomState(number),
    }
    for name in BIT_GENERATORS:
        kind = getattr(np.random, name)
        found[name] = np.random.Generator(kind(number))
        found[f"legacy {name}"] = np.random.RandomState(kind(number))
    return found


def test_numpy_has_the_bit_generators_that_are_tried() -> None:
    assert {"MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64"} <= set(BIT_GENERATORS)


@pytest.mark.parametrize("sharding", LAYOUTS, ids=LAYOUT_IDS)
@pytest.mark.parametrize("kind", generators(0))
def test_a_generator_anywhere_in_the_state_draws_on(
    kind: str, sharding: ckptd.Sharding, tmp_path: Path
) -> None:
    stored, live = generators(1)[kind], generators(2)[kind]
    drawn(stored), drawn(live), drawn(live)
    path = ckptd.save(tmp_path / "c", {"deep": [{"g": (stored,)}], "g": stored}, step=1, sharding=sharding)
    twin = generators(3)[kind]
    state = {"deep": [{"g": (live,)}], "g": twin}
    apply_state(state, ckptd.load(path))
    assert state["g"] is twin and state["deep"][0]["g"][0] is live  # type: ignore[index]
    wanted = [drawn(stored) for _ in range(3)]
    assert [drawn(live) for _ in range(3)] == wanted
    assert [drawn(twin) for _ in range(3)] == wanted
    assert [drawn(ckptd.load(path)["g"]) for _ in range(1)] == wanted[:1]


class Loaded(random.Random):
    """A generator with something more in it."""


@pytest.mark.parametrize("generator", [random.SystemRandom(), Loaded(1)], ids=["system", "subclass"])
def test_a_generator_that_has_no_state_to_store_is_refused_by_key_path(
    generator: Any, tmp_path: Path
) -> None:
    with pytest.raises(UnstorableState, match=r"state\['draws'\]\['mine'\]"):
        ckptd.save(tmp_path / "c", {"draws": {"mine": generator}}, step=1)


# --- samplers and loaders -------------------------------------------------------------------------


class Numbers(Dataset[tuple[int, float]]):
    def __len__(self) -> int:
        return 14

    def __getitem__(self, index: int) -> tuple[int, float]:
        return index, random.random() + float(np.random.random()) + torch.rand(()).item()


class Weighted(Sampler[int]):
    """Draws again and again, more often what it drew last; its weights are its state, next to a generator."""

    def __init__(self) -> None:
        self.weights = np.ones(14)
        self.rng = np.random.default_rng(random.randrange(10**6))

    def __len__(self) -> int:
        return 14

    def __iter__(self) -> Iterator[int]:
        for _ in range(14):
            index = int(self.rng.choice(14, p=self.weights / self.weights.sum()))
            self.weights[index] += 1
            yield index

    def state_dict(self) -> dict[str, Any]:
        return {"weights": self.weights.copy(), "rng": self.rng.bit_generator.state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.weights[:] = state["weights"]
        self.rng.bit_generator.state = state["rng"]


def test_a_sampler_with_a_state_of_its_own_goes_on_between_epochs(tmp_path: Path) -> None:
    seed(1)
    sampler = Weighted()
    list(sampler)
    live = {"samplers": [Weighted()]}
    through(tmp_path, {"samplers": [sampler]}, live)
    assert list(live["samplers"][0]) == list(sampler)


def stateful_loader(
    dataset: Any = None, batch_size: int | None = 4, *, kind: type | None = None, **options: Any
) -> Any:
    """torchdata's loader, or another kind, over dataset; over shuffled numbers by default."""
    torchdata = pytest.importorskip(
        "torchdata.stateful_dataloader", reason="torchdata isn't installed: pip install torchdata"
    )
    if dataset is None:
        dataset, options = Numbers(), {"shuffle": True, **options}
    with warnings.catch_warnings():  # torchdata 0.11 calls a function that torch 2.13 deprecates
        warnings.filterwarnings("ignore", message=".*set_vital.*")
        return (kind or torchdata.StatefulDataLoader)(dataset, batch_size, **options)


def batches(loader: Any, count: int) -> list[Any]:
    found: list[Any] = []
    while len(found) < count:
        for ids, values in loader:
            found.append((torch.as_tensor(ids).tolist(), torch.as_tensor(values).tolist(), random.random()))
            if len(found) == count:
                break
    return found


class Counted(Numbers):
    """Has a state, which torchdata's loader asks for in each worker."""

    def __init__(self) -> None:
        self.count, self.rng = 0, np.random.default_rng(3)

    def __getitem__(self, index: int) -> tuple[int, float]:
        self.count += 1
        return index, super().__getitem__(index)[1] + self.count + self.rng.random()

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "rng": self.rng.bit_generator.state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count, self.rng.bit_generator.state = state["count"], state["rng"]


class Flow(IterableDataset[tuple[int, float]]):
    def __iter__(self) -> Iterator[tuple[int, float]]:
        worker = get_worker_info()
        numbers = Numbers()
        return map(
            numbers.__getitem__, range(worker.id if worker else 0, 14, worker.num_workers if worker else 1)
        )


def own_generator() -> torch.Generator:
    return torch.Generator().manual_seed(random.randrange(99))


STATEFUL: dict[str, Callable[[int], Any]] = {
    "global generator": lambda workers: stateful_loader(num_workers=workers),
    "own generator": lambda workers: stateful_loader(num_workers=workers, generator=own_generator()),
    "in order": lambda workers: stateful_loader(Numbers(), 4, num_workers=workers),
    "dataset with a state": lambda workers: stateful_loader(Counted(), 4, num_workers=workers),
    "sampler with a state": lambda workers: stateful_loader(
        Numbers(), 4, sampler=Weighted(), num_workers=workers
    ),
    "iterable": lambda workers: stateful_loader(Flow(), 4, num_workers=workers),
    "no batches": lambda workers: stateful_loader(Numbers(), None, num_workers=workers),
    "snapshots": lambda workers: stateful_loader(
        num_workers=workers, snapshot_every_n_steps=3, drop_last=True
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", STATEFUL)
def test_torchdatas_loader_inside_ours_is_exact_at_every_cut_and_cut_twice(
    kind: str, workers: int, tmp_path: Path
) -> None:
    def make() -> Any:
        return ckptd.ResumableLoader(STATEFUL[kind](workers))

    seed(1)
    whole = batches(make(), 10)
    for cut in range(9) if kind.endswith("generator") else (0, 2, 4, 5, 8):
        seed(1)
        batches(first := make(), cut)
        for at, name in ((cut, "once"), (cut + 1, "twice")):
            path = ckptd.save(tmp_path / f"{cut} {name}", {"loader": first}, step=at)
            del first
            seed(99)
            first = make()
            apply_state({"loader": first}, ckptd.load(path))
            rest = batches(first, 1 if name == "once" else 10 - at)
            assert rest == whole[at : at + len(rest)], (cut, name)
            assert first.resumed_by in ("", "refetch: StatefulDataLoader has its own __iter__")


def test_torchs_and_torchdatas_loader_dont_take_each_others_position_in_an_epoch() -> None:
    kinds = (None, DataLoader)
    for before, after in (kinds, kinds[::-1]):
        first = ckptd.ResumableLoader(stateful_loader(Numbers(), 4, kind=before))
        second = ckptd.ResumableLoader(stateful_loader(Numbers(), 4, kind=after))
        batches(first, 2)
        with pytest.raises(
            StateMismatch, match=r"in the middle of an epoch .* another __iter__.*StatefulDataLoader"
        ):
            second.load_state_dict(first.state_dict())
        list(first)
        second.load_state_dict(first.state_dict())


def test_torchdatas_loader_with_persistent_workers_is_refused_inside_ours() -> None:
    with pytest.raises(
        InvalidArgument, match=r"persistent_workers.*StatefulDataLoader.*use a plain DataLoader"
    ):
        ckptd.ResumableLoader(stateful_loader(num_workers=1, persistent_workers=True))


def test_torchdatas_loader_that_was_given_a_position_or_asked_for_it_is_refused_inside_ours() -> None:
    asked, given = stateful_loader(), stateful_loader()
    given.load_state_dict(asked.state_dict())
    for loader in (asked, given):
        with pytest.raises(InvalidArgument, match="given a position, or asked for it"):
            ckptd.ResumableLoader(loader)
    list(given)
    ckptd.ResumableLoader(given)  # between two epochs there is none


def test_a_loader_that_keeps_a_position_of_its_own_beside_torchdatas_is_refused_inside_ours() -> None:
    class Own(type(stateful_loader())):  # type: ignore[misc]
        def state_dict(self) -> Any:
            return {"epoch": 1, **super().state_dict()}

    with pytest.raises(InvalidArgument, match=r"keeps its own position.*use a plain DataLoader"):
        ckptd.ResumableLoader(stateful_loader(kind=Own))


@pytest.mark.parametrize("workers", [0, 2])
def test_the_state_of_torchdatas_loader_alone_comes_back_as_it_gave_it(workers: int, tmp_path: Path) -> None:
    loader = stateful_loader(num_workers=workers)
    position = iter(loader)
    next(position), next(position)
    given = loader.state_dict()
    path = ckptd.save(tmp_path / "c", {"loader": loader}, step=2)
    assert same(ckptd.load(path)["loader"], given)
    live = stateful_loader(num_workers=workers)
    apply_state({"loader": live}, ckptd.load(path))
    rest = [ids.tolist() for ids, _ in live]
    assert rest == [ids.tolist() for ids, _ in position]


# --- metrics, nesting, two names, missing ---------------------------------------------------------


class Metric:
    """A running mean with a history: as metric libraries have them."""

    def __init__(self) -> None:
        self.total, self.count, self.history = torch.zeros(()), 0, list[float]()

    def add(self, value: float) -> None:
        self.total += value
        self.count += 1
        self.history.append(value)

    def state_dict(self) -> dict[str, Any]:
        return {"total": self.total, "count": self.count, "history": self.history}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.total, self.count, self.history = state["total"], state["count"], state["history"]


def filled(*values: float) -> Metric:
    metric = Metric()
    for value in values:
        metric.add(value)
    return metric


def nested(*metrics: Metric) -> dict[str, Any]:
    a, b, c, d = metrics
    return {"list": [a, {"deep": (b, 7)}], "ordered": OrderedDict([("z", c), ("a", [d])]), "plain": 1}


@pytest.mark.parametrize("sharding", LAYOUTS, ids=LAYOUT_IDS)
def test_objects_in_lists_dicts_and_tuples_are_restored_in_place(
    sharding: ckptd.Sharding, tmp_path: Path
) -> None:
    stored = [filled(*range(n)) for n in (1, 2, 3, 4)]
    live = [Metric() for _ in stored]
    state = nested(*live)
    through(tmp_path, nested(*stored), state, sharding=sharding)
    assert [same(a.state_dict(), b.state_dict()) for a, b in zip(live, stored, strict=True)] == [True] * 4
    assert state["list"][0] is live[0] and state["list"][1]["deep"][0] is live[1]
    assert state["ordered"]["z"] is live[2] and state["ordered"]["a"][0] is live[3]


def test_what_an_object_gives_is_a_copy_as_of_the_call(tmp_path: Path) -> None:
    metric = filled(1.0, 2.0)
    path = ckptd.save(tmp_path / "c", {"metric": metric}, step=1)
    metric.add(3.0)
    assert ckptd.load(path)["metric"]["history"] == [1.0, 2.0]
    assert ckptd.load(path)["metric"]["total"].item() == 3.0


def two_names(seed_: int) -> dict[str, Any]:
    """A model, its optimizer, a metric, a generator and a list, each twice."""
    torch.manual_seed(seed_)
    model = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.rand(1, 2)).sum().backward()
    optimizer.step()
    parts = [model, optimizer, filled(float(seed_)), np.random.default_rng(seed_), [seed_, torch.rand(2)]]
    return {f"{which}{number}": part for which in "ab" for number, part in enumerate(parts)}


@pytest.mark.parametrize("sharding", LAYOUTS, ids=LAYOUT_IDS)
def test_the_same_object_under_two_names_stays_one_object(sharding: ckptd.Sharding, tmp_path: Path) -> None:
    stored, live = two_names(1), two_names(2)
    before = dict(live)
    through(tmp_path, stored, live, sharding=sharding)
    assert all(live[name] is before[name] for name in live)
    for number in range(5):
        assert live[f"a{number}"] is live[f"b{number}"]
    assert same(live["a0"].state_dict(), stored["a0"].state_dict())
    assert same(live["a1"].state_dict(), stored["a1"].state_dict())
    assert same(live["a2"].state_dict(), stored["a2"].state_dict())
    assert drawn(live["a3"]) == drawn(stored["a3"])
    assert same(live["a4"], stored["a4"])


def test_a_model_under_two_names_is_written_once(tmp_path: Path) -> None:
    model = nn.Linear(256, 256)
    one = ckptd.save(tmp_path / "one", {"a": model}, step=1)
    two = ckptd.save(tmp_path / "two", {"a": model, "b": model}, step=1)
    once, twice = (sum(file.stat().st_size for file in path.iterdir()) for path in (one, two))
    assert twice - once < 20_000 < 256 * 256 * 4
    loaded = ckptd.load(two)
    assert loaded["a"]["weight"].data_ptr() == loaded["b"]["weight"].data_ptr()


ADDED: dict[str, tuple[dict[str, Any], str]] = {
    "component": ({"ema": Metric()}, r"state\['ema'\]"),
    "generator": ({"draws": np.random.default_rng(0)}, r"state\['draws'\]"),
    "nested": ({"metrics": {"f1": Metric(), "new": Metric()}}, r"state\['metrics'\]\['new'\]"),
    "in a list": ({"meters": [Metric(), Metric()]}, r"state\['meters'\]\[1\]"),
}


@pytest.mark.parametrize("name", ADDED)
def test_what_is_registered_now_but_missing_in_the_checkpoint_is_said_by_name(
    name: str, tmp_path: Path
) -> None:
    """Field case 25."""
    stored = {"metrics": {"f1": filled(1.0)}, "meters": [filled(2.0)]}
    path = ckptd.save(tmp_path / "c", stored, step=1)
    added, where = ADDED[name]
    live = {"metrics": {"f1": Metric()}, "meters": [Metric()], **added}
    with pytest.raises(StateMismatch, match=where):
        apply_state(live, ckptd.load(path))
    assert live["metrics"]["f1"].count == 0  # type: ignore[attr-defined]  # untouched
    report = apply_state(live, ckptd.load(path), strict=False)
    assert len(report.missing) == 1 and report.missing[0] == where.replace("\\", "")
    assert live["metrics"]["f1"].count == 1  # type: ignore[attr-defined]


def test_a_client_says_by_name_what_the_checkpoint_lacks(tmp_path: Path) -> None:
    """Field case 25."""
    with ckptd.Client(tmp_path / "root", daemon="off") as client:
        client.snapshot(1, {"f1": filled(1.0)})
    live = {"f1": Metric(), "scaler": torch.amp.GradScaler("cpu")}
    with ckptd.Client(tmp_path / "root", daemon="off") as client:
        with pytest.raises(StateMismatch, match=r"state\['scaler'\] is not in the checkpoint"):
            client.restore(live)
        resumed = client.restore(live, strict=False)
    assert resumed is not None
    assert resumed.missing == ("state['scaler']",)
    assert live["f1"].count == 1  # type: ignore[union-attr]


def test_a_loader_without_shuffling_and_one_with_a_custom_sampler_yield_what_they_did(tmp_path: Path) -> None:
    """A sampler that only draws from a generator of its own goes on in mid-epoch with the loader."""

    class Shuffled(Sampler[int]):
        def __init__(self) -> None:
            self.rng = np.random.default_rng(random.randrange(10**6))

        def __len__(self) -> int:
            return 14

        def __iter__(self) -> Iterator[int]:
            return iter(self.rng.permutation(14).tolist())

    def make() -> Any:
        return ckptd.ResumableLoader(DataLoader(Numbers(), 4, sampler=Shuffled()))

    seed(1)
    whole = batches(make(), 9)
    assert len({str(ids) for ids, *_ in whole}) == 9
    for cut in range(9):
        seed(1)
        batches(first := make(), cut)
        path = ckptd.save(tmp_path / str(cut), {"loader": first}, step=cut)
        seed(99)
        second = make()
        apply_state({"loader": second}, ckptd.load(path))
        assert batches(second, 9 - cut) == whole[cut:], cut
