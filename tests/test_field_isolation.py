"""Field cases 1 to 5 end to end: a checkpoint is the state at the moment of the call, whatever comes after it."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckptd
from ckptd.errors import CheckpointWarning, UnstorableState
from ckptd.link import giving_way
from ckptd_places import places
from live_daemon import wait_until
from obstructed_daemon import ObstructedDaemon, obstructed_daemon
from round_trip import same
from whole_job import Live, assert_whole, contents, job, train_on, weights

__all__ = ["places"]

pytestmark = pytest.mark.slow

KEEP = ("--keep-last", "100")
SINGLE, SHARDED = ckptd.Sharding(), ckptd.Sharding(by="round-robin", shards=3)


@pytest.fixture
def root(places: Path) -> Iterator[Path]:
    yield places


@contextmanager
def slow_writer(root: Path, **options: Any) -> Iterator[tuple[ObstructedDaemon, ckptd.Client]]:
    """A daemon that can be stalled in the middle of a checkpoint's data, and a client of it."""
    with (
        obstructed_daemon(root, *KEEP) as daemon,
        ckptd.Client(root, daemon="attach", close_timeout_s=60.0, **options) as client,
    ):
        yield daemon, client


def stall(daemon: ObstructedDaemon) -> None:
    daemon.obstruct("write", "*/.tmp-*/*.pt", "stall")


# --- case 1 -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("sharding", [SINGLE, SHARDED], ids=["single", "sharded"])
def test_what_the_trainer_changes_after_the_call_reaches_neither_name_nor_index_nor_payload(
    root: Path, sharding: ckptd.Sharding
) -> None:
    state, metrics = job(), {"loss": torch.tensor(0.25), "best": 1.0}
    wanted = contents(ckptd.save(root.parent / "oracle", state, step=7))
    with slow_writer(root, sharding=sharding) as (daemon, client):
        client.reserve(state)
        stall(daemon)
        ticket = client.snapshot(7, state, metrics)
        train_on(state)
        metrics["loss"].fill_(99)  # type: ignore[union-attr]
        metrics["best"] = 99.0
        daemon.wait_until_stalled()
        train_on(state | {"short": [1, [2, {"x": 3}]]})
        daemon.clear()
        ticket.wait("verified", timeout_s=60)
        assert same(contents(ticket.path), wanted)
        (found,) = client.checkpoints()
        assert (found.step, found.path.name, dict(found.metrics)) == (
            7,
            "step-000000007",
            {"loss": 0.25, "best": 1.0},
        )


def test_two_hundred_tensors_mutated_in_a_tight_loop_are_never_mixed(root: Path) -> None:
    tensors = [torch.zeros(500) for _ in range(200)]
    state = {"tensors": tensors, "count": [0]}
    with slow_writer(root, sharding=SHARDED) as (daemon, client):
        client.reserve(state)
        stall(daemon)
        tickets = []
        for step in range(1, 4):
            for value in range(20):  # a tight loop up to the call, and from its return on
                for tensor in tensors:
                    tensor.fill_(100 * step + value)
                state["count"][0] = 100 * step + value
            if step == 3:
                daemon.clear()  # the third needs a slot that only the writer frees
            tickets.append(client.snapshot(step, state))
        for tensor in tensors:
            tensor.fill_(-1)
        for step, ticket in enumerate(tickets, 1):
            loaded = ckptd.load(ticket.wait("verified", timeout_s=60).path)  # type: ignore[arg-type]
            assert torch.stack(loaded["tensors"]).unique().tolist() == [100 * step + 19]
            assert loaded["count"] == [100 * step + 19]


