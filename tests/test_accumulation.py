"""Gradients that a snapshot would lose are told from those of a finished step, for the loops that people write."""

from __future__ import annotations

import copy
import gc
import pickle
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

import ckptd
from ckptd.errors import CheckpointWarning
from ckptd.tensors import accumulation
from ckptd.tensors.accumulation import accumulated_in
from ckptd.tensors.restoring import apply_state


@pytest.fixture(autouse=True)
def seeing(monkeypatch: pytest.MonkeyPatch) -> None:
    """No compiled step of another test makes it blind, and no optimizers of theirs are more than it renews."""
    monkeypatch.setattr(accumulation._watch, "blind", False)
    monkeypatch.setattr(accumulation._watch, "_stepped", {})


Loop = Callable[[], tuple[dict[str, Any], Callable[[], None]]]


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))


def backward(model: nn.Module, scale: float = 1.0) -> None:
    (model(torch.rand(3, 4)).square().sum() * scale + 0 * scale).backward()


def simple(make: Callable[[Any], torch.optim.Optimizer], **zero: Any) -> Loop:
    def loop() -> tuple[dict[str, Any], Callable[[], None]]:
        model = net()
        optimizer = make(model.parameters())

        def step() -> None:
            optimizer.zero_grad(**zero)
            backward(model)
            optimizer.step()

        return {"model": model, "optimizer": optimizer}, step

    return loop


def zeroed_after(**zero: Any) -> Loop:
    def loop() -> tuple[dict[str, Any], Callable[[], None]]:
        state, step = simple(torch.optim.AdamW)()

        def both() -> None:
            step()
            state["optimizer"].zero_grad(**zero)

        return state, both

    return loop


def clipped() -> tuple[dict[str, Any], Callable[[], None]]:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        backward(model, 1000.0)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()

    return {"model": model, "optimizer": optimizer}, step


def lbfgs() -> tuple[dict[str, Any], Callable[[], None]]:
    model = net()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)

    def closure() -> Any:
        optimizer.zero_grad()
        loss = model(torch.ones(3, 4)).square().sum()
        loss.backward()
        return loss

    def step() -> None:
        optimizer.step(closure)

    return {"model": model, "optimizer": optimizer}, step


def frozen() -> tuple[dict[str, Any], Callable[[], None]]:
    model = net()
    model[0].requires_grad_(requires_grad=False)  # type: ignore[operator]
    optimizer = torch.optim.AdamW([{"params": layer.parameters()} for layer in (model[0], model[2])])  # type: ignore[index]

    def step() -> None:
        optimizer.zero_grad()
        backward(model)
        optimizer.step()

    return {"model": model, "optimizer": optimizer}, step


def scaled(scale: float) -> Loop:
    def loop() -> tuple[dict[str, Any], Callable[[], None]]:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)

        def step() -> None:
            optimizer.zero_grad()
            scaler.scale(model(torch.rand(3, 4)).square().sum()).backward()
            scaler.step(optimizer)
            scaler.update(scale)

        return {"model": model, "optimizer": optimizer, "scaler": scaler}, step

    return loop


def gan() -> tuple[dict[str, Any], Callable[[], None]]:
    generator, critic = nn.Linear(4, 4), net()
    optimizers = [torch.optim.Adam(part.parameters()) for part in (critic, generator)]

    def step() -> None:
        optimizers[0].zero_grad()
        critic(generator(torch.rand(3, 4)).detach()).sum().backward()
        optimizers[0].step()
        optimizers[1].zero_grad()
        critic(generator(torch.rand(3, 4))).sum().backward()  # the critic gets gradients too
        optimizers[1].step()

    return {"models": [generator, critic], "optimizers": optimizers}, step


