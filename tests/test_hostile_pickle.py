"""A pickle that runs a command, planted in every kind of file with every hash made anew: refused, never run."""

from __future__ import annotations

import io
import os
import pickle
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckptd
from ckptd.errors import CkptdError, CorruptCheckpoint
from ckptd.snapshot.descriptor import Sharding
from ckptd.tensors import reading, v1
from ckptd.tensors.loading import load
from ckptd.tensors.saving import save
from ckptd_daemon.cli import main
from ckptd_places import places  # noqa: F401  (a fixture)
from hostile_archives import Evil, other_containers, payload, plant, torch_zip, values_that_run
from live_daemon import ckptd as run_ckptd
from live_daemon import foreground
from test_v1 import write_sharded, write_single

VALUES = sorted(values_that_run(Path("marker")))
CONTAINERS = sorted(other_containers(Path("marker")))
#: Layout, and the file in it that the pickle is planted in.
PLACES = [
    ("v2 single", "ckpt.pt"), ("v2 sharded", "meta.pt"),
    ("v1 single", "ckpt.pt"), ("v1 sharded", "meta.pt"), ("v1 sharded", "model.shard-001.pt"),
]  # fmt: skip
SHARD = "model.shard-001.pt"


@pytest.fixture
def marker(tmp_path: Path) -> Iterator[Path]:
    """What each of the pickles makes when it is run; nothing may have made it by the end."""
    marker = tmp_path / "marker"
    yield marker
    assert not marker.exists(), "the pickle was run"


@pytest.fixture(params=PLACES, ids=" ".join)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, str]:
    layout, name = request.param
    return made(layout, tmp_path / "c"), name


def made(layout: str, folder: Path) -> Path:
    state = {"model": nn.Linear(3, 2).state_dict(), "n": {"step": 3}}
    if layout == "v1 single":
        return write_single(folder)
    if layout == "v1 sharded":
        return write_sharded(folder)
    return save(folder, state, step=7, sharding=Sharding(shards=2 if layout == "v2 sharded" else "auto"))


def archived(value: bytes) -> bytes:
    # What follows fills the file, so that all that the table points at lies in it.
    return torch_zip(payload(value), {"data/0": b"abcd", "data/1": bytes(100_000)})


@pytest.mark.parametrize("name", VALUES)
def test_each_of_these_pickles_does_run_where_it_is_trusted(name: str, tmp_path: Path) -> None:
    """Or the tests below would pass by being harmless."""
    hostile = archived(values_that_run(tmp_path / "marker")[name])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:  # noqa: SIM105
            torch.load(io.BytesIO(hostile), weights_only=False)
        except (AttributeError, AssertionError):
            pass  # what was run is no tensor
    assert (tmp_path / "marker").exists()


@pytest.mark.parametrize("name", VALUES)
def test_a_pickle_that_runs_something_is_refused_in_every_torch_file(
    name: str, place: tuple[Path, str], marker: Path
) -> None:
    folder, file = place
    planted = plant(folder, file, archived(values_that_run(marker)[name]))
    with pytest.raises(CorruptCheckpoint) as refused:
        load(folder)
    assert not marker.exists()
    assert str(planted) in str(refused.value)
    assert "weights_only=False" not in str(refused.value)