def test_tensors_that_another_thread_mutates_only_after_the_call_are_whole(root: Path) -> None:
    """The copy is over when snapshot() returns: a thread let loose right then finds nothing to spoil."""
    tensors = [torch.full((20_000,), 1.0) for _ in range(50)]
    stop, go = threading.Event(), threading.Event()

    def mutate() -> None:
        go.wait()
        while not stop.is_set():
            for tensor in tensors:
                tensor.add_(1)

    thread = threading.Thread(target=mutate)
    thread.start()
    try:
        with slow_writer(root) as (_, client):
            ticket = client.snapshot(1, {"tensors": tensors})
            go.set()
            path = ticket.wait("verified", timeout_s=60).path
            assert path is not None
            assert torch.stack(ckptd.load(path)["tensors"]).unique().tolist() == [1.0]
    finally:
        stop.set()
        go.set()
        thread.join()


# --- case 2 -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("sharding", [SINGLE, SHARDED], ids=["single", "sharded"])
def test_snapshots_with_everything_changed_in_between_have_as_many_contents(
    root: Path, sharding: ckptd.Sharding
) -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "x": torch.zeros(4), "log": [], "n": 0}

    def change(number: int) -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(number)
        state["log"].append(number)
        state["n"] = number
        state["x"] = {
            6: torch.ones(2, 3, dtype=torch.bfloat16), 7: torch.ones(3, 2, dtype=torch.bfloat16).t(), 9: None,
            10: {"now": "a dict", "of": torch.ones(1)},
        }.get(number, torch.full((4,), float(number)))  # fmt: skip
        if number == 7:
            model.register_parameter("extra", nn.Parameter(torch.full((3,), 7.0)))
            optimizer.add_param_group({"params": [model.extra]})
        if number == 8:  # optimizer state, created late
            (model(torch.ones(1, 3)).sum() + model.extra.sum()).backward()
            optimizer.step()
            optimizer.zero_grad()
        if number == 9:
            state["late"] = {"component": torch.full((2,), 9.0)}
        if number == 10:
            del state["log"]

    with slow_writer(root, sharding=sharding) as (_, client):
        tickets = []
        wanted = []
        for number in range(1, 11):
            change(number) if number < 10 else change_last(state, change)
            wanted.append(contents(ckptd.save(root.parent / f"oracle-{number}", state, step=number)))
            tickets.append(client.snapshot(number, state))
        for number, ticket in enumerate(tickets, 1):
            seen = contents(ticket.wait("verified", timeout_s=60).path)
            assert same(seen, wanted[number - 1]), number
        assert [len(one["optimizer"]["state"]) for one in wanted] == [0] * 7 + [3] * 3
        assert len({str(one) for one in wanted}) == 10


def change_last(state: dict[str, Any], change: Any) -> None:
    log = state["log"]
    change(10)
    assert log[-1] == 10 and "log" not in state


# --- case 3 -----------------------------------------------------------------------------------------


def test_two_back_to_back_with_a_slow_writer_are_both_whole(root: Path) -> None:
    with slow_writer(root) as (daemon, client):
        state = weights(1)
        client.reserve(state)
        stall(daemon)
        first = client.snapshot(1, state)
        state["w"].fill_(2)
        state["at"][0] = 2
        second = client.snapshot(2, state)
        state["w"].fill_(3)
        daemon.wait_until_stalled()
        wait_until(lambda: first.state == "writing")  # the word of it comes when it comes
        assert second.state == "staged"
        daemon.clear()
        for step, ticket in ((1, first), (2, second)):
            assert_whole(ticket.wait("verified", timeout_s=60).path, step)


def test_with_on_busy_skip_and_one_slot_the_step_that_was_skipped_is_named_and_the_others_are_whole(
    root: Path,
) -> None:
    with slow_writer(root, on_busy="skip", slots=1) as (daemon, client):
        client.reserve(weights(0))
        stall(daemon)
        kept = client.snapshot(1, weights(1))
        daemon.wait_until_stalled()
        with pytest.warns(CheckpointWarning, match=r"step 2 was skipped"):
            skipped = client.snapshot(2, weights(2))
        assert skipped.state == "skipped"
        daemon.clear()
        assert_whole(kept.wait("verified", timeout_s=60).path, 1)
        after = client.snapshot(3, weights(3)).wait("verified", timeout_s=60)
        assert_whole(after.path, 3)
        assert [one.step for one in client.checkpoints()] == [1, 3]


