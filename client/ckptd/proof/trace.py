"""What one run of a job saw, step by step: written as JSON lines by the child, read back by its parent. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

from ckptd.snapshot import keypath

_SCOPE: Final = "\x1f"  # a control character, which no name has


@dataclass(frozen=True, slots=True)
class Leaf:
    """One value of a state.

    Attributes:
        text: What a reader sees of it: `0.5`, `float32[3, 4]`, `OrderedDict of 2`.
        digest: Hash of its bytes; "" where the text says all.
        dtype: A tensor's; "" for anything else.
        offset, nbytes: Where a tensor's bytes lie in the moment's values file.
    """

    text: str
    digest: str = ""
    dtype: str = ""
    offset: int = 0
    nbytes: int = 0

    def same(self, other: Leaf | None) -> bool:
        return other is not None and (self.text, self.digest) == (other.text, other.digest)


@dataclass(frozen=True, slots=True)
class Moment:
    """The state after a step; step 0 is before the first.

    Attributes:
        step: Finished steps.
        losses: Name → number as text, exact. Empty where there is none: at step 0 and after a restore.
        leaves: Key path in its JSON spelling → value, in the order of the state.
        values: File of the captured tensors' bytes; "" where they were not kept.
        edge: Whether a ResumableLoader of the state is between two epochs.
    """

    step: int
    losses: Mapping[str, str]
    leaves: Mapping[str, Leaf]
    values: str = ""
    edge: bool = False


@dataclass(slots=True)
class Trace:
    """One run.

    Attributes:
        kinds: Component → what it is: module, optimizer, scheduler, loader, generator, data, rng.
        moments: Step → state. In a resumed run the first is the state right after the restore.
        beside: Step → what the job reaches beside its state; 0 is when it was made, in a run that isn't resumed.
        with_state: Names of objects beside the state that have `state_dict`, outer ones first.
        around: What beside.look_around found at the last snapshot, by its kind, as a reader would write it.
        ended: The step after which the job had no more; None when it went on.
        unseeded: Part of the RNG → the first step that drew from it, though the job never seeded it.
        warned: What ckptd warned of in it.
        refused: Why restore() refused the checkpoint; "" when it didn't.
        failed: What ended it: {"stage", "kind", "text"}; None when nothing did.
        saved: Steps whose snapshot is on disk.
        done: Whether it came to its end.
        state_bytes: Bytes of the state's tensors, the most there were.
    """

    kinds: dict[str, str] = field(default_factory=dict)
    moments: dict[int, Moment] = field(default_factory=dict)
    beside: dict[int, dict[str, Leaf]] = field(default_factory=dict)
    with_state: dict[str, None] = field(default_factory=dict)
    around: dict[str, list[str]] = field(default_factory=dict)
    ended: int | None = None
    unseeded: dict[str, int] = field(default_factory=dict)
    warned: list[str] = field(default_factory=list)
    refused: str = ""
    failed: dict[str, Any] | None = None
    saved: list[int] = field(default_factory=list)
    done: bool = False
    state_bytes: int = 0

    @property
    def last_step(self) -> int:
        return max(self.moments, default=0)


def show_key(key: str) -> str:
    """A leaf's key as a reader would write it: `state['model']['0.weight']`."""
    return keypath.show(keypath.from_json(json.loads(key)))


@lru_cache(maxsize=100_000)
def component_of(key: str) -> str:
    """The name of the component that a leaf's key lies in."""
    return str(keypath.from_json(json.loads(key))[0])


def scoped(name: str, scope: str) -> str:
    """The name of a variable with where it is, `counter in losses()`; what it holds is named after it with dots."""
    return f"{name}{_SCOPE}{scope}{_SCOPE}"


def is_scoped(name: str) -> bool:
    """Whether it is the name of a variable itself, or of what that holds, and not of a part of the state."""
    return _SCOPE in name


def show_scoped(name: str) -> str:
    """`counter.steps in losses()`, for a reader."""
    if _SCOPE not in name:
        return name
    variable, scope, below = name.split(_SCOPE, 2)
    return f"{variable}{below} in {scope}"


def root_of(name: str) -> str:
    """The variable, or the component of the state, that a name begins with."""
    if _SCOPE in name:
        return _SCOPE.join(name.split(_SCOPE, 2)[:2]) + _SCOPE
    return name[: name.index("]") + 1] if name.startswith("state[") else name.partition(".")[0]


def is_part(name: str, of: str) -> bool:
    """Whether it is the name of a value of the variable or object named `of`."""
    return name == of or name.startswith((f"{of}.", f"{of}["))


def moment_line(moment: Moment) -> str:
    leaves = [
        [key, leaf.text, leaf.digest, leaf.dtype, leaf.offset, leaf.nbytes]
        for key, leaf in moment.leaves.items()
    ]
    data = {"step": moment.step, "losses": dict(moment.losses), "leaves": leaves}
    return line("moment", **data, values=moment.values, edge=moment.edge)


def beside_line(step: int, leaves: Mapping[str, Leaf], with_state: Iterable[str] = ()) -> str:
    rows = [[name, one.text, one.digest] for name, one in leaves.items()]
    return line("beside", step=step, leaves=rows, with_state=list(with_state))


def around_line(found: Mapping[str, Iterable[str]]) -> str:
    return line("around", found={kind: list(map(show_scoped, names)) for kind, names in found.items()})


def line(event: str, **data: Any) -> str:
    return json.dumps({"event": event, **data}) + "\n"


def read_trace(path: Path) -> Trace:
    """What a run wrote so far; a last line that its death cut short doesn't count."""
    if not path.exists():
        return Trace()
    lines = path.read_text("utf-8").splitlines(keepends=True)
    return collect(json.loads(one) for one in lines if one.endswith("\n"))


def collect(events: Iterable[dict[str, Any]]) -> Trace:
    trace = Trace()
    for event in events:
        _take(trace, event)
    return trace


def _take(trace: Trace, event: dict[str, Any]) -> None:
    kind = event["event"]
    if kind == "moment":
        leaves = {key: Leaf(*rest) for key, *rest in event["leaves"]}
        moment = Moment(event["step"], event["losses"], leaves, event["values"], event["edge"])
        trace.moments[moment.step] = moment
        trace.state_bytes = max(trace.state_bytes, sum(leaf.nbytes for leaf in leaves.values()))
    elif kind == "beside":
        trace.beside[event["step"]] = {name: Leaf(*rest) for name, *rest in event["leaves"]}
        trace.with_state |= dict.fromkeys(event["with_state"])
    elif kind == "around":
        trace.around = event["found"]
    elif kind == "kinds":
        trace.kinds = event["kinds"]
    elif kind == "saved":
        trace.saved.append(event["step"])
    elif kind == "ended":
        trace.ended = event["step"]
    elif kind == "unseeded":
        trace.unseeded[event["part"]] = event["step"]
    elif kind == "warned":
        trace.warned.append(event["text"])
    elif kind == "refused":
        trace.refused = event["text"]
    elif kind == "failed":
        trace.failed = event
    elif kind == "done":
        trace.done = True