class Wraps(torch.optim.Optimizer):
    """As SAM does it: the step that counts is another optimizer's, over the same groups."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.base = torch.optim.SGD(self.param_groups, 0.1)
        self.param_groups = self.base.param_groups

    def second_step(self) -> None:
        self.base.step()


def wrapped() -> tuple[dict[str, Any], Callable[[], None]]:
    model = net()
    optimizer = Wraps(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        backward(model)
        optimizer.second_step()

    return {"model": model, "optimizer": optimizer}, step


def one_per_parameter() -> tuple[dict[str, Any], Callable[[], None]]:
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(6)])
    optimizers = [torch.optim.SGD([parameter], 0.01) for parameter in model.parameters()]

    def step() -> None:
        for optimizer in optimizers:
            optimizer.zero_grad()
        backward(model)
        for optimizer in optimizers:
            optimizer.step()

    return {"model": model, "optimizers": optimizers}, step


def sparse() -> tuple[dict[str, Any], Callable[[], None]]:
    model = nn.Embedding(5, 2, sparse=True)
    optimizer = torch.optim.SparseAdam(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        model(torch.tensor([1, 2])).sum().backward()
        optimizer.step()

    return {"model": model, "optimizer": optimizer}, step


def alternating() -> tuple[dict[str, Any], Callable[[], None]]:
    """Of two layers of one group first one gets a gradient, then the other, then both."""
    layers = [nn.Linear(4, 1), nn.Linear(4, 1)]
    optimizer = torch.optim.SGD([*layers[0].parameters(), *layers[1].parameters()], 0.1)
    turns = iter([layers[:1], layers[1:]])

    def step() -> None:
        optimizer.zero_grad()
        for layer in next(turns, layers):
            layer(torch.rand(3, 4)).sum().backward()
        optimizer.step()

    return {"layers": layers, "optimizer": optimizer}, step


def unused_branch() -> tuple[dict[str, Any], Callable[[], None]]:
    """The first parameter of the group gets a gradient at the first step only."""
    model, extra = net(), nn.Linear(4, 4)
    optimizer = torch.optim.AdamW([*extra.parameters(), *model.parameters()])
    uses = iter([True])

    def step() -> None:
        optimizer.zero_grad()
        inputs = torch.rand(3, 4)
        model(extra(inputs) if next(uses, False) else inputs).sum().backward()
        optimizer.step()

    return {"model": model, "extra": extra, "optimizer": optimizer}, step


USUAL: dict[str, Loop] = {
    "AdamW": simple(torch.optim.AdamW),
    "SGD": simple(lambda p: torch.optim.SGD(p, 0.1)),
    "foreach": simple(lambda p: torch.optim.Adam(p, foreach=True)),
    "fused": simple(lambda p: torch.optim.Adam(p, fused=True)),
    "set to zero": simple(torch.optim.AdamW, set_to_none=False),
    "zeroed after": zeroed_after(),
    "zeroed after, to zero": zeroed_after(set_to_none=False),
    "clipped": clipped,
    "LBFGS": lbfgs,
    "frozen": frozen,
    "scaled": scaled(4.0),
    "GAN": gan,
    "SAM": wrapped,
    "an optimizer per parameter": one_per_parameter,
    "sparse": sparse,
    "unused branch": unused_branch,
    "alternating": alternating,
}


@pytest.fixture(params=USUAL.values(), ids=USUAL)
def loop(request: pytest.FixtureRequest) -> Iterator[Any]:
    torch.manual_seed(0)
    yield request.param()


def test_the_usual_loop_gives_no_alarm_at_any_step(loop: Any) -> None:
    state, step = loop
    assert accumulated_in(state) is None
    for _ in range(4):
        step()
        assert accumulated_in(state) is None


def first(state: dict[str, Any]) -> torch.optim.Optimizer:
    return state["optimizer"] if "optimizer" in state else state["optimizers"][0]


def test_a_backward_pass_after_the_step_is_seen_in_every_loop(loop: Any) -> None:
    state, step = loop
    for _ in range(2):
        step()
    for group in first(state).param_groups:
        for parameter in group["params"]:
            if parameter.requires_grad:
                parameter.sum().backward()
    assert accumulated_in(state) in ("state['optimizer']", "state['optimizers'][0]")


# --- what hides the parameter that is looked at ---------------------------------------------------


def test_a_layer_that_is_frozen_after_a_step_hides_no_accumulation() -> None:
    state, step = simple(torch.optim.Adam)()
    step()
    state["optimizer"].zero_grad()
    state["model"][0].requires_grad_(requires_grad=False)
    assert accumulated_in(state) is None
    backward(state["model"])
    assert accumulated_in(state) == "state['optimizer']"


def test_a_first_layer_that_gets_zeros_only_hides_no_accumulation() -> None:
    state, step = simple(lambda p: torch.optim.SGD(p, 0.1))()
    with torch.no_grad():  # a ReLU that lets nothing through
        state["model"][0].weight.zero_()
        state["model"][0].bias.fill_(-1)
        state["model"][2].bias.fill_(1)
    step()
    state["optimizer"].zero_grad()
    assert accumulated_in(state) is None
    backward(state["model"])
    assert not state["model"][0].weight.grad.any()
    assert accumulated_in(state) == "state['optimizer']"


class Holds:
    """Gives and takes the state of the optimizer in it."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.inner = optimizer

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.inner.load_state_dict(state)


