"""Client(overlap=True): snapshot() returns at once, and holds the state at the call whatever the loop does next."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_pre_hooks, register_optimizer_step_pre_hook

import ckptd
from ckptd.disk.rootdir import Root
from ckptd.errors import CheckpointWarning, InvalidArgument, SaveFailed, TimedOut
from ckptd.link import wire
from ckptd.snapshot.slots import SlotState
from ckptd.tensors import background_copy, copying, overlap
from ckptd.tensors.step_gate import gate
from ckptd_places import places
from fake_daemon import FakeDaemon, wait_until
from held_copies import HeldCopies, expected_of, held_in
from told_signals import hearing_ctrl_c

__all__ = ["places"]


@pytest.fixture
def root(places: Path) -> Root:
    return Root.open(places, create=True)


@pytest.fixture
def fake(root: Root) -> Iterator[FakeDaemon]:
    with FakeDaemon(root) as fake:
        yield fake


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[HeldCopies]:
    held = HeldCopies(monkeypatch)
    yield held
    held.may.set()
    wait_until(lambda: not threads_named("ckptd-overlap", "ckptd-sealing"))


def threads_named(*names: str) -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith(names)]


def client_of(root: Root, **options: Any) -> ckptd.Client:
    defaults: dict[str, Any] = {
        "daemon": "attach",
        "overlap": True,
        "start_timeout_s": 60.0,
        "busy_timeout_s": 60.0,
        "close_timeout_s": 60.0,
    }
    return ckptd.Client(root.path, **(defaults | options))


class Loop:
    """A model that trains: buffers, an average, a gradient in the state, and an optimizer."""

    def __init__(self, make: Callable[..., torch.optim.Optimizer]) -> None:
        torch.manual_seed(3)
        self.model = nn.Sequential(
            nn.Embedding(20, 16, max_norm=1.0),
            nn.Linear(16, 40),
            nn.BatchNorm1d(40),
            nn.Dropout(0.1),
            nn.Linear(40, 4),
        )
        self.optimizer = make(self.model.parameters())
        self.average = torch.optim.swa_utils.AveragedModel(self.model)
        self.seen = torch.zeros(5)
        self.state = {
            "model": self.model,
            "optimizer": self.optimizer,
            "average": self.average,
            "gradients": ckptd.Gradients(self.model),
            "seen": self.seen,
            "losses": [],
        }

    def loss(self) -> torch.Tensor:
        self.optimizer.zero_grad(set_to_none=False)
        loss = self.model(torch.randint(20, (8,))).square().mean()
        loss.backward()
        return loss

    def step(self) -> None:
        """Everything that a loop changes: buffers and the embedding in the forward pass, gradients, all in the step."""
        self.seen += 1
        with torch.no_grad():
            next(self.average.parameters()).mul_(0.5)
        loss = self.loss()
        self.state["losses"].append(loss.item())
        self.optimizer.step(self.loss)
        self.average.update_parameters(self.model)


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": lambda given: torch.optim.SGD(given, lr=0.1, momentum=0.9),
    "Adam foreach": lambda given: torch.optim.Adam(given, lr=0.1, foreach=True, amsgrad=True),
    "AdamW fused": lambda given: torch.optim.AdamW(given, lr=0.1, fused=True),
    "SGD fused": lambda given: torch.optim.SGD(given, lr=0.1, momentum=0.9, fused=True),
    "LBFGS": lambda given: torch.optim.LBFGS(given, max_iter=2),
    "Rprop": lambda given: torch.optim.Rprop(given),
}
STEPS = {kind: 20 if kind == "AdamW fused" else 4 for kind in OPTIMIZERS}


# --- isolation ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_each_of_many_snapshots_holds_the_state_of_its_call(
    root: Root, fake: FakeDaemon, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    held = HeldCopies(monkeypatch, patience_s=0.01)
    loop = Loop(OPTIMIZERS[kind])
    wanted = []
    with held.watch_steps(), client_of(root) as client:
        for step in range(STEPS[kind]):
            wanted.append(expected_of(loop.state))
            held.again()
            client.snapshot(step, loop.state)
            assert held.begun.wait(60)
            loop.step()
        client.wait(60)
    assert [held_in(*one) for one in fake.snapshots] == wanted
    assert {thread for thread in held.by if thread != "MainThread"} == {"ckptd-overlap"}


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["shm", "stream"])
def test_checkpoints_hold_the_state_of_their_call_by_either_way_to_the_daemon(
    root: Root, monkeypatch: pytest.MonkeyPatch, transport: str
) -> None:
    held = HeldCopies(monkeypatch, patience_s=0.01)
    loop = Loop(OPTIMIZERS["AdamW fused"])
    wanted = []
    how = {"daemon": "auto", "transport": transport}
    with held.watch_steps(), client_of(root, **how) as client:
        for step in range(4):
            wanted.append({name: value.clone() for name, value in loop.model.state_dict().items()})
            held.again()
            client.snapshot(step, loop.state)
            loop.step()
    for step, model in enumerate(wanted):
        stored = ckptd.load(root.run_dir("default") / f"step-{step:09d}")["model"]
        assert all(torch.equal(stored[name], value) for name, value in model.items())


def test_snapshot_returns_before_the_copy_and_the_next_step_waits_for_it(
    root: Root, fake: FakeDaemon, held: HeldCopies
) -> None:
    loop = Loop(OPTIMIZERS["AdamW fused"])
    loop.step()
    with client_of(root) as client:
        ticket = client.snapshot(1, loop.state)
        assert ticket.state == "copying"
        assert held.begun.wait(60)
        assert [slot.header().state for slot in fake.slots.values()].count(SlotState.FILLING) == 1
        before = loop.model[1].weight.detach().clone()
        threading.Timer(0.05, held.may.set).start()
        loop.optimizer.step()
        assert held.may.is_set()
        assert not torch.equal(before, loop.model[1].weight)
        assert ticket.wait("staged", timeout_s=60) is ticket
        ticket.wait(timeout_s=60)
    assert len(fake.snapshots) == 1


def test_a_step_of_an_optimizer_outside_the_state_waits_too(
    root: Root, fake: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = HeldCopies(monkeypatch, patience_s=0.05)
    loop = Loop(OPTIMIZERS["SGD"])
    loop.step()
    other = torch.optim.SGD(loop.model.parameters(), lr=1.0)
    wanted = expected_of(loop.state)
    with held.watch_steps(), client_of(root) as client:
        client.snapshot(1, loop.state)
        other.step()
        client.wait(60)
    assert held_in(*fake.snapshots[0]) == wanted


def test_two_steps_and_a_scaler_leave_a_snapshot_as_it_was(
    root: Root, fake: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = HeldCopies(monkeypatch, patience_s=0.05)
    loop = Loop(OPTIMIZERS["AdamW fused"])
    scaler = torch.amp.GradScaler("cpu")
    loop.step()
    wanted = expected_of(loop.state)
    with held.watch_steps(), client_of(root) as client:
        client.snapshot(1, loop.state)
        for _ in range(2):
            loop.optimizer.zero_grad()
            scaler.scale(loop.model(torch.arange(8)).sum()).backward()
            scaler.step(loop.optimizer)
            scaler.update()
        client.wait(60)
    assert held_in(*fake.snapshots[0]) == wanted


def test_a_step_in_the_backward_pass_of_another_thread_waits(
    root: Root, fake: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = HeldCopies(monkeypatch, patience_s=0.05)
    loop = Loop(OPTIMIZERS["SGD"])
    loop.step()
    wanted = expected_of(loop.state)
    with held.watch_steps(), client_of(root) as client:
        client.snapshot(1, loop.state)
        stepper = threading.Thread(target=loop.step)
        stepper.start()
        stepper.join()
        client.wait(60)
    assert held_in(*fake.snapshots[0]) == wanted


def test_a_parameter_that_is_replaced_meanwhile_is_stored_as_it_was(
    root: Root, fake: FakeDaemon, held: HeldCopies
) -> None:
    loop = Loop(OPTIMIZERS["SGD"])
    wanted = expected_of(loop.state)
    with client_of(root) as client:
        client.snapshot(1, loop.state)
        loop.model[1].weight.data = torch.zeros(40, 16)
        loop.model.double()
        loop.optimizer.load_state_dict(torch.optim.SGD(loop.model.parameters(), lr=1.0).state_dict())
        gc.collect()
        held.may.set()
        client.wait(60)
    assert held_in(*fake.snapshots[0]) == wanted


# --- whatever else the loop does -------------------------------------------------------------------


@pytest.mark.parametrize("into", ["module", "part", "client"])
def test_what_is_loaded_into_the_state_waits_for_the_copy(
    root: Root, monkeypatch: pytest.MonkeyPatch, into: str, fake: FakeDaemon
) -> None:
    loop = Loop(OPTIMIZERS["SGD"])
    ckptd.save(root.path / "elsewhere", loop.state, step=3)
    loop.step()
    wanted = expected_of(loop.state)
    held = HeldCopies(monkeypatch, patience_s=0.1)
    with client_of(root) as client:
        client.snapshot(1, loop.state)
        if into == "client":
            client.restore(loop.state, source=root.path / "elsewhere")
        elif into == "module":
            loop.model.load_state_dict(Loop(OPTIMIZERS["SGD"]).model.state_dict())
        else:
            loop.model[4].load_state_dict({"weight": torch.zeros(4, 40), "bias": torch.zeros(4)})
        held.may.set()
        client.wait(60)
    assert held_in(*fake.snapshots[0]) == wanted


def test_a_restore_waits_for_the_copy_though_no_hook_would_tell(
    root: Root, monkeypatch: pytest.MonkeyPatch, fake: FakeDaemon
) -> None:
    loop = Loop(OPTIMIZERS["SGD"])
    loop.step()
    ckptd.save(root.path / "elsewhere", loop.state, step=3)
    loop.step()
    wanted = expected_of(loop.state)
    held = HeldCopies(monkeypatch, patience_s=0.1)
    with client_of(root) as client:
        client.snapshot(1, loop.state)
        client.restore(loop.state, source=root.path / "elsewhere", only=["optimizer"])
        held.may.set()
        client.wait(60)
    assert held_in(*fake.snapshots[0]) == wanted


def test_the_next_snapshot_waits_for_the_copy_before_it(
    root: Root, fake: FakeDaemon, held: HeldCopies
) -> None:
    loop = Loop(OPTIMIZERS["SGD"])
    with client_of(root, slots=1) as client:
        first = client.snapshot(1, loop.state)
        threading.Timer(0.05, held.may.set).start()
        second = client.snapshot(2, loop.state)
        assert first.state != "copying"
        second.wait(timeout_s=60)
    assert [descriptor.step for descriptor, _ in fake.snapshots] == [1, 2]


@pytest.fixture
def in_time() -> Iterator[None]:
    """What hangs is an error."""

    def over(*_: Any) -> None:
        raise TimeoutError("it hangs")

    before = signal.signal(signal.SIGALRM, over)
    signal.alarm(100)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("call", ["snapshot", "restore", "wait", "close"])
def test_who_waits_for_a_copy_may_hold_the_lock_that_the_end_of_the_one_before_waits_for(
    root: Root, fake: FakeDaemon, held: HeldCopies, in_time: None, call: str
) -> None:
    loop = Loop(OPTIMIZERS["SGD"])
    ckptd.save(root.path / "elsewhere", loop.state, step=3)
    calls: dict[str, Callable[[ckptd.Client], object]] = {
        "snapshot": lambda client: client.snapshot(3, loop.state),
        "restore": lambda client: client.restore(loop.state, source=root.path / "elsewhere"),
        "wait": lambda client: client.wait(60),
        "close": lambda client: client.close(),
    }
    held.may.set()
    with client_of(root) as client:
        writer: Any = client._writer
        with writer.lock:
            client.snapshot(1, loop.state)
            wait_until(lambda: writer._beside._filling.has_ended)
            second = client.snapshot(2, loop.state)
            calls[call](client)
        if call != "close":
            client.wait(60)
    assert second.state == "committed"
    assert [descriptor.step for descriptor, _ in fake.snapshots][:2] == [1, 2]


def test_a_snapshot_that_interrupts_the_copy_before_it_is_skipped(
    root: Root, fake: FakeDaemon, held: HeldCopies, monkeypatch: pytest.MonkeyPatch, in_time: None
) -> None:
    loop = Loop(OPTIMIZERS["SGD"])
    tickets: list[ckptd.Ticket] = []

    def interrupted(*how: Any) -> None:
        if threading.current_thread() is not threading.main_thread():
            assert held.may.wait(60)
        elif not tickets:
            with pytest.warns(
                CheckpointWarning, match="step 2 was skipped: the snapshot before is being copied"
            ):
                tickets.append(client.snapshot(2, loop.state))
            held.may.set()
        copying.copy_tensors(*how)

    monkeypatch.setattr(background_copy, "copy_tensors", interrupted)
    with client_of(root) as client:
        client.snapshot(1, loop.state)
        loop.optimizer.step()
        client.wait(60)
    assert [ticket.state for ticket in tickets] == ["skipped"]
    assert [descriptor.step for descriptor, _ in fake.snapshots] == [1]


def test_a_client_that_is_dropped_in_the_middle_of_its_copy_saves_it(
    root: Root, fake: FakeDaemon, held: HeldCopies, monkeypatch: pytest.MonkeyPatch, in_time: None
) -> None:
    loop = Loop(OPTIMIZERS["SGD"])
    hooks: list[int] = []
    wanted = expected_of(loop.state)
    clients = [client_of(root)]

    def collecting(*how: Any) -> None:
        assert held.may.wait(60)
        clients.clear()  # as the garbage collector does, in whichever thread
        hooks.append(len(_global_optimizer_pre_hooks))
        copying.copy_tensors(*how)

    monkeypatch.setattr(background_copy, "copy_tensors", collecting)
    clients[0].snapshot(1, loop.state)
    held.may.set()
    wait_until(lambda: bool(fake.snapshots) and not threads_named("leaving"))
    assert [held_in(*one) for one in fake.snapshots] == [wanted]
    assert all(hooks)  # steps wait as long as anything is copied
    wait_until(lambda: gc.collect() >= 0 and "0 users" in repr(gate))
    assert _global_optimizer_pre_hooks  # a step may be running them
    gate.enter()
    gate.leave()  # who leaves next takes the hook away


def test_a_daemon_that_cannot_be_told_of_a_copy_is_said(
    root: Root, fake: FakeDaemon, held: HeldCopies, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = Loop(OPTIMIZERS["SGD"])

    def broken(*_: Any) -> None:
        raise OSError("broken")

    with client_of(root) as client:
        monkeypatch.setattr(client._writer._link, "stage", broken)  # type: ignore[union-attr]
        ticket = client.snapshot(1, loop.state)
        held.may.set()
        wait_until(lambda: ticket.state == "failed")
        monkeypatch.undo()
        with pytest.warns(CheckpointWarning, match="the daemon couldn't be told: OSError: broken"):
            client.wait(60)


@pytest.mark.parametrize("ending", ["close", "error", "drop"])
def test_a_snapshot_that_no_step_follows_is_finished_at_the_end(
    root: Root, fake: FakeDaemon, held: HeldCopies, ending: str
) -> None:
    loop = Loop(OPTIMIZERS["SGD"])
    wanted = expected_of(loop.state)
    client = client_of(root)
    client.snapshot(1, loop.state)
    threading.Timer(0.05, held.may.set).start()
    if ending == "close":
        client.close()
    elif ending == "error":
        with pytest.raises(ZeroDivisionError), client:
            raise ZeroDivisionError
    else:
        del client
        gc.collect()
    assert [held_in(*one) for one in fake.snapshots] == [wanted]
    assert repr(gate) == "<StepGate 0 users, 0 copies under way>"


def test_a_copy_that_does_not_end_in_time_is_lost_loudly(
    root: Root, fake: FakeDaemon, held: HeldCopies
) -> None:
    client = client_of(root, close_timeout_s=0.1)
    ticket = client.snapshot(4, Loop(OPTIMIZERS["SGD"]).state)
    assert held.begun.wait(60)
    with pytest.raises(TimedOut):
        ticket.wait("staged", timeout_s=0.05)
    with pytest.warns(CheckpointWarning, match="step 4 was not saved"):
        client.close()
    assert ticket.state == "failed"
    held.may.set()
    wait_until(lambda: repr(gate) == "<StepGate 0 users, 0 copies under way>")
    assert fake.snapshots == []


def test_a_copy_that_fails_is_a_failed_snapshot_and_its_slot_is_free(
    root: Root, fake: FakeDaemon, held: HeldCopies
) -> None:
    loop = Loop(OPTIMIZERS["SGD"])
    with client_of(root) as client:
        held.error = MemoryError("no memory")
        ticket = client.snapshot(1, loop.state)
        held.may.set()
        with pytest.raises(SaveFailed, match="its copy failed: MemoryError: no memory"):
            ticket.wait("staged", timeout_s=60)
        assert ticket.state == "failed"
        assert {slot.header().state for slot in fake.slots.values()} == {SlotState.FREE}
        loop.step()
        held.error = None
        client.snapshot(2, loop.state).wait(timeout_s=60)
    assert [descriptor.step for descriptor, _ in fake.snapshots] == [2]


def test_a_failed_copy_that_nobody_waited_for_is_said_at_the_next_call(
    root: Root, fake: FakeDaemon, held: HeldCopies
) -> None:
    loop = Loop(OPTIMIZERS["SGD"])
    held.error = RuntimeError("gone")
    with client_of(root) as client:
        client.snapshot(1, loop.state)
        held.may.set()
        with pytest.warns(CheckpointWarning, match="step 1 was not saved: its copy failed"):
            client.wait(60)


def test_a_daemon_that_was_lost_meanwhile_gets_the_snapshot_when_it_is_back(
    root: Root, held: HeldCopies
) -> None:
    loop = Loop(OPTIMIZERS["SGD"])
    wanted = expected_of(loop.state)
    with FakeDaemon(root) as first:
        client = client_of(root)
        client.snapshot(1, loop.state)
        assert held.begun.wait(60)
        first.die()
    with FakeDaemon(root) as second:  # it has none of the slots: the snapshot moves to one that it makes
        wait_until(lambda: client._writer.look() is None and bool(second.named(wire.Attach)))
        held.may.set()
        client.wait(60)
        client.close()
        assert [held_in(*one) for one in second.snapshots] == [wanted]


def test_a_forked_child_has_no_copy_and_its_parent_keeps_it(
    root: Root, fake: FakeDaemon, held: HeldCopies
) -> None:
    loop = Loop(OPTIMIZERS["SGD"])
    loop.step()
    wanted = expected_of(loop.state)
    with client_of(root) as client:
        client.snapshot(1, loop.state)
        assert held.begun.wait(60)
        child = os.fork()
        if child == 0:
            signal.alarm(60)
            loop.optimizer.step()  # waits for nothing: its memory is its own
            os._exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        held.may.set()
        client.wait(60)
    assert [held_in(*one) for one in fake.snapshots] == [wanted]


def interrupt(when: Callable[[], bool]) -> None:
    """A Ctrl-C for this process, once that is true: outside of the call that it is for, it would end all tests."""
    wait_until(when)
    os.kill(os.getpid(), signal.SIGINT)


def test_ctrl_c_in_a_step_that_waits_leaves_the_snapshot_and_the_parameters(
    root: Root, fake: FakeDaemon, held: HeldCopies
) -> None:
    loop = Loop(OPTIMIZERS["SGD"])
    loop.step()
    wanted = expected_of(loop.state)
    with client_of(root) as client:
        client.snapshot(1, loop.state)
        assert held.begun.wait(60)
        with hearing_ctrl_c():
            interrupting = threading.Thread(target=interrupt, args=(lambda: "MainThread" in held.by,))
            interrupting.start()
            with pytest.raises(KeyboardInterrupt):
                loop.optimizer.step()
            interrupting.join()
        assert expected_of(loop.state)[("model", "1.weight")] == wanted[("model", "1.weight")]
        held.may.set()
        with pytest.warns(CheckpointWarning, match="its copy failed: KeyboardInterrupt"):
            client.wait(60)
        client.snapshot(2, loop.state).wait(timeout_s=60)


def test_a_hook_that_was_there_before_the_client_changes_nothing_that_is_still_copied(
    root: Root, fake: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = HeldCopies(monkeypatch, patience_s=0.01)
    loop = Loop(OPTIMIZERS["SGD"])

    def clamp(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        with torch.no_grad():
            for parameter in loop.model.parameters():
                parameter.mul_(0.5)

    users = register_optimizer_step_pre_hook(clamp)
    try:
        with held.watch_steps(), client_of(root) as client:
            wanted = expected_of(loop.state)
            client.snapshot(1, loop.state)
            assert held.begun.wait(60)
            loop.step()
            client.wait(60)
    finally:
        users.remove()
    assert [held_in(*one) for one in fake.snapshots] == [wanted]


# --- what can't wait -------------------------------------------------------------------------------


def test_without_an_optimizer_all_is_copied_before_snapshot_returns(
    root: Root, fake: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = HeldCopies(monkeypatch, patience_s=0.05)
    with client_of(root) as client:
        ticket = client.snapshot(1, {"model": nn.Linear(3, 3), "weights": torch.ones(9)})
        assert ticket.wait(timeout_s=60).state == "committed"
    assert held.by == []


def test_what_is_copied_in_less_than_a_thread_takes_to_start_is_copied_at_once(
    root: Root, fake: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = HeldCopies(monkeypatch, patience_s=0.05)
    monkeypatch.setattr(overlap, "AT_ONCE_BYTES", 1 << 20)
    with client_of(root) as client:
        client.snapshot(1, Loop(OPTIMIZERS["SGD"]).state).wait(timeout_s=60)
    assert held.by == []


def test_an_optimizer_whose_step_runs_no_hook_is_copied_at_once_and_named(
    root: Root, fake: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = HeldCopies(monkeypatch, patience_s=0.05)
    loop = Loop(OPTIMIZERS["SGD"])
    loop.optimizer.step = lambda closure=None: None  # type: ignore[method-assign]
    with client_of(root) as client:
        with pytest.warns(CheckpointWarning, match="what SGD trains is copied at once: its step"):
            client.snapshot(1, loop.state)
        client.snapshot(2, loop.state).wait(timeout_s=60)
    assert held.by == []


def test_overlap_without_a_daemon_is_refused(root: Root) -> None:
    with pytest.raises(InvalidArgument, match=r'overlap: .* True, wanted a daemon: with daemon="off"'):
        ckptd.Client(root.path, daemon="off", overlap=True)
    with pytest.raises(InvalidArgument, match=r"overlap: .* 1, wanted True or False"):
        client_of(root, overlap=1)


def test_clients_of_one_process_share_the_hook(root: Root, fake: FakeDaemon) -> None:
    wait_until(lambda: gc.collect() >= 0 and "0 users" in repr(gate))
    gate.enter()
    gate.leave()  # one that was dropped before may have left it
    hooks = _global_optimizer_pre_hooks
    before = len(hooks)
    with client_of(root) as one:
        assert len(hooks) == before + 1
        two = client_of(root, run="another")
        assert len(hooks) == before + 1
        one.close()
        assert len(hooks) == before + 1
        two.close()
    assert len(hooks) == before


# --- ends of whole scripts -------------------------------------------------------------------------

SCRIPT = """
import os, signal, sys, torch, ckptd
from ckptd.tensors import background_copy, copying
model = torch.nn.Linear(600, 600)
torch.nn.init.constant_(model.weight, 5)
state = {"model": model, "optimizer": torch.optim.SGD(model.parameters())}
client = ckptd.Client(sys.argv[1], overlap=True)
"""
HELD = """
import threading
go = threading.Event()
def held(*how):
    assert go.wait(60)
    copying.copy_tensors(*how)
