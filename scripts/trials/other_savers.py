"""How each tool saves twice and how its users pick what to resume from, each in a process of its own.

    other_savers.py save TOOL FOLDER        two checkpoints, of steps 1 and 2, in the way its documentation shows
    other_savers.py load TOOL               reads folders from stdin, one a line, and says what a resume gets of each

A resume gets a step whose tensors all have that step's value, "none" (nothing to resume from), "wrong" (something else,
without an error) or "error"; and whether the checkpoint before can be loaded by name, which somebody has to do by hand.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

_ELEMENTS = 16_384  #: 64 KiB a tensor: a block that was never written lies within one


def state_of(step: int) -> dict[str, Any]:
    model = {name: torch.full((_ELEMENTS,), float(step)) for name in ("w", "b")}
    return {"model": model, "step": step}


def tell(folder: Path, what: str, step: int) -> None:
    os.mkdir(folder / f".told-{what}-{step}")


def step_in(state: dict[str, Any]) -> str:
    """The step, if every value is that step's."""
    step = int(state["step"])
    whole = all(bool((tensor == float(step)).all()) for tensor in state["model"].values())
    return str(step) if whole else "wrong"


def newest(folder: Path, pattern: str) -> Path | None:
    found = [path for path in folder.glob(pattern) if not path.name.startswith(".")]
    return max(found, key=lambda path: int(path.stem.rpartition("-")[2]), default=None)


class Tool:
    """One way of saving.

    Attributes:
        about: As the table has it.
        packages: Whose versions are said.
        pattern: How its checkpoints are called.
    """

    about, packages, pattern = "", ("torch",), "step-*"

    def save(self, folder: Path) -> None:
        for step in (1, 2):
            tell(folder, "begun", step)
            self.save_one(folder, step)
            tell(folder, "acked", step)

    def save_one(self, folder: Path, step: int) -> None:
        raise NotImplementedError

    def pick(self, folder: Path) -> Path | None:
        return newest(folder, self.pattern)

    def load_one(self, path: Path) -> str:
        raise NotImplementedError


class TorchSave(Tool):
    about, pattern = "`torch.save` to a new file each time", "step-*.pt"

    def save_one(self, folder: Path, step: int) -> None:
        torch.save(state_of(step), folder / f"step-{step}.pt")

    def load_one(self, path: Path) -> str:
        return step_in(torch.load(path, weights_only=True))


class TorchSaveOver(TorchSave):
    about = "`torch.save` over `ckpt.pt`"

    def save_one(self, folder: Path, step: int) -> None:
        torch.save(state_of(step), folder / "ckpt.pt")

    def pick(self, folder: Path) -> Path | None:
        return folder / "ckpt.pt" if (folder / "ckpt.pt").exists() else None


