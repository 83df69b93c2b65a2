"""The descriptor: everything about one snapshot except the tensors' bytes.

It lies in the slot beside those bytes; the ZeroMQ message that pushes a snapshot only points at it.
The trainer builds it (ckptd.tensors.capture), the writer plans files from it (ckptd.format.plan). No torch here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

ShardingBy = Literal["size", "round-robin", "param-group"]


# Neither this nor TensorRef is tracked by the collector (gc=False: they hold plain keys and numbers, so they can't
# be part of a cycle): a state may have 100,000 of them, and the trainer waits while they are made.
class TensorSpec(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One tensor of the snapshot.

    Attributes:
        path: Typed key path from the top of the state, such as ("model", "h.0.weight").
        dtype: Name without prefix ("float32", "bfloat16", "float8_e4m3fn", …).
        itemsize: Bytes per element.
        shape: Dimensions; () for 0-dim.
        stride: In elements, when the bytes are dense but not in C order (channels_last, transposed);
            None for C order. The stored bytes are always dense: numel * itemsize of them.
        offset: First byte within the data region of the slot (or buffer). Aliases have their owner's.
        nbytes: numel * itemsize.
        alias_of: Row of the tensor this one is tied to (same storage, offset, shape, stride, dtype), or None.
        requires_grad: As captured.
        parameter: It was an nn.Parameter (inside plain data; state_dict() values are plain tensors).
    """

    path: tuple[Any, ...]
    dtype: str
    itemsize: int
    shape: tuple[int, ...]
    stride: tuple[int, ...] | None
    offset: int
    nbytes: int
    alias_of: int | None = None
    requires_grad: bool = False
    parameter: bool = False


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """How the tensors of a component are divided into files.

    Attributes:
        by: "size" balances bytes (default); "round-robin" deals the sorted keys; "param-group" makes three
            files: names ending in .weight, in .bias, and the rest.
        shards: Files per component, 1 to 1000. "auto" (default): one file for the whole state while it is under
            64 MiB, else as many as make about 256 MiB each, at least as many as there are cores, at most 64.
            A number always means the sharded layout, and 1 too; never more files than tie groups.
            With "param-group" the number must be "auto" or 3.
    """

    by: ShardingBy = "size"
    shards: int | Literal["auto"] = "auto"

    def __post_init__(self) -> None:
        from ckptd.errors import InvalidArgument

        if self.by not in ("size", "round-robin", "param-group"):
            raise InvalidArgument(
                "unknown sharding", where="by", seen=repr(self.by), wanted="size, round-robin or param-group"
            )
        if self.shards != "auto" and (
            isinstance(self.shards, bool) or not isinstance(self.shards, int) or not 1 <= self.shards <= 1000
        ):
            raise InvalidArgument(
                "not a number of shards", where="shards", seen=repr(self.shards), wanted='"auto" or 1 to 1000'
            )
        if self.by == "param-group" and self.shards not in ("auto", 3):
            raise InvalidArgument(
                "param-group makes three shards", where="shards", seen=repr(self.shards), wanted='"auto" or 3'
            )


@dataclass(frozen=True, kw_only=True)
class Descriptor:
    """One snapshot.

    Attributes:
        run: Run name.
        client_id: 32 hex digits, one per Client object.
        snapshot: The client's own number of this snapshot, from 1.
        step: Finished optimizer steps.
        saved_at: Unix seconds, wall clock, at capture. Information only, decides nothing.
        run_seconds: Training seconds of the run accumulated over all restarts (monotonic clock).
        base_sequence: Sequence of the checkpoint of this run that the client restored, or None: it restored
            none, or one of elsewhere (begins_line tells).
        base_snapshot: The client's own snapshot number when it restored that one (0: none before). Its later
            snapshots go on from each other; restoring the same checkpoint again begins another line.
        base_before: Where it goes on from when base_sequence was restored from a slot and never became a checkpoint
            (the disk was full): the sequences that one itself went on from, nearest first.
        begins_line: What the client restored is not a checkpoint of this run (a warm start): nothing of the run
            led to this state, so its snapshots begin a line of their own. False with a base_sequence, and
            when nothing was restored: then they go on from the head.
        metrics: Name → float (may be NaN or infinite).
        versions: {"ckptd": …, "torch": …, "numpy": …, "python": …}
        state: The captured state (see ckptd.snapshot.values): a dict by component name, "rng" among them.
        tensors: The rows TensorRef points to.
        data_bytes: Length of the data region all offsets lie in.
        sharding: As the caller asked.
    """

    run: str
    client_id: str
    snapshot: int
    step: int
    saved_at: float
    run_seconds: float
    base_sequence: int | None
    base_snapshot: int = 0
    base_before: tuple[int, ...] = ()
    begins_line: bool = False
    metrics: dict[str, float] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    state: dict[Any, Any]
    tensors: tuple[TensorSpec, ...]
    data_bytes: int
    sharding: Sharding = field(default_factory=Sharding)
