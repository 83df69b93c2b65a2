"""Isolation and publication hold on every way from the trainer to the medium: field cases 1 to 14.

By slot, one or two of them; copied beside the training; streamed; and written past the page cache, or through it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckptd
from ckptd.errors import CheckpointWarning, NoSpace, SaveFailed, UnstorableState
from ckptd.link import session
from ckptd.tensors import overlap
from ckptd_places import private_places
from fake_daemon import wait_until
from obstructed_daemon import ObstructedDaemon, obstructed_daemon
from round_trip import same
from run_damage import flip
from whole_job import assert_whole, contents, job, train_on, weights

pytestmark = pytest.mark.slow

SHARDED = ckptd.Sharding(by="round-robin", shards=3)
DATA, INDEX = "ckpt.pt", "index.json"


@dataclass(frozen=True)
class Way:
    """How the clients of a test save, and how the daemon writes."""

    client: dict[str, Any] = field(default_factory=dict)
    daemon: dict[str, str] = field(default_factory=dict)


WAYS = {
    "two slots": Way(),
    "one slot": Way({"slots": 1}),
    "overlap": Way({"overlap": True}),
    "stream": Way({"transport": "stream"}),
    "overlap and stream": Way({"overlap": True, "transport": "stream"}),
    "direct": Way(daemon={"CKPTD_WRITE_MODE": "direct"}),
    "early": Way(daemon={"CKPTD_WRITE_MODE": "early"}),
    "plain": Way(daemon={"CKPTD_WRITE_MODE": "plain"}),
}


class Served:
    """One daemon for all tests of a way, each with a run of its own."""

    def __init__(self, root: Path, way: Way, daemon: ObstructedDaemon) -> None:
        self.root, self.way, self.daemon = root, way, daemon
        self.run = ""

    def client(self, **options: Any) -> ckptd.Client:
        how = {"daemon": "attach", "close_timeout_s": 60.0} | self.way.client | options
        return ckptd.Client(self.root, run=self.run, **how)

    def stall(self, file: str = DATA) -> None:
        self.fail("stall", file)

    def fail(self, how: str, file: str = DATA) -> None:
        self.daemon.obstruct("write", f"*/{self.run}/.tmp-*/{file}", how)

    @property
    def run_dir(self) -> Path:
        return self.root / self.run

    @property
    def folders(self) -> list[str]:
        return sorted(path.name for path in self.run_dir.glob("*step-*"))

    def latest(self) -> int | None:
        found = ckptd.latest_valid(self.root, self.run)
        return None if found is None else found.step


@pytest.fixture(scope="module", params=WAYS)
def daemon(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    way = WAYS[request.param]
    with ExitStack() as stack:
        root = stack.enter_context(private_places(tmp_path_factory.mktemp("way") / "root"))
        (root / ".ckptd").mkdir(parents=True)
        (root / ".ckptd" / "ckptd.toml").write_text(
            "[policy]\nkeep_last = 100\n[runs.keep-1]\nkeep_last = 1\n"
        )
        yield Served(root, way, stack.enter_context(obstructed_daemon(root, env=way.daemon)))


@pytest.fixture
def served(
    daemon: Served, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Served]:
    monkeypatch.setattr(overlap, "AT_ONCE_BYTES", 0)  # the states here are small, and are to overlap too
    daemon.run = f"run-{abs(hash(request.node.name))}"
    yield daemon
    daemon.daemon.clear()


def held(client: ckptd.Client, served: Served) -> int:
    """How many snapshots the client can have under way: the slots that it has."""
    return int(served.way.client.get("slots", 2))


def saved(ticket: ckptd.Ticket) -> Path:
    path = ticket.wait("verified", timeout_s=60).path
    assert path is not None
    return path


# --- isolation ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("sharding", [ckptd.Sharding(), SHARDED], ids=["single", "sharded"])
def test_what_training_changes_after_the_call_is_not_in_the_checkpoint(
    served: Served, sharding: ckptd.Sharding
) -> None:
    """Field case 1."""
    state, metrics = job(), {"loss": torch.tensor(0.25)}
    wanted = contents(ckptd.save(served.root.parent / f"oracle-{served.run}", state, step=7))
    with served.client(sharding=sharding) as client:
        client.reserve(state)
        served.stall("*.pt")
        ticket = client.snapshot(7, state, metrics)
        train_on(state)
        metrics["loss"].fill_(99)
        served.daemon.wait_until_stalled()
        train_on(state | {"short": [1, [2, {"x": 3}]]})
        served.daemon.clear()
        path = saved(ticket)
        assert same(contents(path), wanted)
        (found,) = client.checkpoints()
        assert (found.step, path.name, found.metrics) == (7, "step-000000007", {"loss": 0.25})


def test_two_hundred_tensors_changed_by_an_optimizer_and_by_hand_are_never_mixed(served: Served) -> None:
    """Field case 1: parameters by the steps of an optimizer, which a copy beside the training holds up."""
    parameters = [nn.Parameter(torch.zeros(500)) for _ in range(100)]
    others = [torch.zeros(500) for _ in range(100)]
    optimizer = torch.optim.SGD(parameters, lr=1.0)
    state = {"model": nn.ParameterList(parameters), "optimizer": optimizer, "others": others, "count": [0]}

    def step_to(value: float) -> None:
        for parameter, other in zip(parameters, others, strict=True):
            parameter.grad = parameter.detach() - value
            other.fill_(value)
        optimizer.step()
        state["count"][0] = value  # type: ignore[index]

    with served.client() as client:
        client.reserve(state)
        tickets = {}
        for step in range(1, 5):
            step_to(step)
            tickets[step] = client.snapshot(step, state)
            step_to(-step)
        for step, ticket in tickets.items():
            loaded = ckptd.load(saved(ticket))
            assert torch.stack(list(loaded["model"].values())).unique().tolist() == [step]
            assert torch.stack(loaded["others"]).unique().tolist() == [step]
            assert loaded["count"] == [step]


def test_everything_changed_in_between_gives_as_many_contents(served: Served) -> None:
    """Field case 2: another dtype and shape, a parameter more, optimizer state that comes late, components that go."""
    model = nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "x": torch.zeros(4), "log": []}

    def train() -> None:
        model(torch.rand(2, 3)).sum().backward()
        optimizer.step()

    changes: list[Callable[[], object]] = [
        lambda: state["log"].append(1),
        lambda: state["x"].fill_(2),
        lambda: state.update(x=torch.ones(2, 3, dtype=torch.bfloat16)),
        lambda: state.update(x=torch.arange(6.0, dtype=torch.bfloat16).view(3, 2).t()),
        train,
        train,
        lambda: model.register_parameter("extra", nn.Parameter(torch.full((3,), 7.0))),
        lambda: optimizer.add_param_group({"params": [model.extra]}),
        lambda: state.update(late={"component": torch.full((2,), 9.0)}),
        lambda: state.pop("log"),
    ]
    with served.client() as client:
        wanted, tickets = [], []
        for number, change in enumerate(changes, 1):
            change()
            oracle = served.root.parent / f"oracle-{served.run}-{number}"
            wanted.append(contents(ckptd.save(oracle, state, step=number)))
            tickets.append(client.snapshot(number, state))
        seen = [contents(saved(ticket)) for ticket in tickets]
    for number, (one, oracle_of_it) in enumerate(zip(seen, wanted, strict=True), 1):
        assert same(one, oracle_of_it), number
    assert not any(same(one, later) for one, later in pairwise(wanted))


def test_as_many_as_there_is_room_for_behind_a_slow_writer_are_whole(served: Served) -> None:
    """Field case 3."""
    with served.client() as client:
        state = weights(0)
        client.reserve(state)
        served.stall()
        tickets = []
        for step in range(1, held(client, served) + 1):
            state["w"].fill_(step)
            state["at"][0] = step
            tickets.append(client.snapshot(step, state))
        state["w"].fill_(-1)
        served.daemon.wait_until_stalled()
        served.daemon.clear()
        for step, ticket in enumerate(tickets, 1):
            assert_whole(saved(ticket), step)


def test_tensors_of_every_kind_are_copied_detached_and_of_their_type(served: Served) -> None:
    """Field case 4."""
    leaf = torch.ones(3, requires_grad=True)
    state: dict[str, Any] = {
        "x": {
            "shared": torch.arange(4).share_memory_(), "graph": leaf * 2, "view of graph": (leaf * 2)[1:],
            "leaf": leaf, "parameter": nn.Parameter(torch.ones(2)), "strided": torch.arange(12.0)[::3],
            "shared parameter": nn.Parameter(torch.ones(2).share_memory_()),
        }
    }  # fmt: skip
    wanted = {name: value.detach().clone() for name, value in state["x"].items()}
    with served.client() as client:
        loaded = ckptd.load(saved(client.snapshot(1, state)))["x"]
    for name, value in state["x"].items():
        kind = nn.Parameter if isinstance(value, nn.Parameter) else torch.Tensor
        assert type(loaded[name]) is kind, name
        assert torch.equal(loaded[name].detach(), wanted[name]), name
        assert loaded[name].grad_fn is None and not loaded[name].is_shared(), name
    state["x"]["graph"].sum().backward()


def test_what_cant_be_stored_is_refused_by_key_path_and_later_ones_work(served: Served) -> None:
    """Field case 5."""
    state: dict[str, Any] = weights(1)
    with served.client() as client:
        saved(client.snapshot(1, state))
        with pytest.raises(UnstorableState, match=r"state\['bad'\]\['hook'\]"):
            client.snapshot(2, state | {"bad": {"hook": lambda: 1}})
        assert_whole(saved(client.snapshot(3, weights(3))), 3)
        assert served.folders == ["step-000000001", "step-000000003"]


# --- publication --------------------------------------------------------------------------------------


def test_a_restore_goes_past_a_damaged_one_and_says_why(served: Served) -> None:
    """Field case 6."""
    with served.client() as client:
        for step in (1, 2, 3):
            path = saved(client.snapshot(step, weights(step)))
        flip(path / DATA, -1)
        live = weights(0)
        with pytest.warns(CheckpointWarning, match="step-000000003 is passed over"):
            resumed = client.restore(live)
        assert resumed is not None
        assert (resumed.step, [one.name for one in resumed.passed_over]) == (2, ["step-000000003"])
        assert live["w"].unique().tolist() == [2] and live["at"] == [2]


def test_every_answer_while_it_writes_is_a_whole_one_and_never_none(served: Served) -> None:
    """Field case 7."""
    served.run = f"{served.run}.polled"
    done, answers = threading.Event(), list[int]()

    def poll() -> None:
        while not done.is_set():
            found = ckptd.latest_valid(served.root, served.run)
            assert found is not None
            assert_whole(found.path, found.step)
            answers.append(found.step)

    with served.client() as client:
        saved(client.snapshot(1, weights(1)))
        failed: list[BaseException] = []

        def run() -> None:
            try:
                poll()
            except BaseException as error:
                failed.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        for step in range(2, 12):
            client.snapshot(step, weights(step)).wait(timeout_s=60)
        done.set()
        thread.join()
    assert not failed, failed
    assert answers == sorted(answers)


def test_the_good_one_stays_until_its_successor_is_verified(served: Served) -> None:
    """Field case 8."""
    served.run = "keep-1"
    with served.client() as client:
        saved(client.snapshot(1, weights(1)))
        served.stall(INDEX)
        second = client.snapshot(2, weights(2))
        served.daemon.wait_until_stalled()
        assert served.latest() == 1
        assert "step-000000001" in served.folders
        served.daemon.clear()
        saved(second)
        wait_until(lambda: served.folders == ["step-000000002"])
        assert served.latest() == 2


@pytest.mark.parametrize(
    ("error", "file", "kind"),
    [
        ("ENOSPC", DATA, NoSpace),
        ("EIO", DATA, SaveFailed),
        ("ENOSPC", "tensors.json", NoSpace),
        ("EIO", INDEX, SaveFailed),
    ],
)
def test_a_writer_that_fails_is_told_leaves_nothing_and_the_next_save_works(
    served: Served, error: str, file: str, kind: type[Exception]
) -> None:
    """Field case 9."""
    with served.client() as client:
        saved(client.snapshot(1, weights(1)))
        served.fail(error, file)
        ticket = client.snapshot(2, weights(2))
        wait_until(lambda: ticket.state == "failed")
        assert isinstance(ticket.error, kind)
        assert served.latest() == 1
        served.daemon.clear()
        with pytest.warns(CheckpointWarning, match="step 2 was not saved"):
            third = client.snapshot(3, weights(3))
        assert_whole(saved(third), 3)
        assert served.folders == ["step-000000001", "step-000000003"]


def test_a_step_saved_again_is_a_second_whole_one_and_the_newer_one_wins(served: Served) -> None:
    """Field case 13."""
    with served.client() as client:
        first = saved(client.snapshot(5, weights(1)))
        second = saved(client.snapshot(5, weights(2)))
        assert (first.name, second.name) == ("step-000000005", "step-000000005.2")
        assert_whole(first, 1)
        assert_whole(second, 2)
        found = client.latest()
        assert found is not None and found.path == second


def test_a_second_client_of_the_run_is_refused_and_the_first_goes_on(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Field case 14."""
    monkeypatch.setattr(session, "_LEAVING_CLIENT_S", 0.2)
    with served.client() as client:
        saved(client.snapshot(1, weights(1)))
        with pytest.raises(ckptd.RunTaken, match=served.run):
            served.client()
        assert_whole(saved(client.snapshot(2, weights(2))), 2)