background_copy.copy_tensors = held
assert client.snapshot(7, state).state == "copying"
"""
ENDINGS = {
    "falls off the end": HELD + "threading.Timer(0.1, go.set).start()",
    "raises": HELD + "threading.Timer(0.1, go.set).start(); raise RuntimeError",
}


def run(root: Root, code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", SCRIPT + code, str(root.path)],
        capture_output=True, text=True, timeout=250, check=False,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("ending", ENDINGS)
def test_however_the_script_ends_a_snapshot_that_is_still_copied_becomes_durable(
    root: Root, ending: str
) -> None:
    done = run(root, ENDINGS[ending])
    assert "ckptd:" not in done.stderr, done.stderr
    path = root.run_dir("default") / "step-000000007"
    assert torch.equal(ckptd.load(path)["model"]["weight"], torch.full((600, 600), 5.0))


@pytest.mark.slow
def test_a_trainer_killed_before_its_slot_is_sealed_loses_that_snapshot_and_nothing_else(root: Root) -> None:
    done = run(root, "client.snapshot(6, state).wait()" + HELD + "os.kill(os.getpid(), signal.SIGKILL)")
    assert done.returncode == -signal.SIGKILL, done.stderr
    with client_of(root) as client:
        assert client.drain(60) == 0
        assert [one.step for one in client.checkpoints()] == [6]
    assert not list(root.slot_path.glob("slot-*"))