@pytest.mark.parametrize("transport", ["shm", "stream"])
@pytest.mark.parametrize("on_busy", ["skip", "supersede"])
def test_with_two_slots_the_one_that_waits_gives_way_is_named_and_the_others_are_whole(
    root: Path, on_busy: Any, transport: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(giving_way, "_ANSWER_S", 60.0)  # however loaded the machine is
    with slow_writer(root, on_busy=on_busy, transport=transport) as (daemon, client):
        client.reserve(weights(0))
        stall(daemon)
        first = client.snapshot(1, weights(1))
        daemon.wait_until_stalled()
        second = client.snapshot(2, weights(2))
        with pytest.warns(CheckpointWarning, match=r"step 2 was superseded"):
            third = client.snapshot(3, weights(3))
        assert second.state == "superseded"
        daemon.clear()
        for step, ticket in ((1, first), (3, third)):
            assert_whole(ticket.wait("verified", timeout_s=60).path, step)
        assert [one.step for one in client.checkpoints()] == [1, 3]
        (run,) = client.status()["runs"]
        assert (run["superseded"], run["last_superseded"]["step"], run["skipped"]) == (1, 2, 0)


@pytest.mark.parametrize(
    ("on_busy", "slots"), [("wait", 2), ("skip", 1), ("skip", 2), ("supersede", 1), ("supersede", 2)]
)
def test_fifty_at_many_times_the_writing_speed_use_their_slots_and_the_last_is_written(
    root: Path, on_busy: Any, slots: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(giving_way, "_ANSWER_S", 60.0)
    folder = Path(os.environ["CKPTD_SHM_DIR"])

    def staged_bytes() -> int:
        return sum(path.stat().st_size for path in folder.rglob("slot-*"))

    with slow_writer(root, on_busy=on_busy, slots=slots) as (daemon, client):
        state = weights(0)
        client.reserve(state)
        before = staged_bytes()
        assert before > slots * 20_000
        daemon.obstruct("write", "*/.tmp-*/ckpt.pt", "slow")
        tickets = []
        for step in range(1, 51):
            state["w"].fill_(step)
            state["at"][0] = step
            if step == 50 and (on_busy, slots) == ("skip", 1):
                client.wait(60)  # what a script does before its last one: nothing else could give way to it
            with quiet():
                tickets.append(client.snapshot(step, state))
            assert staged_bytes() == before
    assert tickets[-1].committed
    ends = {ticket.step: ticket._state for ticket in tickets}
    left_out = {step for step, end in ends.items() if end in ("skipped", "superseded")}
    written = {ticket.step: ticket for ticket in tickets if ticket.committed}
    assert left_out | written.keys() == set(range(1, 51))
    assert (len(left_out) == 0) == (on_busy == "wait")
    for step in (min(written), 50):
        assert_whole(written[step].path, step)
    found = ckptd.latest_valid(root)
    assert found is not None and found.step == 50


@contextmanager
def quiet() -> Iterator[None]:
    """What is said of skipped steps is another test's."""
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CheckpointWarning)
        yield


# --- case 4 -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("sharding", [SINGLE, SHARDED], ids=["single", "sharded"])
def test_shared_and_graph_tensors_and_parameters_are_copied_detached_and_of_their_type(
    root: Path, sharding: ckptd.Sharding
) -> None:
    leaf = torch.ones(3, requires_grad=True)
    state: dict[str, Any] = {
        "x": {
            "shared": torch.arange(4).share_memory_(), "graph": leaf * 2, "view of graph": (leaf * 2)[1:], "leaf": leaf,
            "parameter": nn.Parameter(torch.ones(2)), "frozen": nn.Parameter(torch.ones(2), requires_grad=False),
            "buffer": nn.Buffer(torch.ones(2)), "shared parameter": nn.Parameter(torch.ones(2).share_memory_()),
        }
    }  # fmt: skip
    with slow_writer(root, sharding=sharding) as (daemon, client):
        client.reserve(state)
        stall(daemon)
        ticket = client.snapshot(1, state)
        wanted = {name: value.detach().clone() for name, value in state["x"].items()}
        with torch.no_grad():
            for value in state["x"].values():
                value.add_(1)
        daemon.wait_until_stalled()
        daemon.clear()
        path = ticket.wait("verified", timeout_s=60).path
        assert path is not None
        x = ckptd.load(path)["x"]
        for name, value in state["x"].items():
            kind = nn.Parameter if isinstance(value, nn.Parameter) else torch.Tensor
            assert type(x[name]) is kind, name
            assert torch.equal(x[name].detach(), wanted[name]), name
            assert x[name].requires_grad == (value.requires_grad and value.is_leaf), name
            assert x[name].grad_fn is None and not x[name].is_shared(), name
        (state["x"]["graph"].sum()).backward()  # the graph is the trainer's, and untouched
        assert leaf.grad is not None
        assert client.restore(state) is not None
        assert all(torch.equal(state["x"][name], wanted[name]) for name in wanted)
        assert state["x"]["shared"].is_shared() and state["x"]["leaf"] is leaf


# --- case 5 -----------------------------------------------------------------------------------------


class Raises(Live):
    def state_dict(self) -> dict[str, Any]:
        raise RuntimeError("not now")


class GivesAnObject(Live):
    def state_dict(self) -> dict[str, Any]:
        return {"inner": [Raises()]}


class GivesAFunction(Live):
    def state_dict(self) -> dict[str, Any]:
        return {"fine": 1, "hook": lambda: 1}


FromMain = type("FromMain", (), {"__module__": "__main__"})


def test_what_cant_be_stored_is_refused_by_key_path_and_later_good_ones_work(
    root: Path, tmp_path: Path
) -> None:
    with slow_writer(root) as (_, client), (tmp_path / "open").open("w") as file:
        bad = {
            "state_dict raises": (Raises(), "state['run']['x']", "RuntimeError: not now"),
            "it raises below": (
                {"inner": [Raises()]},
                "state['run']['x']['inner'][0]",
                "RuntimeError: not now",
            ),
            "object in a state_dict": (
                GivesAnObject(),
                "state['run']['x']['inner'][0]",
                "plain data and tensors",
            ),
            "lambda": ([1, lambda: 1], "state['run']['x'][1]", "function"),
            "lambda in a state_dict": (GivesAFunction(), "state['run']['x']['hook']", "function"),
            "open file": ({"f": file}, "state['run']['x']['f']", "TextIOWrapper"),
            "instance of a class of __main__": (FromMain(), "state['run']['x']", "__main__.FromMain"),
            "class of __main__": (FromMain, "state['run']['x']", "type"),
            "generator": ((i for i in "ab"), "state['run']['x']", "generator"),
            "meta tensor": ((1, torch.empty(2, device="meta")), "state['run']['x'][1]", "meta"),
        }
        for step, (value, where, seen) in enumerate(bad.values(), 1):
            with pytest.raises(UnstorableState) as caught:
                client.snapshot(step, {"w": torch.ones(2), "run": {"x": value}})
            assert caught.value.where == where
            assert seen in str(caught.value)
            good = client.snapshot(100 + step, {"w": torch.full((2,), float(step)), "run": {"x": step}})
            path = good.wait("committed", timeout_s=60).path
            assert path is not None and ckptd.load(path)["run"] == {"x": step}
        assert [one.step for one in client.checkpoints()] == [101 + at for at in range(len(bad))]
