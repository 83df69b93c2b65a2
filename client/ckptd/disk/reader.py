"""What the loader needs of whoever has the bytes of one checkpoint: a folder's files, a slot."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from ckptd.format.records import CheckpointIndex


@dataclass(frozen=True, slots=True)
class Span:
    """A range of a file and the memory its bytes go to.

    Attributes:
        offset: Where in the file it begins.
        into: The memory; its size is the range's.
        begin: Called before anything is written into the memory, which is another span's until then; None: at once.
        done: Called when the memory holds the range, hashed or not; the memory may be another span's after that.
    """

    offset: int
    into: memoryview
    begin: Callable[[], None] | None = None
    done: Callable[[], None] | None = None


class Reader(Protocol):
    """One checkpoint's bytes. Methods may be called from several threads at once, for different files.

    Attributes:
        path: What to call it in messages.
        index: Its index, checked.
        files: Names of the files that can be read.
    """

    @property
    def path(self) -> str: ...
    @property
    def index(self) -> CheckpointIndex: ...
    @property
    def files(self) -> tuple[str, ...]: ...

    def read(self, name: str) -> bytes:
        """The whole content of a file, its hash checked.

        Raises:
            CorruptCheckpoint: Its size or hash is not the committed one.
            ReadFailed: It can't be read now.
        """

    def read_into(self, name: str, spans: Sequence[Span]) -> None:
        """Read and hash a whole file, its spans into their memory; what isn't in a span is only hashed.

        Args:
            name: One of `files`.
            spans: Ascending, without overlap, inside the file. Filled in this order.

        Raises:
            CorruptCheckpoint: Its size or hash is not the committed one; what was read must not be used.
            ReadFailed: It can't be read now; neither must that.
        """

    def peek_into(self, name: str, spans: Sequence[Span]) -> None:
        """Read spans alone, unproven: to decide by; what is kept must be read again by `read_into`.

        Raises:
            CorruptCheckpoint: The file ends before them.
            ReadFailed: It can't be read now.
        """
