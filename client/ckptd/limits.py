"""Named limits on everything read from a socket, a slot or a disk.

A value over its limit is refused with its name, never truncated. Each is far above what a real
training run needs and far below what would exhaust a machine.
"""

from __future__ import annotations

from typing import Final

KIB: Final = 1024
MIB: Final = 1024 * KIB

# On disk
MAX_INDEX_BYTES: Final = 4 * MIB  #: index.json of a checkpoint
MAX_TABLE_BYTES: Final = 256 * MIB  #: tensors.json
MAX_RUN_INDEX_BYTES: Final = 64 * MIB
MAX_DECISION_BYTES: Final = 64 * KIB
MAX_JSON_DEPTH: Final = 32
MAX_SHARDS: Final = 10_000
MAX_TENSORS: Final = 1_000_000
MAX_NAME_BYTES: Final = 255

# A state
MAX_TREE_DEPTH: Final = 100
MAX_TREE_NODES: Final = 20_000_000
MAX_STEP: Final = 10**15
MAX_METRICS: Final = 1_000
MAX_TENSOR_DIMS: Final = 64

# Alignment of tensor data, in bytes, in slots and in archives
PAGE_ALIGNMENT: Final = 4096
SMALL_ALIGNMENT: Final = 64
PAGE_ALIGNED_FROM_BYTES: Final = 64 * KIB

# Slots and wire
MAX_DESCRIPTOR_BYTES: Final = 512 * MIB
MAX_MESSAGE_BYTES: Final = 1 * MIB
MAX_REQUEST_BYTES: Final = (
    64 * KIB
)  #: what a client sends is small: a thousand of them may wait in the daemon
MAX_SLOTS_PER_CLIENT: Final = 2
MAX_BASES: Final = 64  #: snapshots in a row, each restored from a slot and none of them written yet
MAX_FRAME_BYTES: Final = 4 * MIB  #: of a streamed snapshot, in one message
MAX_CREDIT_BYTES: Final = 4 * MAX_FRAME_BYTES  #: one client's, sent and not taken in yet
MAX_CREDIT_ALL_BYTES: Final = 4 * MAX_CREDIT_BYTES  #: all clients' together
MAX_SKIPPED_TOLD: Final = 100  #: steps in one message
MAX_SKIPPED: Final = 10**12  #: snapshots that one client may say it has skipped
MAX_CLIENTS: Final = 1_000

#: Files and snapshots from this size on are written and hashed by several threads, and waited for.
LARGE_FROM_BYTES: Final = 4 * MIB

#: States under this many tensor bytes are written as one file unless the caller shards them.
SINGLE_FILE_BELOW_BYTES: Final = 64 * MIB
