"""Field case 23: schedules over rates that are numbers, float32 or float64 tensors go on the same from every cut."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import ckptd
from ckptd.errors import CheckpointWarning
from ckptd.tensors.restoring import apply_state
from schedule_bundle import STEPS, Bundle
from sweep_trace import differences

pytestmark = [
    pytest.mark.filterwarnings(
        "ignore:The epoch parameter:UserWarning"
    ),  # by SequentialLR itself in torch 2.6
    pytest.mark.filterwarnings("ignore:Detected call of:UserWarning"),  # restored after its first step
]
RATES = {
    "numbers": (None, False),
    "float32": (torch.float32, False),
    "float64": (torch.float64, False),
    "one tensor": (torch.float32, True),
}


class Whole:
    """All schedules run uninterrupted, with a checkpoint at each step."""

    def __init__(self, folder: Path, rates: torch.dtype | None, one: bool) -> None:
        self.folder, self.rates, self.one, self.but = folder, rates, one, frozenset[str]()
        if rates is not None:  # torch 2.6 puts a number where the tensor was: see the test of that
            (probe := self.make()).run(STEPS)
            self.but = probe.turned()
        bundle = self.make()
        self.trace, self.told = {0: bundle.shown()}, {0: bundle.told()}
        self.save(bundle)
        for step in range(1, STEPS + 1):
            self.trace |= bundle.run(step)
            self.told[step] = bundle.told()
            self.save(bundle)
        self.last = bundle

    def make(self) -> Bundle:
        return Bundle(self.rates, one=self.one, but=self.but)

    def save(self, bundle: Bundle, name: str = "") -> Path:
        return ckptd.save(self.folder / (name or str(bundle.step)), bundle.state(), step=bundle.step)

    def restore(
        self, bundle: Bundle, cut: int, path: Path | None = None, *, schedulers_first: bool = False
    ) -> None:
        """Restore, and see that every group is as it was uninterrupted, over the very tensors that it had."""
        held = _rates(bundle)
        apply_state(
            bundle.state(schedulers_first=schedulers_first), ckptd.load(path or self.folder / str(cut))
        )
        bundle.step = cut
        found = bundle.told()
        assert found == self.told[cut], f"restored at {cut}: {differences(found, self.told[cut])}"
        assert all(
            now is then for now, then in zip(_rates(bundle), held, strict=True) if torch.is_tensor(then)
        )

    def go_on(self, bundle: Bundle, until: int = STEPS) -> None:
        cut = bundle.step
        for step, shown in bundle.run(until).items():
            assert {
                name: (shown[name], wanted)
                for name, wanted in self.trace[step].items()
                if shown[name] != wanted
            } == {}, f"cut at {cut}, at step {step}"


def _rates(bundle: Bundle) -> list[Any]:
    return [group["lr"] for optimizer in bundle.optimizers.values() for group in optimizer.param_groups]


@pytest.fixture(scope="module", params=RATES)
def whole(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Whole:
    return Whole(tmp_path_factory.mktemp(request.param), *RATES[request.param])


def test_every_schedule_moves_its_rates(whole: Whole) -> None:
    for name in whole.trace[0]:
        assert len({str(shown[name]) for shown in whole.trace.values()}) > 1, name
    assert {name.split()[0] for name in whole.but} <= {"ReduceLROnPlateau"}


@pytest.mark.slow
def test_the_trace_is_the_uninterrupted_one_from_every_cut_in_either_order(whole: Whole) -> None:
    for cut in range(STEPS):
        bundle = whole.make()
        whole.restore(bundle, cut, schedulers_first=cut % 2 == 1)
        whole.go_on(bundle)


@pytest.mark.slow
def test_the_trace_is_the_uninterrupted_one_after_two_interruptions(whole: Whole) -> None:
    for first, second in ((0, 1), (2, 4), (3, 8), (6, 11)):
        bundle = whole.make()
        whole.restore(bundle, first, schedulers_first=first % 2 == 0)
        whole.go_on(bundle, second)
        path = whole.save(bundle, f"{first} {second}")
        bundle = whole.make()
        whole.restore(bundle, second, path)
        whole.go_on(bundle)


@pytest.mark.slow
def test_the_same_objects_go_back_and_on_again_in_one_process(whole: Whole) -> None:
    for cut in (12, 3, 7, 0, 5):
        whole.restore(whole.last, cut, schedulers_first=cut % 2 == 1)
        whole.go_on(whole.last, min(cut + 6, STEPS))


def test_a_rate_that_torch_turns_into_a_number_goes_back_into_its_tensor_and_rounding_is_said(
    tmp_path: Path,
) -> None:
    """ReduceLROnPlateau of torch 2.6 does so; a script may as well."""

    def make(dtype: torch.dtype) -> dict[str, Any]:
        optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=torch.tensor(0.1, dtype=dtype))
        return {"scheduler": lr_scheduler.ReduceLROnPlateau(optimizer, patience=0), "optimizer": optimizer}

    for dtype in (torch.float64, torch.float32):
        saved, live = make(dtype), make(dtype)
        held = live["optimizer"].param_groups[0]["lr"]
        saved["optimizer"].param_groups[0]["lr"] = rate = float(torch.tensor(0.1, dtype=dtype)) * 0.1
        path = ckptd.save(tmp_path / str(dtype), saved, step=1)
        if dtype is torch.float64:
            apply_state(live, ckptd.load(path))
            assert held.item() == rate
        else:
            with pytest.warns(CheckpointWarning, match=r"\['param_groups'\]\[0\]\['lr'\]: .* was stored"):
                apply_state(live, ckptd.load(path))
        assert live["optimizer"].param_groups[0]["lr"] is held
