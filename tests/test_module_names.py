"""Wrapping or compiling a module changes no name in a checkpoint, and a checkpoint fits it wrapped or not."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ckptd.tensors.module_names import canonical_state_dict, match_text, named_parameters
from ckptd.tensors.optim import name_parameters
from ckptd.tensors.restoring import apply_state
from round_trip import same, through_disk

Wrap = Callable[[nn.Module], nn.Module]


@pytest.fixture(scope="module", autouse=True)
def _group_of_one(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    file = tmp_path_factory.mktemp("gloo") / "init"
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def make() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Sequential(nn.Linear(3, 1)))


def ddp(module: nn.Module) -> nn.Module:
    return nn.parallel.DistributedDataParallel(module)


def compiled(module: nn.Module) -> nn.Module:
    return torch.compile(module, backend="eager")  # type: ignore[return-value]


def compiled_inside(module: nn.Module) -> nn.Module:
    module[0] = compiled(module[0])  # type: ignore[index]
    module[2][0] = compiled(module[2][0])  # type: ignore[operator,index]
    return module


WRAPS: dict[str, Wrap] = {
    "bare": lambda m: m,
    "dp": nn.DataParallel,
    "ddp": ddp,
    "compiled": compiled,
    "ddp of compiled": lambda m: ddp(compiled(m)),
    "compiled ddp": lambda m: compiled(ddp(m)),
    "compiled inside": compiled_inside,
    "ddp, compiled inside": lambda m: ddp(compiled_inside(m)),
    "compiled twice": lambda m: compiled(nn.DataParallel(compiled(m))),
}


@pytest.mark.parametrize("name", WRAPS)
def test_a_wrapped_module_has_the_names_of_the_bare_one(name: str) -> None:
    bare, wrapped = make(), WRAPS[name](make())
    state = canonical_state_dict(wrapped)
    assert list(state) == list(bare.state_dict())
    assert list(state._metadata.items()) == list(bare.state_dict()._metadata.items())  # type: ignore[attr-defined]
    assert [key for key, _ in named_parameters(wrapped)] == [key for key, _ in bare.named_parameters()]
    assert list(name_parameters({"m": wrapped}).values()) == [
        f"m.{key}" for key, _ in bare.named_parameters()
    ]


@pytest.mark.parametrize("saved", WRAPS)
def test_a_checkpoint_fits_however_the_live_module_is_wrapped(saved: str, tmp_path: Path) -> None:
    def state(wrap: Wrap) -> dict[str, Any]:
        model = make()
        optimizer = torch.optim.Adam(model.parameters())
        model(torch.randn(4, 2)).sum().backward()
        optimizer.step()
        return {"model": wrap(model), "optimizer": optimizer}

    before = state(WRAPS[saved])
    wanted = canonical_state_dict(before["model"])
    moments = [entry["exp_avg"].clone() for entry in before["optimizer"].state.values()]
    for name, wrap in WRAPS.items():
        after = state(wrap)
        apply_state(after, through_disk(tmp_path / name, before))
        assert same(canonical_state_dict(after["model"]), wanted), name
        seen = [entry["exp_avg"] for entry in after["optimizer"].state.values()]
        assert same(seen, moments), name


def test_an_attribute_that_the_user_called_module_keeps_its_name() -> None:
    ema = torch.optim.swa_utils.AveragedModel(ddp(make()))
    assert list(canonical_state_dict(ema))[:2] == ["n_averaged", "module.0.weight"]
    holder = nn.Module()
    holder.module = make()
    holder._orig_mod = compiled(make())
    assert {key.split(".")[0] for key in canonical_state_dict(holder)} == {"module", "_orig_mod"}
    assert "_orig_mod.0.weight" in canonical_state_dict(holder)


def test_names_that_would_become_one_stay_apart() -> None:
    class Own(nn.DataParallel[nn.Module]):
        def __init__(self, module: nn.Module) -> None:
            super().__init__(module)
            self.weight = nn.Parameter(torch.zeros(1))

    state = canonical_state_dict(Own(nn.Linear(1, 1)))
    assert list(state) == ["weight", "module.weight", "module.bias"]


def test_a_state_of_another_kind_is_given_as_it_is() -> None:
    class Own(nn.DataParallel[nn.Module]):
        def state_dict(self, *args: Any, **kwargs: Any) -> Any:
            return ["mine"]

    assert canonical_state_dict(Own(nn.Linear(1, 1))) == ["mine"]


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod."])
@pytest.mark.parametrize("name", ["bare", "ddp", "compiled"])
def test_a_foreign_checkpoint_with_the_prefixes_in_its_text_fits(prefix: str, name: str) -> None:
    source, live = make(), WRAPS[name](make())
    stored = OrderedDict((prefix + key, value.clone()) for key, value in source.state_dict().items())
    apply_state({"model": live}, {"model": stored}, only=["model"])
    assert same(list(live.state_dict().values()), list(source.state_dict().values()))


def test_the_text_counts_only_when_it_matches_one_to_one_and_the_names_dont() -> None:
    assert match_text(["a", "b"], ["a", "b"]) is None
    assert match_text(["a", "b"], ["module.a", "module.b"]) == {"module.a": "a", "module.b": "b"}
    assert match_text(["module.a"], ["a"]) == {"a": "module.a"}
    assert match_text(["a", "b"], ["module.a", "a"]) is None
    assert match_text(["a", "module.a"], ["_orig_mod.a", "b"]) is None
    assert match_text(["a", "b"], ["a", "module.c"]) is None
    assert match_text(["a", "b"], ["module.a", "n"]) == {"module.a": "a", "n": "n"}
    assert match_text(["a"], ["modules.a"]) is None
    assert match_text(["a"], [1]) is None