def test_an_optimizer_in_a_wrapper_is_looked_at() -> None:
    state, step = simple(torch.optim.Adam)()
    held = {"model": state["model"], "optimizer": Holds(state["optimizer"])}
    step()
    assert accumulated_in(held) is None
    backward(state["model"])
    assert accumulated_in(held) == "state['optimizer']"


def test_the_optimizer_itself_is_named_before_what_holds_it() -> None:
    state, step = simple(torch.optim.Adam)()
    scheduler = torch.optim.lr_scheduler.StepLR(state["optimizer"], 1)
    step()
    backward(state["model"])
    state = {"warmup": Holds(state["optimizer"]), "scheduler": scheduler, **state}
    assert accumulated_in(state) == "state['optimizer']"
    assert accumulated_in({"scheduler": scheduler}) is None


# --- the first step -------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [torch.optim.Adam, lambda p: torch.optim.SGD(p, 0.1)])
def test_an_optimizer_that_stepped_before_anyone_watched_gives_no_alarm(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    state, step = simple(make)()
    step()
    monkeypatch.setattr(accumulation, "_watch", accumulation._Watch())  # as at a first import
    assert accumulated_in(state) is None
    newer, _ = simple(make)()
    backward(newer["model"])
    assert accumulated_in(newer) == "state['optimizer']"
    accumulation._watch.after_step(state["optimizer"], (), {})
    assert accumulated_in(state) is None
    backward(state["model"])
    assert accumulated_in(state) == "state['optimizer']"


Late = Callable[[Any], None]


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> Iterator[Late]:
    """Begin to watch now, the optimizers of a state only, as at a first import."""
    handles = []

    def begin(state: Any) -> None:
        own = {id(each) for each in state.get("optimizers", [state.get("optimizer")])}
        watch = accumulation._Watch()
        watch._stepped = {key: each for key, each in watch._stepped.items() if key in own}
        monkeypatch.setattr(accumulation, "_watch", watch)
        handles.append(register_optimizer_step_post_hook(watch.after_step))

    yield begin
    for handle in handles:
        handle.remove()


@pytest.mark.parametrize("before", range(3))
def test_the_usual_loop_gives_no_alarm_when_the_watch_begins_late(loop: Any, late: Late, before: int) -> None:
    state, step = loop
    for _ in range(before):
        step()
    late(state)
    assert accumulated_in(state) is None
    for _ in range(3):
        step()
        assert accumulated_in(state) is None


@pytest.mark.parametrize("zeros", [False, True])
def test_what_an_optimizer_without_gradients_accumulates_is_seen_by_a_younger_watch(
    late: Late, zeros: bool
) -> None:
    state, step = simple(torch.optim.Adam)()
    step()
    state["optimizer"].zero_grad(set_to_none=not zeros)
    late(state)
    assert accumulated_in(state) is None
    backward(state["model"])
    assert accumulated_in(state) == "state['optimizer']"


def test_what_comes_to_gradients_that_a_younger_watch_found_is_seen(late: Late) -> None:
    state, step = simple(torch.optim.Adam)()
    step()
    late(state)
    assert accumulated_in(state) is None
    backward(state["model"])
    assert accumulated_in(state) == "state['optimizer']"


def test_a_critic_that_stepped_just_before_the_watch_began_gives_no_alarm(late: Late) -> None:
    generator, critic = nn.Linear(4, 4), net()
    optimizers: list[torch.optim.Optimizer] = [torch.optim.Adam(p.parameters()) for p in (critic, generator)]
    state = {"critic": critic, "generator": generator, "optimizers": optimizers}
    backward(critic)
    optimizers[0].step()
    late(state)
    critic(generator(torch.rand(3, 4))).sum().backward()
    optimizers[1].step()
    assert accumulated_in(state) is None


def test_the_accumulation_after_a_restore_is_seen(late: Late, tmp_path: Path) -> None:
    state, step = simple(torch.optim.Adam)()
    step()
    ckptd.save(tmp_path / "c", state, step=1)
    late(state)
    apply_state(state, ckptd.load(tmp_path / "c"))
    assert accumulated_in(state) is None
    backward(state["model"])
    assert accumulated_in(state) == "state['optimizer']"


def test_an_optimizer_in_the_making_is_no_trouble_to_a_watch_that_begins() -> None:
    unfinished = torch.optim.Adam.__new__(torch.optim.Adam)
    assert id(unfinished) not in accumulation._Watch()._stepped


def test_before_the_first_step_every_gradient_counts() -> None:
    model = net()
    state = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), 0.1)}
    assert accumulated_in(state) is None
    state["optimizer"].zero_grad()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    assert accumulated_in(state) is None
    backward(model)
    assert accumulated_in(state) == "state['optimizer']"


