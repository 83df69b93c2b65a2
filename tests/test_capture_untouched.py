"""Capturing a state changes nothing of it, draws from no generator, starts no CUDA, and reads the generators first."""

from __future__ import annotations

import random
import warnings
from collections import Counter, OrderedDict, defaultdict, deque
from pathlib import Path
from types import FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import ckptd
from ckptd.tensors.capture import capture, copy_into
from ckptd.tensors.foreseeing import foresee
from round_trip import same, through_disk

_LEAVES = (str, bytes, int, float, complex, bool, type(None), type, FunctionType, MethodType, ModuleType)


def looks(value: Any, seen: dict[int, int] | None = None) -> Any:
    """All there is to see of a live object: identities, values, versions, grads, flags, generator states."""
    seen = {} if seen is None else seen
    if isinstance(value, _LEAVES):
        return repr(value)
    if id(value) in seen:
        return ("again", seen[id(value)])
    seen[id(value)] = len(seen)
    return (id(value), type(value), *_inside(value, seen))


def _inside(value: Any, seen: dict[int, int]) -> tuple[Any, ...]:
    if isinstance(value, torch.Tensor):
        return _of_tensor(value, seen)
    if isinstance(value, np.ndarray):
        return (value.tobytes(), value.flags.writeable, value.dtype, value.shape, value.strides)
    if isinstance(value, torch.Generator):
        return (value.get_state().tolist(),)
    if isinstance(value, np.random.Generator):
        return (repr(value.bit_generator.state),)
    if isinstance(value, (np.random.RandomState, random.Random)):
        return (repr(value.get_state() if isinstance(value, np.random.RandomState) else value.getstate()),)
    items: list[Any] = []
    for name, item in sorted(getattr(value, "__dict__", {}).items()):
        items.append((name, looks(item, seen)))
    if isinstance(value, dict):
        items += [(looks(key, seen), looks(item, seen)) for key, item in value.items()]
    elif isinstance(value, (list, tuple, deque)):
        items += [looks(item, seen) for item in value]
    elif isinstance(value, (set, frozenset)):
        items += sorted(map(repr, value))
    return tuple(items)


def _of_tensor(value: torch.Tensor, seen: dict[int, int]) -> tuple[Any, ...]:
    flags = (
        value.requires_grad,
        value.is_leaf,
        value.is_conj(),
        value.is_shared(),
        repr(type(value.grad_fn)),
    )
    memory = (
        value.data_ptr(),
        value.storage_offset(),
        value.stride(),
        value.shape,
        value.dtype,
        value.device,
    )
    held = bytes(value.untyped_storage()) if value.numel() else b""
    version = None if value.is_inference() else value._version
    grad = looks(value.grad, seen) if value.is_leaf else None
    return (flags, memory, held, version, grad, looks(vars(value), seen) if vars(value) else None)


class Own:
    """Keeps a dict that its state_dict() gives away."""

    def __init__(self) -> None:
        self.state = {"list": [1, [2]], "t": torch.ones(2), "np": np.arange(3), "d": defaultdict(list, a=[1])}

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


def job() -> dict[str, Any]:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout(0.5))
    groups = [{"params": [model[0].weight]}, {"params": [model[0].bias, *model[1].parameters()], "lr": 0.5}]
    optimizer = torch.optim.AdamW(groups, amsgrad=True)
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    warm = torch.optim.lr_scheduler.LinearLR(optimizer)
    scheduler = torch.optim.lr_scheduler.SequentialLR(
        optimizer, [warm, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 9)], [2]
    )
    for _ in range(2):
        model(torch.randn(4, 3)).sum().backward()
        optimizer.step()
        averaged.update_parameters(model)
        with warnings.catch_warnings():  # torch 2.6's SequentialLR steps in a way that 2.6 deprecates
            warnings.filterwarnings("ignore", message=".*epoch parameter in `scheduler.step")
            scheduler.step()
    base = torch.arange(40.0)
    with torch.inference_mode():
        inference = torch.ones(2)
    return {
        "model": model, "optimizer": optimizer, "ema": averaged, "scheduler": scheduler, "own": Own(),
        "scaler": torch.amp.GradScaler("cpu"), "empty": torch.optim.SGD(nn.Linear(1, 1).parameters()),
        "t": [base, base[::3], base.view(4, 10).t(), base[:4].expand(2, 4), (base * 2).requires_grad_()[1:],
              torch.complex(base, base).conj(), torch.complex(base, base).conj().imag, inference, base[:0],
              torch.ones(2).share_memory_()],
        "np": [np.arange(6.0)[::2], np.arange(6).reshape(2, 3).T, np.broadcast_to(np.arange(2), (3, 2)), np.float32(1)],
        "g": [torch.Generator(), np.random.default_rng(1), np.random.RandomState(2), random.Random(3)],
        "plain": [{"__ckptd__": 1}, OrderedDict(a=1), Counter("aab"), deque([1], 3), {1}, bytearray(b"x"), [0.5] * 99],
    }  # fmt: skip


