"""Each snapshot is laid out and copied anew: whatever became of a tensor since the last one is in the next."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from ckptd.tensors.capture import capture, copy_into
from ckptd.tensors.copying import copy_tensors
from slot_contents import stored

State = dict[str, Any]


def fresh() -> State:
    torch.manual_seed(3)
    return {
        "a": torch.arange(12.0).reshape(3, 4),
        "b": torch.arange(12.0, 24.0).reshape(3, 4),
        "p": nn.Parameter(torch.ones(5)),
        "large": torch.randn(300, 200),
        "list": [torch.ones(2), torch.zeros(2)],
        "losses": [0.5] * 100,
    }


def tie(state: State) -> None:
    state["b"] = state["a"]


def tie_by_data(state: State) -> None:
    state["b"].data = state["a"].data


def resize(state: State) -> None:
    state["a"].resize_(2, 3)


def transpose(state: State) -> None:
    state["a"].t_()


def turn(state: State) -> None:
    state["large"].data = state["large"].data.t()


def stride(state: State) -> None:
    state["large"].data = torch.randn(300, 400)[:, ::2]


def swap_dtype(state: State) -> None:
    state["a"].data = torch.arange(12, dtype=torch.int32).view(torch.float32).reshape(3, 4)


def another_dtype(state: State) -> None:
    state["a"] = torch.arange(12).reshape(3, 4)


def train(state: State) -> None:
    state["a"].requires_grad_()


def freeze(state: State) -> None:
    state["p"].requires_grad_(requires_grad=False)


def no_parameter(state: State) -> None:
    state["p"] = state["p"].detach()


def reorder(state: State) -> None:
    state["a"], state["b"] = state.pop("b"), state.pop("a")


def rename(state: State) -> None:
    state["c"] = state.pop("a")


def add(state: State) -> None:
    state["list"].append(torch.ones(3))


def remove(state: State) -> None:
    state["list"].pop(0)


def move_memory(state: State) -> None:
    state["large"].set_(torch.randn(300, 200))


def write(state: State) -> None:
    state["large"][299, 199] += 1
    state["a"][0, 0] = -1


def become_data(state: State) -> None:
    state["b"] = [1, 2]


def grow(state: State) -> None:
    state["losses"].append(1.5)


CHANGES: list[Callable[[State], None]] = [
    tie, tie_by_data, resize, transpose, turn, stride, swap_dtype, another_dtype, train, freeze, no_parameter, reorder,
    rename, add, remove, move_memory, write, become_data, grow,
]  # fmt: skip


def tensors_in(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [tensor for item in items for tensor in tensors_in(item)]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_whatever_changed_since_the_last_snapshot_is_in_the_next(change: Callable[[State], None]) -> None:
    state = fresh()
    before = capture(state, rng=False)
    buffer = bytearray(max(before.data_bytes, 1_000_000))
    copy_into(before, memoryview(buffer))
    change(state)
    captured, anew = capture(state, rng=False), capture(rebuilt(state), rng=False)
    copy_into(captured, memoryview(buffer))
    assert (captured.tensors, captured.state, captured.data_bytes) == (
        anew.tensors,
        anew.state,
        anew.data_bytes,
    )
    live = tensors_in(state)
    assert len(live) == len(captured.tensors)
    for number, tensor in enumerate(live):
        kept = stored(captured, number, buffer)
        assert kept.dtype == tensor.dtype and torch.equal(kept, tensor)
    after = capture(state, rng=False)
    copy_into(after, memoryview(buffer))
    assert after.tensors == captured.tensors


def rebuilt(state: State) -> State:
    """The same state in containers that nobody has seen before."""
    return {name: list(value) if isinstance(value, list) else value for name, value in state.items()}


def test_a_lazy_view_is_never_copied_as_it_lies_in_memory() -> None:
    tensor = torch.randn(200, 300, dtype=torch.complex64)
    rows = capture({"t": tensor}, rng=False).tensors
    with pytest.raises(RuntimeError):
        copy_tensors(rows, [tensor.conj()], memoryview(bytearray(rows[0].nbytes)))


def test_no_collection_begins_while_a_state_is_walked() -> None:
    state = {"tensors": [torch.zeros(1) for _ in range(5000)]}
    began: list[str] = []

    def note(phase: str, info: dict[str, int]) -> None:
        began.append(phase)

    class Asks:
        """Ends the walk: what is noted comes from before."""

        def state_dict(self) -> dict[str, int]:
            return {"collections": len(began)}

        def load_state_dict(self, state: dict[str, int]) -> None: ...

    gc.collect()
    gc.callbacks.append(note)
    try:
        captured = capture({**state, "last": Asks()}, rng=False)
    finally:
        gc.callbacks.remove(note)
    assert captured.state["last"] == {"collections": 0}
    assert gc.isenabled()


def test_a_collector_that_is_off_stays_off_and_one_that_is_on_comes_on_again_after_an_error() -> None:
    gc.disable()
    try:
        capture({"t": torch.ones(1)})
        assert not gc.isenabled()
    finally:
        gc.enable()
    with pytest.raises(Exception, match="can't be stored"):
        capture({"f": open})
    assert gc.isenabled()