def test_a_step_that_a_scaler_left_out_is_no_accumulation_also_the_first() -> None:
    torch.manual_seed(1)
    state, step = scaled(3e38)()
    for _ in range(2):
        step()
        assert any(not p.grad.isfinite().all() for p in state["model"].parameters())
        assert accumulated_in(state) is None


def test_a_step_that_a_scaler_left_out_after_others_is_no_accumulation() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for next_scale in (3e38, 4.0):
        optimizer.zero_grad()
        scaler.scale(model(torch.rand(3, 4)).square().sum()).backward()
        scaler.step(optimizer)
        scaler.update(next_scale)
        assert accumulated_in({"model": model, "optimizer": optimizer}) is None


def test_the_micro_batches_of_one_step_are_seen_each(tmp_path: Path) -> None:
    model = net()
    state = {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}
    seen = []
    for micro in range(1, 9):
        backward(model)
        if micro % 4 == 0:
            state["optimizer"].step()
            state["optimizer"].zero_grad()
        seen.append(accumulated_in(state) is not None)
    assert seen == [True, True, True, False] * 2


# --- what it looks at -----------------------------------------------------------------------------


def accumulating() -> dict[str, Any]:
    model = net()
    backward(model)
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), 0.1)}


def test_save_says_which_gradients_it_leaves_out_at_the_callers_line_once_it_is_done(tmp_path: Path) -> None:
    state = accumulating()
    with pytest.warns(CheckpointWarning, match=r"state\['optimizer'\] has gradients accumulated") as said:
        saved = ckptd.save(tmp_path / "c", state, step=1)
    assert said[0].filename == __file__
    ckptd.verify(saved)
    ckptd.save(tmp_path / "whole", {**state, "gradients": ckptd.Gradients(state["model"])}, step=1)
    with pytest.raises(CheckpointWarning):  # as everywhere in these tests, warnings are errors
        ckptd.save(tmp_path / "d", state, step=1)
    ckptd.verify(tmp_path / "d")