def globals_now() -> Any:
    return (repr(random.getstate()), repr(np.random.get_state()), torch.get_rng_state().tolist())


def test_everything_is_as_it_was_after_a_capture_and_its_copy() -> None:
    state = job()
    before, generators = looks(state), globals_now()
    captured = capture(state)
    copy_into(captured, np.empty(captured.data_bytes, np.uint8))
    foresee(state)
    assert looks(state) == before
    assert globals_now() == generators


def test_everything_is_as_it_was_after_a_save_and_after_a_refused_one(tmp_path: Path) -> None:
    state = job()
    before, generators = looks(state), globals_now()
    ckptd.save(tmp_path / "c", state, step=1)
    with pytest.raises(ckptd.CkptdError):
        ckptd.save(tmp_path / "d", {**state, "z": [object()]}, step=1)
    assert looks(state) == before
    assert globals_now() == generators


@pytest.mark.slow
def test_the_look_notices_what_a_capture_could_spoil() -> None:
    """The test above sees each of these."""
    spoilers = {
        "version": lambda s: s["model"][0].weight.data.add_(0) is s["t"][0].add_(0),
        "requires_grad": lambda s: s["model"][0].weight.requires_grad_(False),
        "grad": lambda s: s["optimizer"].zero_grad(),
        "identity": lambda s: s["own"].state.update(list=[1, [2]]),
        "order": lambda s: s["plain"][1].move_to_end("a") or s["own"].state.update(t=s["own"].state.pop("t")),
        "group": lambda s: s["optimizer"].param_groups[0].update(new=1),
        "attribute": lambda s: setattr(s["model"], "new", 1),
        "generator": lambda s: torch.rand(1, generator=s["g"][0]),
        "numpy": lambda s: s["g"][1].random(),
        "flags": lambda s: setattr(s["np"][0].flags, "writeable", False),
        "conj": lambda s: s["t"].__setitem__(5, s["t"][5].resolve_conj()),
        "shared": lambda s: s["model"][0].bias.data.share_memory_() is s["t"][0].share_memory_(),
        "default": lambda s: s["own"].state["d"]["new"],
    }
    for name, spoil in spoilers.items():
        state = job()
        before = looks(state)
        assert looks(state) == before
        spoil(state)  # type: ignore[no-untyped-call]
        assert looks(state) != before, name


class Draws:
    """A state_dict() that uses random numbers, as augmentations and samplers do."""

    def state_dict(self) -> Any:
        return {"x": (torch.rand(1).item(), np.random.rand(), random.random())}

    def load_state_dict(self, state: Any) -> None:
        self.loaded = state


def test_the_generators_are_those_before_any_state_dict_drew_from_them(tmp_path: Path) -> None:
    torch.manual_seed(1)
    np.random.seed(1)
    random.seed(1)
    wanted = ckptd.capture_rng_state()
    loaded = through_disk(tmp_path, {"first": Draws(), "inner": [Draws(), {"x": Draws()}]})
    assert same(loaded["rng"], wanted)
    ckptd.restore_rng_state(loaded["rng"])
    assert loaded["first"]["x"] == (torch.rand(1).item(), np.random.rand(), random.random())


def test_no_cuda_is_started_by_asking(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a host with devices that the process hasn't used: the first touch would start a context on each."""

    def started() -> None:
        raise AssertionError("CUDA was started")

    if torch.cuda.is_initialized():
        pytest.skip("this process uses CUDA already")
    state = job() | {"device": torch.device("cuda:1")}  # its optimizer asks is_available() itself
    for module in (torch.cuda, torch.cuda.random):
        monkeypatch.setattr(module, "_lazy_init", started)
        monkeypatch.setattr(module, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(AssertionError):
        torch.cuda.get_rng_state_all()
    loaded = through_disk(tmp_path, state)
    assert loaded["rng"]["cuda"] == []
    ckptd.capture_rng_state()
    foresee(state)
