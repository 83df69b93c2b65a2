"""Field cases 24, 28 and 29: threads, precisions, layouts, ties, wrappers and odd modules go on to the bit."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import ckptd
from sweep_numerics import JOBS, NumericsJob
from sweep_run import Sweep

STEPS = 6

pytestmark = pytest.mark.slow


@pytest.fixture(params=[1, 2], ids=["1 thread", "2 threads"])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.fixture
def _deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def made(name: str) -> NumericsJob:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*spectral_norm.*deprecated.*", category=FutureWarning)
        return JOBS[name]()


@pytest.mark.usefixtures("_deterministic")
@pytest.mark.parametrize("name", JOBS)
def test_cut_twice_it_goes_on_bit_for_bit(name: str, threads: int, tmp_path: Path) -> None:
    sharding = ckptd.Sharding(shards="auto" if threads == 1 else 2)
    whole = Sweep(lambda: made(name), tmp_path, STEPS, sharding)
    whole.whole()
    whole.check("0")
    whole.check("2", "5")


def test_without_deterministic_algorithms_asked_for_it_goes_on_too(threads: int, tmp_path: Path) -> None:
    whole = Sweep(lambda: made("wide"), tmp_path, STEPS)
    whole.whole()
    whole.check("1", "4")


def test_the_jobs_are_what_their_names_say(tmp_path: Path) -> None:
    low = made("low precision")
    low.run("1", lambda *_: None)
    weight, moments = low.state["model"].weight, low.state["optimizer"].state[low.state["model"].weight]
    assert weight.dtype is torch.bfloat16
    assert {each.dtype for each in moments.values()} == {torch.float32}
    conv = made("channels last").state["model"][0].weight
    assert conv.is_contiguous(memory_format=torch.channels_last) and not conv.is_contiguous()
    for name, path in (("spectral norm", "_u"), ("old spectral norm", "weight_u")):
        whole = Sweep(lambda name=name: made(name), tmp_path, 3)  # type: ignore[misc]
        whole.whole(save=False)
        buffers = [[text for key, text in shown.items() if path in key] for shown in whole.trace.values()]
        assert len(set(map(tuple, buffers))) == 4, name


def test_channels_last_and_ties_are_so_after_the_restore(tmp_path: Path) -> None:
    for name in ("channels last", "tied"):
        whole = Sweep(lambda name=name: made(name), tmp_path / name, 2)  # type: ignore[misc]
        whole.folder.mkdir()
        whole.whole()
        model = whole.resumed(whole.folder / "1").state["model"]
        stored = ckptd.load(whole.folder / "1")["model"]
        if name == "tied":
            assert model.head.weight is model.embed.weight
            assert stored["head.weight"].data_ptr() == stored["embed.weight"].data_ptr()
        else:
            assert model[0].weight.is_contiguous(memory_format=torch.channels_last)
            assert stored["0.weight"].is_contiguous(memory_format=torch.channels_last)


def test_a_compiled_models_checkpoint_goes_on_in_the_model_that_isnt(tmp_path: Path) -> None:
    """torch.compile adds a prefix to every name; the checkpoint has none."""
    whole = Sweep(lambda: made("compiled"), tmp_path, STEPS)
    whole.whole()

    def plain() -> NumericsJob:
        job = made("compiled")
        job.state["model"] = job.state["model"]._orig_mod
        return job

    bare = Sweep(plain, tmp_path, STEPS)
    job = bare.resumed(tmp_path / "3")
    shown: list[float] = []
    job.run(str(STEPS), lambda where, loss: shown.append(loss))
    assert [repr(loss) for loss in shown] == [whole.trace[str(step)]["shown"] for step in range(4, STEPS + 1)]
