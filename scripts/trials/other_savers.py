"""How each tool saves twice and how its users pick what to resume from, each in a process of its own.

    other_savers.py save TOOL FOLDER        two checkpoints, of steps 1 and 2, in the way its documentation shows
    other_savers.py load TOOL               reads folders from stdin, one a line, and says what a resume gets of each

A resume gets a step whose tensors all have that step's value, "none" (nothing to resume from), "wrong" (something else,
without an error) or "error"; and whether the checkpoint before can be loaded by name, which somebody has to do by hand.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any, Final

import torch
from other_tool import Tool, resumed, state_of, step_in, tell
from other_trainers import HfTrainer, LightningTrainer, LightningTrainerBeside


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

    def resume(self, folder: Path) -> str:
        return self.load_one(folder / "ckpt.pt") if (folder / "ckpt.pt").exists() else "none"


class TorchSaveReplaced(TorchSaveOver):
    about = "`torch.save` to a temporary file, `os.replace`"

    def save_one(self, folder: Path, step: int) -> None:
        torch.save(state_of(step), folder / "ckpt.tmp")
        os.replace(folder / "ckpt.tmp", folder / "ckpt.pt")


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


class Ours(Tool):
    about, packages = '`ckptd.Client(daemon="off")`', ("ckptd",)

    def save(self, folder: Path) -> None:
        self._save(folder, "off")

    def _save(self, folder: Path, daemon: Any) -> None:
        import ckptd

        with ckptd.Client(root=folder / "root", run="r", daemon=daemon) as client:
            for step in (1, 2):
                tell(folder, "begun", step)
                state = {"model": state_of(step)["model"], "train": {"step": step}}
                ticket = client.snapshot(step, state)
                ticket.wait("committed", timeout_s=60)
                tell(folder, "acked", step)
                if daemon != "off":
                    ticket.wait("verified", timeout_s=60)

    def resume(self, folder: Path) -> str:
        import ckptd

        if not (folder / "root" / "r").exists():
            return "none"
        found = ckptd.latest_valid(folder / "root", "r")
        return "none" if found is None else self.load_one(found.path)

    def load_one(self, path: Path) -> str:
        import ckptd

        state = ckptd.load(path)
        return step_in({"model": state["model"], "step": state["train"]["step"]})


class OursKeepingOne(Ours):
    """A kill's shared memory isn't among the states: what is in a slot alone counts as gone."""

    about = "`ckptd start --keep-last 1`"

    def save(self, folder: Path) -> None:
        command = [sys.executable, "-m", "ckptd_daemon.cli.main"]
        root = ["--root", str(folder / "root")]
        subprocess.run([*command, "start", *root, "--detach", "--keep-last", "1"], check=True)
        try:
            self._save(folder, "attach")
        finally:
            subprocess.run([*command, "stop", *root], check=True)


TOOLS: Final[dict[str, type[Tool]]] = {
    tool.__name__: tool
    for tool in (
        TorchSaveOver, TorchSave, TorchSaveReplaced, TorchSaveSynced, Safetensors, Dcp, DcpAsync, HfTrainer,
        LightningTrainer, LightningTrainerBeside, Ours, OursKeepingOne,
    )
}  # fmt: skip


def main() -> None:
    what, name, *folder = sys.argv[1:]
    warnings.simplefilter("ignore")
    answers, sys.stdout = sys.stdout, sys.stderr  # some say more than they are asked
    torch.set_num_threads(1)
    tool = TOOLS[name]()
    if what == "save":
        tool.save(Path(folder[0]))
        return
    for line in sys.stdin:
        print(resumed(tool, Path(line.rstrip("\n"))), file=answers, flush=True)
        gc.freeze()  # what was imported: some collect at each start


if __name__ == "__main__":
    main()
