"""Restoring reads files straight into the live tensors; what that may leave behind, and what it must not change."""

from __future__ import annotations

import copy
import os
import shutil
import threading
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn

import ckptd
from ckptd.disk.checkpoint_reader import CheckpointReader
from ckptd.disk.read_thread import ReadThread
from ckptd.errors import (
    CheckpointGone,
    CheckpointWarning,
    CorruptCheckpoint,
    RestoreFailed,
    RestoreTorn,
    StateMismatch,
)
from ckptd.tensors import unread
from ckptd.tensors.unread import address_of
from round_trip import same

TWO = ckptd.Sharding(shards=2)


def make(seed: int, *, width: int = 64) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(width, width), nn.Linear(width, width), nn.BatchNorm1d(width))
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}


def trained(state: dict[str, Any]) -> dict[str, Any]:
    width = state["model"][0].in_features
    state["model"](torch.randn(4, width)).square().sum().backward()
    state["optimizer"].step()
    state["optimizer"].zero_grad()
    return state


def values(state: dict[str, Any]) -> Any:
    return copy.deepcopy({name: one.state_dict() for name, one in state.items()})


def saved(root: Path, *steps: int) -> list[Any]:
    """What each of these checkpoints holds; oldest first."""
    held = []
    with ckptd.Client(root, daemon="off", sharding=TWO) as client:
        for step in steps:
            state = trained(make(step))
            client.snapshot(step, state)
            held.append(values(state))
    return held


