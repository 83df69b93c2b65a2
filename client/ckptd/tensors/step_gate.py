# ruff: noqa: TID253
"""What keeps optimizers from changing tensors that are still being copied: torch's hook before every step.

One hook for the process, whichever optimizer steps, for all clients that overlap; it is there while one of them is
open. Modules whose parameters are being copied get one too, which their load_state_dict() runs, until the next step.

A step that torch.compile traced, or that a CUDA graph captured, runs without any hook. Both pass here once, while
they are made: the copies under way are finished there, and `deaf` says from then on why no step can be made to wait.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Iterable
from typing import Any, Final, Protocol, cast

import torch
from torch.optim.optimizer import _global_optimizer_pre_hooks, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

__all__ = ["Held", "StepGate", "gate"]


class Held(Protocol):
    """A copy that reads tensors beside the training."""

    def let_go(self) -> None:
        """Return when whatever the caller does next to the tensors comes after the copy."""

    def wait(self, timeout_s: float | None = None) -> bool:
        """Return when every byte has arrived; False when that took longer."""


class StepGate:
    """Where steps wait. Safe for use by several threads: backward passes may step in threads of their own.

    Attributes:
        deaf: Why there are steps that can't be made to wait; "" while there are none.
    """

    def __init__(self) -> None:
        self.deaf = ""
        self._lock = threading.RLock()  # a signal's handler may come here too
        self._users = 0
        self._hook: RemovableHandle | None = None
        self._held: tuple[Held, ...] = ()
        self._watched: list[RemovableHandle] = []

    def __repr__(self) -> str:
        return f"<StepGate {self._users} users, {len(self._held)} copies under way>"

    def enter(self) -> None:
        """Have torch's hook registered until as many leave() as enter() were called."""
        with self._lock:
            self._users += 1
            if self._hook is None:
                self._hook = _first(register_optimizer_step_pre_hook(_before_step))

    def leave(self, *, hooks: bool = True) -> None:
        """The other half of enter().

        Args:
            hooks: False leaves torch's hook to whoever leaves next: the garbage collector comes in the middle of a step
                too, that is running its hooks, or of a copy that steps still wait for.
        """
        with self._lock:
            self._users -= 1
            unused = self._users == 0 and hooks
            if unused and self._hook is not None:
                self._hook.remove()
                self._hook = None
        if unused:
            self._unwatch()

    def hold(self, copy: Held, modules: Iterable[torch.nn.Module] = ()) -> None:
        """Let no optimizer step, and none of these modules load, before `copy` has let go."""
        with self._lock:
            self._held = (*self._held, copy)
        self._watched += [_watch(module) for module in modules]

    def drop(self, copy: Held) -> None:
        """It has let go, or never will."""
        with self._lock:
            self._held = tuple(held for held in self._held if held is not copy)

    def before_step(self) -> None:
        """An optimizer is about to step: let it when nothing is read any more."""
        if _captures():
            self.finish("a CUDA graph captured an optimizer's step, and replays it without asking")
        for copy in self._held:
            copy.let_go()
        self._unwatch()  # here and not where a copy ends: that is another thread, and a module may be loading

    def before_load(self) -> None:
        """A module is about to load its parameters."""
        for copy in self._held:
            copy.let_go()

    def finish(self, deaf: str) -> None:
        """Wait for all copies to end: this step, and those that come of it, can't be stopped any more."""
        self.deaf = deaf
        for copy in self._held:
            copy.wait()

    def forget(self) -> None:
        """In a forked child: the copies are the parent's, and so are the threads that would end them."""
        self._lock, self._held = threading.RLock(), ()

    def _unwatch(self) -> None:
        watched, self._watched = self._watched, []
        for handle in watched:
            handle.remove()


def _first(hook: RemovableHandle) -> RemovableHandle:
    """Let torch run it before those that are there already: one of the user's may change parameters."""
    cast("OrderedDict[int, Any]", _global_optimizer_pre_hooks).move_to_end(hook.id, last=False)
    return hook


def _watch(module: torch.nn.Module) -> RemovableHandle:
    handle: RemovableHandle = module.register_load_state_dict_pre_hook(_before_load)  # type: ignore[no-untyped-call]
    return handle


def _captures() -> bool:
    return bool(torch.cuda.is_initialized()) and torch.cuda.is_current_stream_capturing()  # type: ignore[no-untyped-call]


gate: Final = StepGate()


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if torch.compiler.is_compiling():
        _traced()
    else:
        gate.before_step()


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _traced() -> int:
    """Runs once, when torch.compile meets the hook; in what it compiles nothing of the hook is left."""
    gate.finish("torch.compile took an optimizer's step in, and runs it without torch's hooks")
    return 0


def _before_load(module: torch.nn.Module, *_: Any) -> None:  # a plain function: copies of the module share it
    gate.before_load()


os.register_at_fork(after_in_child=gate.forget)