@pytest.mark.parametrize("name", VALUES)
def test_torch_alone_refuses_it_too(
    name: str, place: tuple[Path, str], marker: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """weights_only stands behind our own check of the pickle, as if that weren't there."""
    for module in (reading, v1):
        monkeypatch.setattr(module, "check_archive", lambda data, where, *, ours: {})
    folder, file = place
    plant(folder, file, archived(values_that_run(marker)[name]))
    with pytest.raises(CorruptCheckpoint, match=file), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        load(folder)
    assert not marker.exists()


@pytest.mark.parametrize("name", VALUES)
def test_our_own_check_refuses_it_before_torch_sees_it(
    name: str, tmp_path: Path, marker: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = made("v2 single", tmp_path / "c")
    plant(folder, "ckpt.pt", archived(values_that_run(marker)[name]))
    monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("torch was given the file"))
    with pytest.raises(CorruptCheckpoint, match="nothing of it was run"):
        load(folder)


@pytest.mark.parametrize("name", CONTAINERS)
def test_what_torch_would_take_for_another_kind_of_file_is_refused(
    name: str, place: tuple[Path, str], marker: Path
) -> None:
    folder, file = place
    plant(folder, file, other_containers(marker)[name])
    with pytest.raises(CorruptCheckpoint, match=file):
        load(folder)


@pytest.mark.parametrize("name", VALUES)
def test_a_shard_whose_pickle_runs_something_is_refused_though_nobody_would_unpickle_it(
    name: str, tmp_path: Path, marker: Path
) -> None:
    folder = made("v2 sharded", tmp_path / "c")
    planted = plant(folder, SHARD, archived(values_that_run(marker)[name]))
    with pytest.raises(CorruptCheckpoint, match=r"shard-001\.pt: holds what a checkpoint never does"):
        load(folder)
    with pytest.raises(pickle.UnpicklingError), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.load(planted, weights_only=True)  # as the README merges shards


# --- a whole root -----------------------------------------------------------------------------------


def a_run(root: Path, run: str, sharding: Sharding) -> Path:
    state: dict[str, Any] = {"model": nn.Linear(3, 2), "n": {"step": 3}}
    with ckptd.Client(root=root, run=run, daemon="off", sharding=sharding) as client:
        client.snapshot(1, state)
        client.snapshot(2, state)
    return root / run / "step-000000002"


def bare(marker: Path) -> bytes:
    return pickle.dumps(Evil(f"touch {marker}"), 2)


IN_A_RUN: dict[str, Callable[[Path, Path], Path]] = {
    "ckpt.pt": lambda step, marker: plant(step, "ckpt.pt", archived(values_that_run(marker)["posix.system"])),
    "meta.pt": lambda step, marker: plant(step, "meta.pt", archived(values_that_run(marker)["posix.system"])),
    "shard": lambda step, marker: plant(step, SHARD, archived(values_that_run(marker)["posix.system"])),
    "tensors.json": lambda step, marker: plant(step, "tensors.json", bare(marker)),
    "index.json": lambda step, marker: plant(step, "index.json", bare(marker)),
    "run index": lambda step, marker: plant(step.parent, "index.json", bare(marker)),
    "decision": lambda step, marker: plant(
        step.parent / "decisions", next((step.parent / "decisions").iterdir()).name, bare(marker)
    ),
}


def planted_run(root: Path, kind: str, marker: Path) -> Path:
    run = kind.replace(" ", "-")
    step = a_run(root, run, Sharding() if kind == "ckpt.pt" else Sharding(shards=2))
    IN_A_RUN[kind](step, marker)
    return step


def live_state() -> dict[str, Any]:
    return {"model": nn.Linear(3, 2), "n": {"step": 0}}


def restore(root: Path, step: Path) -> object:
    with ckptd.Client(root=root, run=step.parent.name, daemon="off") as client:
        return client.restore(live_state())


OPENINGS: dict[str, Callable[[Path, Path], object]] = {
    "load": lambda root, step: load(step),
    "restore": restore,
    "verify": lambda root, step: ckptd.verify(step),
    "latest": lambda root, step: ckptd.latest_valid(root, run=step.parent.name),
    "migrate": lambda root, step: ckptd.migrate_v1_to_v2(step),
    "cli verify": lambda root, step: main.main(
        ["verify", "--all", "--root", str(root), "--run", step.parent.name]
    ),
    "cli show": lambda root, step: main.main(["show", str(step)]),
    "cli list": lambda root, step: main.main(["list", "--root", str(root), "--json"]),
    "cli status": lambda root, step: main.main(["status", "--root", str(root)]),
}


@pytest.mark.parametrize("kind", IN_A_RUN)
@pytest.mark.filterwarnings("ignore::ckptd.CheckpointWarning")
def test_no_way_to_open_a_run_runs_what_is_planted_in_it(kind: str, places: Path, marker: Path) -> None:  # noqa: F811
    step = planted_run(places, kind, marker)
    for name, opening in OPENINGS.items():
        try:
            opening(places, step)
        except CkptdError:
            continue
        except Exception as error:
            raise AssertionError(f"{name} ended with an error of another kind") from error
        finally:
            assert not marker.exists(), name


@pytest.mark.parametrize("kind", ["ckpt.pt", "meta.pt", "shard", "tensors.json", "index.json"])
@pytest.mark.filterwarnings("ignore::ckptd.CheckpointWarning")
def test_a_restore_passes_the_hostile_checkpoint_over_for_the_one_before(
    kind: str,
    places: Path,  # noqa: F811
    marker: Path,
) -> None:
    step = planted_run(places, kind, marker)
    with ckptd.Client(root=places, run=step.parent.name, daemon="off") as client:
        resumed = client.restore(live_state())
    assert resumed is not None and resumed.step == 1


@pytest.mark.parametrize("file", ["daemon.json", "root.json"])
def test_a_pickle_in_the_roots_own_files_is_not_run(file: str, places: Path, marker: Path) -> None:  # noqa: F811
    step = a_run(places, "r", Sharding())
    (places / ".ckptd" / file).write_bytes(bare(marker))
    for opening in OPENINGS.values():
        try:  # noqa: SIM105
            opening(places, step)
        except CkptdError:
            pass
    assert not marker.exists()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::ckptd.CheckpointWarning")
def test_a_daemon_that_starts_on_hostile_files_runs_none_and_serves(places: Path, marker: Path) -> None:  # noqa: F811
    for kind in IN_A_RUN:
        planted_run(places, kind, marker)
    (places / ".ckptd" / "daemon.json").write_bytes(bare(marker))
    slots = Path(os.environ["CKPTD_SHM_DIR"]) / f"ckptd-{os.getuid()}-{root_id(places)}"
    slots.mkdir(mode=0o700, exist_ok=True)
    (slots / f"slot-{'0' * 32}-1-{'0' * 8}").write_bytes(bare(marker) * 1000)
    with foreground(places) as process:
        assert process.poll() is None
        assert run_ckptd("status", "--root", places, "--json").returncode == 0
        verified = run_ckptd("verify", "--all", "--root", places, "--run", "tensors.json")
        assert verified.returncode == 4
        assert "tensors.json" in verified.stdout + verified.stderr
        assert run_ckptd("stop", "--root", places).returncode == 0
    assert not marker.exists()


def root_id(root: Path) -> str:
    from ckptd.disk.rootdir import Root

    return str(Root.for_reading(root).id)