def test_gradients_that_are_in_the_state_are_not_lost() -> None:
    state = accumulating()
    assert accumulated_in({**state, "gradients": ckptd.Gradients(state["model"])}) is None
    assert accumulated_in({"all": [state, {"g": ckptd.Gradients(state["model"].parameters())}]}) is None
    assert accumulated_in({**state, "gradients": ckptd.Gradients(net())}) == "state['optimizer']"


def test_gradients_of_a_part_alone_leave_the_others_out() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    backward(model)
    optimizer.step()
    backward(model)
    for part in (model[0], model[2]):
        assert accumulated_in({"optimizer": optimizer, "gradients": ckptd.Gradients(part)}) is not None
    assert accumulated_in({"optimizer": optimizer, "gradients": ckptd.Gradients(model)}) is None


def test_a_new_optimizer_over_what_is_thawed_gives_no_alarm_right_after_its_step() -> None:
    model = net()
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model[2].parameters(), 0.1)
    for number in range(6):
        if number == 3:
            model[0].requires_grad_(True)
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
        optimizer.zero_grad()
        backward(model)
        optimizer.step()
        assert accumulated_in({"model": model, "optimizer": optimizer}) is None
    backward(model)
    assert accumulated_in({"model": model, "optimizer": optimizer}) is not None


def test_a_state_without_an_optimizer_accumulates_nothing() -> None:
    assert accumulated_in({"model": accumulating()["model"]}) is None


def test_a_long_list_of_losses_is_not_looked_through() -> None:
    class Counted(list[float]):
        looked = 0

        def __iter__(self) -> Iterator[float]:
            Counted.looked += 1
            return super().__iter__()

    assert accumulated_in({"losses": Counted([0.5] * 100_000)}) is None
    assert Counted.looked == 0


def test_another_parameter_at_the_address_of_one_that_is_gone_has_no_note() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    backward(model)
    optimizer.step()
    probe = next(model.parameters())
    note = accumulation._watch._notes[id(probe)]
    assert list(accumulation._watch.noted([probe])) == [(probe, note)]
    other = nn.Parameter(torch.ones(1))
    accumulation._watch._notes[id(other)] = note
    assert list(accumulation._watch.noted([other])) == []


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.complex64])
def test_gradients_of_every_dtype_are_looked_at(dtype: torch.dtype) -> None:
    parameter = nn.Parameter(torch.ones(3, dtype=dtype))
    state = {"optimizer": torch.optim.SGD([parameter], 0.1)}
    parameter.grad = torch.ones(3, dtype=dtype)
    assert accumulated_in(state) is not None


def test_a_group_that_is_frozen_is_not_searched_at_every_step_and_found_when_it_no_longer_is() -> None:
    class Counted(list[Any]):
        looked = 0

        def __iter__(self) -> Iterator[Any]:
            Counted.looked += 1
            return super().__iter__()

    layer, head = nn.Linear(4, 4), nn.Linear(4, 1)
    optimizer = torch.optim.SGD([{"params": layer.parameters()}, {"params": head.parameters()}], 0.1)
    watch = accumulation._Watch()
    optimizer.param_groups[0]["params"] = Counted(layer.parameters())
    head(torch.rand(2, 4)).sum().backward()
    for _ in range(60):
        watch.after_step(optimizer, (), {})
    assert Counted.looked == 1
    head(layer(torch.rand(2, 4))).sum().backward()
    for _ in range(60):
        watch.after_step(optimizer, (), {})
    assert [id(each) for each, _ in watch.noted(layer.parameters())] == [id(layer.weight), id(layer.bias)]


# --- it leaves things alone -----------------------------------------------------------------------