class TorchSaveSynced(TorchSaveOver):
    about = "`torch.save` to a temporary file, fsync, `os.replace`"

    def save_one(self, folder: Path, step: int) -> None:
        with open(folder / "ckpt.tmp", "wb") as file:
            torch.save(state_of(step), file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(folder / "ckpt.tmp", folder / "ckpt.pt")


class Dcp(Tool):
    about = "`torch.distributed.checkpoint.save`"

    def save_one(self, folder: Path, step: int) -> None:
        import torch.distributed.checkpoint as dcp

        dcp.save(state_of(step), checkpoint_id=folder / f"step-{step}")

    def load_one(self, path: Path) -> str:
        import torch.distributed.checkpoint as dcp

        state = state_of(0)
        dcp.load(state, checkpoint_id=path)
        return step_in(state)


class DcpAsync(Dcp):
    about = "`torch.distributed.checkpoint.async_save`, waited for"

    def save(self, folder: Path) -> None:
        import tempfile

        import torch.distributed as dist

        with tempfile.TemporaryDirectory() as elsewhere:
            dist.init_process_group("gloo", init_method=f"file://{elsewhere}/pg", rank=0, world_size=1)
            super().save(folder)
            dist.destroy_process_group()

    def save_one(self, folder: Path, step: int) -> None:
        import torch.distributed.checkpoint as dcp

        dcp.async_save(state_of(step), checkpoint_id=folder / f"step-{step}").result()


class Safetensors(Tool):
    about, packages, pattern = "`safetensors.torch.save_file`", ("safetensors",), "step-*.safetensors"

    def save_one(self, folder: Path, step: int) -> None:
        from safetensors.torch import save_file

        save_file(state_of(step)["model"], folder / f"step-{step}.safetensors", metadata={"step": str(step)})

    def load_one(self, path: Path) -> str:
        from safetensors import safe_open

        with safe_open(path, "pt") as file:
            model = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
            return step_in({"model": model, "step": int(file.metadata()["step"])})


class Lightning(Tool):
    about, packages, pattern = "Lightning's `TorchCheckpointIO`", ("lightning",), "step-*.ckpt"

    def _io(self) -> Any:
        from lightning.pytorch.plugins.io import TorchCheckpointIO

        return TorchCheckpointIO()

    def save(self, folder: Path) -> None:
        self._plugin = self._io()
        super().save(folder)

    def save_one(self, folder: Path, step: int) -> None:
        self._plugin.save_checkpoint(state_of(step), folder / f"step-{step}.ckpt")

    def load_one(self, path: Path) -> str:
        return step_in(self._io().load_checkpoint(path, weights_only=True))


class LightningAsync(Lightning):
    about = "Lightning's `AsyncCheckpointIO`, waited for"

    def _io(self) -> Any:
        from lightning.pytorch.plugins.io import AsyncCheckpointIO

        return AsyncCheckpointIO(super()._io())

    def save_one(self, folder: Path, step: int) -> None:
        plugin = self._io()
        plugin.save_checkpoint(state_of(step), folder / f"step-{step}.ckpt")
        plugin.teardown()

    def load_one(self, path: Path) -> str:
        return step_in(super()._io().load_checkpoint(path, weights_only=True))


class Ours(Tool):
    about, packages = '`ckptd.Client(daemon="off")`', ("ckptd",)

    def save(self, folder: Path) -> None:
        import ckptd

        with ckptd.Client(root=folder / "root", run="r", daemon="off") as client:
            for step in (1, 2):
                tell(folder, "begun", step)
                state = {"model": state_of(step)["model"], "train": {"step": step}}
                client.snapshot(step, state).wait("committed", timeout_s=60)
                tell(folder, "acked", step)

    def pick(self, folder: Path) -> Path | None:
        import ckptd

        if not (folder / "root" / "r").exists():
            return None
        found = ckptd.latest_valid(folder / "root", "r")
        return None if found is None else found.path

    def load_one(self, path: Path) -> str:
        import ckptd

        state = ckptd.load(path)
        return step_in({"model": state["model"], "step": state["train"]["step"]})


TOOLS: dict[str, type[Tool]] = {
    tool.__name__: tool
    for tool in (TorchSaveOver, TorchSave, TorchSaveSynced, Safetensors, Dcp, DcpAsync, Lightning, LightningAsync, Ours)
}  # fmt: skip


def answer(load: Callable[[], str]) -> str:
    try:
        return load()
    except BaseException:  # noqa: BLE001 - every way of failing is what is asked; DCP raises no Exception
        return "error"


def resume(tool: Tool, folder: Path) -> str:
    """What a resume gets, and what is to be had by hand."""

    def usual() -> str:
        picked = tool.pick(folder)
        return "none" if picked is None else tool.load_one(picked)

    first = answer(usual)
    if first not in ("error", "wrong", "none"):
        return f"{first} {first}"
    others = sorted(folder.glob(tool.pattern), reverse=True)
    by_hand = [word for path in others if (word := answer(lambda p=path: tool.load_one(p))).isdigit()]  # type: ignore[misc]
    return f"{first} {max(by_hand, default='none')}"


def main() -> None:
    what, name, *folder = sys.argv[1:]
    warnings.simplefilter("ignore")
    tool = TOOLS[name]()
    if what == "save":
        tool.save(Path(folder[0]))
        return
    for line in sys.stdin:
        print(resume(tool, Path(line.rstrip("\n"))), flush=True)


if __name__ == "__main__":
    main()