def flip(folder: Path, *names: str) -> None:
    """Change one bit of the data of each of these files, or of all shards."""
    for path in folder.glob("*.shard-*.pt"):
        if not names or path.name in names:
            data = bytearray(path.read_bytes())
            data[len(data) // 2] ^= 1
            path.write_bytes(data)


def folder_of(root: Path, step: int) -> Path:
    return root / "default" / f"step-{step:09d}"


def restored(root: Path, state: dict[str, Any], **options: Any) -> Any:
    with ckptd.Client(root, daemon="off") as client:
        return client.restore(state, **options)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "root"


@pytest.fixture
def filled(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Addresses of the memory that files were read into."""
    real, addresses = CheckpointReader.read_into, []

    def read_into(self: CheckpointReader, name: str, spans: Any) -> None:
        addresses.extend(numpy.frombuffer(span.into, numpy.uint8).ctypes.data for span in spans)
        real(self, name, spans)

    monkeypatch.setattr(CheckpointReader, "read_into", read_into)
    return addresses


# --- where the bytes go -------------------------------------------------------------------------------


def test_every_tensor_is_read_where_it_stays_and_nowhere_else(root: Path, filled: list[int]) -> None:
    (held,) = saved(root, 1)
    state = trained(make(50))
    live = [*state["model"].state_dict().values()]
    live += [one for moments in state["optimizer"].state.values() for one in moments.values()]
    restored(root, state)
    assert {address_of(one) for one in live} <= set(filled)
    assert same(values(state), held)


def test_moments_that_arent_there_yet_are_taken_as_they_were_read(root: Path, filled: list[int]) -> None:
    (held,) = saved(root, 1)
    state = make(50)
    restored(root, state)
    moments = [one for each in state["optimizer"].state.values() for one in each.values()]
    assert moments
    assert {address_of(one) for one in moments} <= set(filled)
    assert same(values(state), held)


def test_verify_first_reads_nothing_into_live_tensors(root: Path, filled: list[int]) -> None:
    (held,) = saved(root, 1)
    state = make(50)
    live = {address_of(one) for one in state["model"].state_dict().values()}
    restored(root, state, verify_first=True)
    assert live.isdisjoint(filled)
    assert same(values(state), held)


# --- damage that shows when it is in the live state already -----------------------------------------


def test_a_checkpoint_that_proves_damaged_in_the_live_state_is_overwritten_by_the_one_before(
    root: Path,
) -> None:
    held = saved(root, 1, 2)
    flip(folder_of(root, 2))
    state = trained(make(50))
    with pytest.warns(CheckpointWarning, match=r"step-000000002 is passed over.*sha256"):
        resumed = restored(root, state)
    assert (resumed.step, [one.name for one in resumed.passed_over]) == (1, ["step-000000002"])
    assert same(values(state), held[0])


def test_with_none_left_the_error_says_that_the_state_was_touched_and_verify_first_leaves_it_alone(
    root: Path,
) -> None:
    saved(root, 1)
    flip(folder_of(root, 1))
    state = trained(make(50))
    before = values(state)
    for source in (None, folder_of(root, 1)):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", CheckpointWarning)
            with pytest.raises((RestoreFailed, CorruptCheckpoint), match="sha256") as caught:
                restored(root, state, verify_first=True, source=source)
        assert not getattr(caught.value, "state_touched", False)
        assert same(values(state), before)
    for source in (None, folder_of(root, 1)):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", CheckpointWarning)
            with pytest.raises(RestoreFailed, match="sha256") as caught:
                restored(root, state, source=source)
        assert caught.value.state_touched  # type: ignore[attr-defined]


def test_one_that_doesnt_fit_after_a_damaged_one_is_no_longer_said_to_leave_the_state_untouched(
    root: Path,
) -> None:
    with ckptd.Client(root, daemon="off", sharding=TWO) as client:
        client.snapshot(1, {**trained(make(1)), "more": torch.nn.Linear(64, 64)})
        client.snapshot(2, trained(make(2)))
    flip(folder_of(root, 2))
    with pytest.raises(RestoreFailed, match=r"StateMismatch.*more") as caught:
        restored(root, trained(make(50)))
    assert caught.value.state_touched


def test_one_that_vanishes_with_all_others_while_it_is_in_the_state_is_no_fresh_start(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(root, 1)
    real = CheckpointReader.read_into

    def read_into(self: CheckpointReader, name: str, spans: Any) -> None:
        if not name.startswith("model"):
            real(self, name, spans)
            return
        if (root / "default").exists():
            shutil.rmtree(root / "default")
        raise CheckpointGone("deleted", where=self.path)

    monkeypatch.setattr(CheckpointReader, "read_into", read_into)
    with pytest.raises(RestoreFailed) as caught:
        restored(root, trained(make(50)))
    assert caught.value.state_touched


def test_damage_where_no_live_tensor_waits_is_found_before_any_is_touched(root: Path) -> None:
    saved(root, 1)
    flip(folder_of(root, 1), "optimizer.shard-000.pt")
    state = make(50)  # has no moments yet: theirs is memory of its own
    before = values(state)
    with pytest.raises(CorruptCheckpoint, match="optimizer"):
        restored(root, state, source=folder_of(root, 1))
    assert same(values(state), before)


def test_with_warnings_as_errors_a_torn_restore_is_finished_by_the_one_before(root: Path) -> None:
    held = saved(root, 1, 2)
    flip(folder_of(root, 2))
    state = trained(make(50))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(CheckpointWarning, match="passed over"):
            restored(root, state)
    assert same(values(state), held[0])


def test_without_strict_nothing_of_a_damaged_checkpoint_stays_in_what_the_next_one_lacks(
    root: Path,
) -> None:
    with ckptd.Client(root, daemon="off", sharding=TWO) as client:
        client.snapshot(1, {"model": nn.Linear(64, 64)})
        client.snapshot(2, {"model": nn.Linear(64, 64), "more": nn.Linear(64, 64)})
    flip(folder_of(root, 2), "more.shard-000.pt", "more.shard-001.pt")
    state = {"model": nn.Linear(64, 64), "more": nn.Linear(64, 64)}
    before = copy.deepcopy(state["more"].state_dict())
    with pytest.warns(CheckpointWarning, match="passed over"):
        resumed = restored(root, state, strict=False)
    assert resumed.step == 1
    assert same(state["more"].state_dict(), before)


# --- what refuses ------------------------------------------------------------------------------------


def test_what_doesnt_fit_is_refused_before_a_byte_is_read_into_it(root: Path) -> None:
    saved(root, 1)
    state = trained(make(50))
    state["model"].append(nn.Linear(64, 64))
    before = values(state)
    with pytest.raises(StateMismatch, match="model"):
        restored(root, state)
    assert same(values(state), before)


def test_a_refusal_counts_only_where_the_bytes_are_those_committed(root: Path) -> None:
    held = saved(root, 1)
    with ckptd.Client(root, daemon="off", sharding=TWO) as client:
        client.restore(make(50))
        client.snapshot(2, {**trained(make(2)), "more": nn.Linear(64, 64)})
    flip(folder_of(root, 2))
    state = make(50)
    with pytest.warns(CheckpointWarning, match=r"passed over.*sha256"):
        resumed = restored(root, state)
    assert resumed.step == 1
    assert same(values(state), held[0])


class Choosy:
    """An object that looks at what it is given, and refuses it only when it is to take it."""

    def __init__(self, seed: int, *, refuses: bool = False) -> None:
        self.kept = torch.full((400,), float(seed))
        self.seen: list[float] = []
        self._refuses = refuses

    def state_dict(self) -> dict[str, Any]:
        return {"kept": self.kept}

    def check_state_dict(self, state: dict[str, Any]) -> None:
        self.seen.append(float(state["kept"].sum()))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self._refuses:
            raise StateMismatch("not this one")
        self.kept = state["kept"]


def test_an_object_is_asked_with_proven_values_and_may_still_refuse_before_a_parameter_is_touched(
    root: Path,
) -> None:
    with ckptd.Client(root, daemon="off", sharding=TWO) as client:
        client.snapshot(1, {"object": Choosy(3), **trained(make(1))})
    state = {**trained(make(50)), "object": Choosy(4, refuses=True)}
    before = values(state)
    with pytest.raises(StateMismatch, match="not this one"):
        restored(root, state)
    assert state["object"].seen == [1200.0]
    assert same(values(state), before)
    flip(folder_of(root, 1), "object.shard-000.pt")
    with pytest.raises(CorruptCheckpoint, match="object"):
        restored(root, state, source=folder_of(root, 1))
    assert state["object"].seen == [1200.0]  # not asked with other bytes


# --- what isn't a plain copy of bytes ------------------------------------------------------------------


class Turned(nn.Module):
    """Stores its weight the other way round, as old versions of libraries did."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(40, 40))
        self.register_load_state_dict_pre_hook(self._turn)
        self.register_state_dict_post_hook(
            lambda module, state, prefix, meta: self._turn(module, state, prefix)
        )

    @staticmethod
    def _turn(module: nn.Module, state: Any, prefix: str, *_: Any) -> None:
        state[f"{prefix}weight"] = state[f"{prefix}weight"].detach().t().contiguous()


class Anew(nn.Module):
    """Makes its weight anew when its extra state comes, which is before its child's."""

    def __init__(self) -> None:
        super().__init__()
        self.child = nn.Linear(40, 40)

    def get_extra_state(self) -> Any:
        return {"n": 1}

    def set_extra_state(self, state: Any) -> None:
        nn.init.zeros_(self.child.weight)


class Keeps:
    """Keeps what it is given, and is never asked before."""

    def __init__(self, kept: torch.Tensor, more: int) -> None:
        self.kept = [kept, torch.full((500,), float(more))]

    def state_dict(self) -> dict[str, Any]:
        return {"kept": self.kept}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.kept = [state["kept"][0], state["kept"][1] + 0]


def kept_by_an_object() -> dict[str, Any]:
    model = nn.Linear(40, 40)
    return {"model": model, "object": Keeps(model.weight.detach(), int(torch.randint(99, ())))}


def tied() -> nn.Module:
    model = nn.Sequential(nn.Embedding(50, 40), nn.Linear(40, 50, bias=False))
    model[1].weight = model[0].weight
    return model


def dense() -> nn.Module:
    model = nn.Linear(40, 30)
    model.weight = nn.Parameter(torch.randn(40, 30).t())
    return model


def kept() -> dict[str, Any]:
    model = nn.Linear(40, 40)
    return {"model": model, "data": {"best": model.state_dict(), "n": torch.randn(2000)}}


def rated() -> dict[str, Any]:
    model = nn.Linear(40, 40)
    groups = [{"params": [one], "lr": torch.rand(())} for one in model.parameters()]
    optimizer = torch.optim.Adam(groups, lr=torch.tensor(0.5))
    model(torch.randn(3, 40)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return {"model": model, "optimizer": optimizer}


def with_gradients() -> dict[str, Any]:
    model = nn.Linear(40, 40)
    model(torch.randn(3, 40)).square().sum().backward()
    return {"model": model, "gradients": ckptd.Gradients(model)}


def twice() -> dict[str, Any]:
    model = nn.Sequential(nn.Linear(40, 40), nn.Linear(40, 40))
    return {"model": model, "inner": model[0], "many": [model[1], {"again": model}]}


def data() -> dict[str, Any]:
    shared = torch.randn(900)
    return {
        "data": {
            "half": torch.randn(700).to(torch.bfloat16), "tiny": torch.randn(64).to(torch.float8_e5m2),
            "complex": torch.randn(300, dtype=torch.complex64), "scalar": torch.randn(()),
            "array": numpy.random.default_rng().normal(size=(30, 20)), "f": numpy.asfortranarray(numpy.random.rand(9, 8)),
            "views": [shared[:400], shared[200:]], "one": [shared, shared], "t": torch.randn(20, 30).t(),
            "expanded": torch.randn(1).expand(300),
        }
    }  # fmt: skip


STATES: dict[str, Callable[[], dict[str, Any]]] = {
    "plain": lambda: trained(make(int(torch.randint(99, ())))),
    "a hook that turns": lambda: {"model": Turned(), "other": nn.Linear(40, 40)},
    "an extra state that writes": lambda: {"model": Anew()},
    "tied": lambda: {"model": tied()},
    "not C order": lambda: {"model": dense()},
    "a kept copy": kept,
    "a weight that an object keeps": kept_by_an_object,
    "rates that are tensors": rated,
    "gradients": with_gradients,
    "one model at many places": twice,
    "data of many kinds": data,
}


def tree(value: Any) -> Any:
    if hasattr(value, "state_dict"):
        return copy.deepcopy(value.state_dict())
    if isinstance(value, dict):
        return {key: tree(item) for key, item in value.items()}
    return [tree(item) for item in value] if isinstance(value, list) else copy.deepcopy(value)


@pytest.mark.parametrize("kind", STATES)
def test_a_state_comes_back_as_it_was_saved_whatever_its_writes_are(kind: str, root: Path) -> None:
    state = STATES[kind]()
    with ckptd.Client(root, daemon="off", sharding=TWO) as client:
        client.snapshot(1, state)
        other = STATES[kind]()
        client.restore(other)
    assert same(tree(other), tree(state))


def test_what_is_set_where_none_was_has_its_values_though_a_live_tensor_takes_them_too(root: Path) -> None:
    held = torch.randn(900)
    with ckptd.Client(root, daemon="off", sharding=TWO) as client:
        client.snapshot(1, {"data": {"one": held, "two": held, "more": torch.randn(900)}})
        state: dict[str, Any] = {"data": {"one": torch.zeros(900), "two": None, "more": None}}
        client.restore(state)
    assert same([held, held], [state["data"]["one"], state["data"]["two"]])


def test_the_live_tensors_of_data_stay_the_objects_they_are(root: Path) -> None:
    state = {"data": {"one": torch.randn(900), "two": [torch.randn(30, 30)]}}
    with ckptd.Client(root, daemon="off", sharding=TWO) as client:
        client.snapshot(1, state)
        held = copy.deepcopy(state)
        one, two = state["data"]["one"].zero_(), state["data"]["two"][0].zero_()  # type: ignore[call-overload,union-attr]
        client.restore(state)
    assert state["data"]["one"] is one
    assert state["data"]["two"][0] is two  # type: ignore[index]
    assert same(state, held)


def test_settings_that_two_groups_take_from_one_are_those_stored(root: Path) -> None:
    model = nn.Linear(40, 40)
    optimizer = torch.optim.Adam(model.parameters(), lr=torch.full((), 0.25))
    with ckptd.Client(root, daemon="off", sharding=TWO) as client:
        client.snapshot(1, {"model": model, "optimizer": optimizer})
    other = nn.Linear(40, 40)
    groups = [{"params": [one], "lr": torch.rand(())} for one in other.parameters()]
    live = torch.optim.Adam(groups)
    restored(root, {"model": other, "optimizer": live}, source=folder_of(root, 1), strict=False)
    assert [float(group["lr"]) for group in live.param_groups] == [0.25, 0.25]


def test_a_graph_over_what_was_restored_sees_that_it_changed(root: Path) -> None:
    saved(root, 1)
    state = trained(make(50))
    loss = state["model"](torch.randn(4, 64)).square().sum()
    restored(root, state)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_what_a_torn_restore_raises_can_be_pickled_as_any_error() -> None:
    error = RestoreTorn("what", where="here")
    made, arguments = error.__reduce__()[:2]
    assert str(made(*arguments)) == str(error)  # type: ignore[operator]


def test_once_a_read_is_interrupted_no_other_file_is_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {0})  # the caller and one more
    both, awaited, begun = threading.Barrier(2), threading.Event(), list[int]()
    end_all = unread.end_all

    def ended(threads: Iterable[ReadThread]) -> None:
        awaited.set()
        end_all(threads)

    def first(number: int) -> None:
        begun.append(number)
        both.wait(60)
        if threading.current_thread() is threading.main_thread():
            raise KeyboardInterrupt
        assert awaited.wait(60)

    monkeypatch.setattr(unread, "end_all", ended)
    jobs = [lambda: first(0), lambda: first(1), lambda: begun.append(2)]
    with pytest.raises(KeyboardInterrupt):
        unread._in_parallel(jobs)
    assert sorted(begun) == [0, 1]


def test_no_file_is_read_any_more_once_the_start_of_a_helper_was_interrupted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    start, go, begun, read = threading.Thread.start, threading.Event(), threading.Event(), list[int]()

    def interrupted(thread: threading.Thread) -> None:
        start(thread)
        if thread.name == "ckptd-read":
            assert begun.wait(60)
            threading.Timer(0.05, go.set).start()
            raise KeyboardInterrupt

    def job() -> None:
        begun.set()
        assert go.wait(60)
        read.append(1)

    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {0})
    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        unread._in_parallel([job] * 3)
    assert read == [1]  # the one that was begun


def test_several_files_are_read_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    [held] = saved(tmp_path, 1)
    read, both = CheckpointReader.read_into, threading.Barrier(2)

    def with_another(self: CheckpointReader, name: str, spans: Any) -> None:
        if name.startswith("model"):
            both.wait(30)  # broken, and with it the restore, when the other is begun only after this one
        read(self, name, spans)

    monkeypatch.setattr(CheckpointReader, "read_into", with_another)
    state = make(9)
    with ckptd.Client(tmp_path, daemon="off") as client:
        client.restore(state)
    assert same(values(state), held)