def test_no_gradient_and_no_optimizer_is_kept_alive() -> None:
    state, step = simple(torch.optim.AdamW)()
    step()
    grads = [weakref.ref(p.grad) for p in state["model"].parameters()]
    state["optimizer"].zero_grad()
    gc.collect()
    assert [grad() for grad in grads] == [None] * 4
    optimizer, model = weakref.ref(state["optimizer"]), weakref.ref(state["model"])
    del step
    state.clear()
    gc.collect()
    assert (optimizer(), model()) == (None, None)


def test_notes_of_what_is_gone_are_dropped() -> None:
    watch = accumulation._Watch()
    watch._stepped.clear()  # optimizers of other tests may be alive still
    watch._notes.clear()

    def stepped() -> nn.Parameter:
        parameter = nn.Parameter(torch.ones(1))
        parameter.grad = torch.ones(1)
        watch.after_step(torch.optim.SGD([parameter]), (), {})
        return parameter

    kept = [stepped() for _ in range(20)]
    note = watch._notes[id(kept.pop())]
    watch._notes.update((-number, note) for number in range(2000))  # its parameter is gone
    kept.append(stepped())
    assert len(watch._notes) == 20
    assert len(watch._stepped) == 1


def test_an_optimizer_is_the_same_with_it_and_without() -> None:
    state, step = simple(torch.optim.AdamW)()
    before = set(vars(state["optimizer"]))
    step()
    optimizer = state["optimizer"]
    assert set(vars(optimizer)) <= before | {"_opt_called"}
    assert not optimizer._optimizer_step_post_hooks
    assert copy.deepcopy(optimizer).state_dict()["param_groups"] == optimizer.state_dict()["param_groups"]
    assert b"ckptd" not in pickle.dumps(optimizer)


def test_optimizers_that_step_in_several_threads_disturb_nobody() -> None:
    failures: list[BaseException] = []

    def train() -> None:
        try:
            for _ in range(60):
                _, step = simple(lambda p: torch.optim.SGD(p, 0.1))()
                step()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=train) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_gradients_that_count_no_changes_do_not_fail_the_step() -> None:
    parameter = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([parameter], 0.1)
    with torch.inference_mode():
        parameter.grad = torch.ones(3)
        optimizer.step()
    assert parameter.detach().tolist() == torch.full((3,), 0.9).tolist()


def test_a_parameter_that_is_no_leaf_any_more_is_not_asked_for_its_gradient() -> None:
    parameter = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([parameter], 0.1)
    optimizer.param_groups[0]["params"][0] = parameter * 2  # as a differentiable step leaves it
    accumulation._watch.after_step(optimizer, (), {})
    assert accumulated_in({"optimizer": optimizer}) is None


def test_what_is_thawed_after_steps_without_any_gradient_gives_no_alarm_of_a_step_that_used_it() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    optimizer.step()  # all frozen
    backward(model)
    optimizer.step()
    assert accumulated_in({"optimizer": optimizer}) is None


def test_gradients_that_the_state_has_are_not_read_at_each_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    backward(model)
    optimizer.step()
    backward(model)
    read: list[torch.Tensor] = []
    kept = accumulation._values
    monkeypatch.setattr(accumulation, "_values", lambda grad: read.append(grad) or kept(grad))
    state = {"model": model, "optimizer": optimizer, "gradients": ckptd.Gradients(model)}
    assert accumulated_in(state) is None and read == []
    assert accumulated_in({"optimizer": optimizer}) == "state['optimizer']" and read


COMPILED = """
import torch
import ckptd.tensors.accumulation as accumulation
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
step = torch.compile(lambda: optimizer.step(), backend="eager")
for number in range(3):
    optimizer.zero_grad()
    model(torch.ones(1, 2)).sum().backward()
    step()
    assert accumulation.accumulated_in({"optimizer": optimizer}) is None
assert accumulation._watch.blind
"""


@pytest.mark.slow
def test_a_compiled_step_gives_no_alarm() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", COMPILED],
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stderr
