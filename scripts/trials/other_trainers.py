"""Trainers with a loop of their own, as others.py compares them: a small real model, saved after steps 1 and 2.

What a resume loaded is compared, before the next step, with what a run that was never interrupted has there: weights,
optimizer, step of the schedule. Random numbers aren't looked at.
"""

from __future__ import annotations

import copy
import logging
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from other_tool import Tool, tell

_STEPS = 3  #: of a whole run; the third is never made


class _Enough(BaseException):
    """Ends a run that has been looked at."""


def _picture(model: torch.nn.Module, optimizer: Any, schedule: Any) -> dict[str, Any]:
    parts = {"model": model.state_dict(), "optimizer": optimizer.state_dict()["state"]}
    return {**copy.deepcopy(parts), "schedule": schedule and schedule.last_epoch}


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    return bool(one == other)


class Trained(Tool):
    """A tool that trains by itself."""

    def __init__(self) -> None:
        self._wanted: dict[int, dict[str, Any]] = {}

    def _run(
        self, at_step: Callable[[int, dict[str, Any]], None], ended: Callable[[int], None], **how: Any
    ) -> None:
        """Train, calling at_step before each step with how many were made, ended after each before it is saved."""
        raise NotImplementedError

    def save(self, folder: Path) -> None:
        def at_step(done: int, seen: dict[str, Any]) -> None:
            if done:
                tell(folder, "acked", done)
            if done == _STEPS - 1:
                raise _Enough

        try:
            self._run(at_step, lambda done: tell(folder, "begun", done), into=folder)
        except _Enough:
            return

    def _uninterrupted(self) -> dict[int, dict[str, Any]]:
        if not self._wanted:
            self._run(self._wanted.__setitem__, lambda done: None)
        return self._wanted

    def _resumed(self, **how: Any) -> str:
        """The step that a resume goes on after, if it has all that this step's checkpoint should have."""
        wanted, said = self._uninterrupted(), []

        def at_step(done: int, seen: dict[str, Any]) -> None:
            said.append("none" if done == 0 else str(done) if _same(seen, wanted[done]) else "wrong")
            raise _Enough

        try:
            self._run(at_step, lambda done: None, **how)
        except _Enough:
            return said[0]
        return "wrong"  # it took itself for finished

    def load_one(self, path: Path) -> str:
        return self._resumed(source=str(path))


class HfTrainer(Trained):
    about = "Hugging Face `Trainer(save_steps=1, save_total_limit=1)`"
    packages, pattern = ("transformers", "accelerate", "torch"), "checkpoint-*"

    def resume(self, folder: Path) -> str:
        from transformers.trainer_utils import get_last_checkpoint

        source = get_last_checkpoint(str(folder))
        return "none" if source is None else self._resumed(source=source)

    def _run(
        self, at_step: Callable[[int, dict[str, Any]], None], ended: Callable[[int], None],
        into: Path | None = None, source: str | None = None,
    ) -> None:  # fmt: skip
        from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

        class Watch(TrainerCallback):  # type: ignore[misc]
            def on_step_begin(self, args: Any, state: Any, control: Any, **now: Any) -> None:
                seen = _picture(now["model"], now["optimizer"].optimizer, now["lr_scheduler"])
                at_step(state.global_step, seen)

            def on_step_end(self, args: Any, state: Any, control: Any, **now: Any) -> None:
                ended(state.global_step)

        torch.manual_seed(0)
        size = GPT2Config(n_layer=1, n_head=1, n_embd=32, vocab_size=128, n_positions=16)
        rows = [{"input_ids": [at % 128] * 8, "labels": [at % 128] * 8} for at in range(8 * _STEPS)]
        with tempfile.TemporaryDirectory() as elsewhere:
            arguments = TrainingArguments(
                output_dir=str(into or elsewhere), max_steps=_STEPS, save_strategy="steps" if into else "no",
                save_steps=1, save_total_limit=1, logging_strategy="no", report_to="none", disable_tqdm=True,
                use_cpu=True, dataloader_pin_memory=False,
            )  # fmt: skip
            trainer = Trainer(GPT2LMHeadModel(size), arguments, train_dataset=rows, callbacks=[Watch()])  # type: ignore[arg-type]
            trainer.train(resume_from_checkpoint=source)


class LightningTrainer(Trained):
    """TMPDIR is on another file system: what Lightning writes there is then copied to its place."""

    about = "Lightning `Trainer`, `ModelCheckpoint(save_last=True)`, TMPDIR on another file system"
    packages, pattern = ("lightning", "torch"), "*.ckpt"

    def resume(self, folder: Path) -> str:
        return self._resumed(source="last", where=folder)

    def _run(
        self, at_step: Callable[[int, dict[str, Any]], None], ended: Callable[[int], None],
        into: Path | None = None, source: str | None = None, where: Path | None = None,
    ) -> None:  # fmt: skip
        from lightning.pytorch import Callback, Trainer
        from lightning.pytorch.callbacks import ModelCheckpoint
        from lightning.pytorch.demos.boring_classes import BoringModel

        class Watch(Callback):
            def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
                schedule = trainer.lr_scheduler_configs[0].scheduler
                at_step(trainer.global_step, _picture(module, trainer.optimizers[0], schedule))

            def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
                ended(trainer.global_step)

        class Model(BoringModel):
            def __init__(self) -> None:
                super().__init__()
                self.layer = torch.nn.Linear(32, 512)

            def configure_optimizers(self) -> Any:
                adam = torch.optim.Adam(self.layer.parameters())
                schedule = torch.optim.lr_scheduler.StepLR(adam, 1)
                return {"optimizer": adam, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

        logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
        torch.manual_seed(0)
        folder = into or where
        keeping = (
            [ModelCheckpoint(folder, save_last=True, save_top_k=1, every_n_train_steps=1)] if folder else []
        )
        trainer = Trainer(
            accelerator="cpu", devices=1, max_steps=_STEPS, logger=False, enable_progress_bar=False,
            enable_model_summary=False, enable_checkpointing=folder is not None, default_root_dir=folder,
            callbacks=[Watch(), *keeping],
        )  # fmt: skip
        trainer.fit(Model(), ckpt_path=source)


class LightningTrainerBeside(LightningTrainer):
    about = "the same, TMPDIR on the same one"

    def save(self, folder: Path) -> None:
        tempfile.tempdir = str(folder)
        super().save(folder)
