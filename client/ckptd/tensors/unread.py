# ruff: noqa: TID253
"""Loaded tensors whose files are still to be read: where the bytes of each go is decided once it is known that they fit.

Until then nothing but their memory is there, and of that only addresses. Whoever must look at a value before that
has the files that it lies in read and proven, into memory of their own.
"""

from __future__ import annotations

import os
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any, Final, Protocol

import numpy
import torch

from ckptd.disk.read_thread import ReadThread, end_all
from ckptd.errors import CkptdError
from ckptd.snapshot.values import SCALARS
from ckptd.tensors.registered_tags import Unbuilt, items_below


class UnreadFile(Protocol):
    """The tensors of one file, or a part of one, without their bytes.

    Attributes:
        name: Tells it from the others.
        memory: The bytes of each tensor by their address, those of tied ones once.
    """

    @property
    def name(self) -> str: ...
    @property
    def memory(self) -> Mapping[int, torch.Tensor]: ...

    def read(self, live: Mapping[int, torch.Tensor]) -> None:
        """Read and prove all of it, into live where that has the address. Raises CorruptCheckpoint, ReadFailed."""

    def prove(self) -> None:
        """Check its hash, and keep nothing. Raises as `read`."""

    def peek(self, addresses: Collection[int]) -> None:
        """Read what lies at these addresses, unproven. Raises as `read`."""


class Unread:
    """The files of one checkpoint that aren't read yet. One without any has nothing to do, whatever it is asked."""

    def __init__(self, shards: Iterable[UnreadFile] = ()) -> None:
        self._waiting = {shard.name: shard for shard in shards}
        self._file_of = {address: shard.name for shard in self._waiting.values() for address in shard.memory}

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def need(self, *values: Any) -> None:
        """Have every tensor and array below the values read and proven, with all else in the same files.

        Raises:
            CorruptCheckpoint, ReadFailed: The values must not be used.
        """
        if self._waiting:
            self._read(dict.fromkeys(self._files(values)), {})

    def peek(self, value: Any) -> None:
        """Read what is below value, unproven: numbers to decide by. What is kept of it comes with `read`. Raises as that."""
        addresses = set(map(address_of, _with_memory(value))) if self._waiting else set()
        for name in {self._file_of[address] for address in addresses & self._file_of.keys()}:
            if name in self._waiting:
                self._waiting[name].peek(addresses)

    def prove(self) -> None:
        """Check the hashes of all that is still unread, and keep nothing. Raises as `read`."""
        _in_parallel([shard.prove for shard in self._waiting.values()])

    def read_apart(self, live: Collection[int]) -> None:
        """Read and prove the files that none of these addresses lie in: what is wrong there is found before the rest."""
        names = [name for name, shard in self._waiting.items() if shard.memory.keys().isdisjoint(live)]
        self._read(names, {})

    def read(self, live: Mapping[int, torch.Tensor]) -> None:
        """Read and prove all files.

        Args:
            live: What `straight` gave: address of loaded memory → the live tensor that gets its bytes instead.

        Raises:
            CorruptCheckpoint, ReadFailed: Nothing that was written into live or loaded tensors may be used.
        """
        self._read(list(self._waiting), live)

    def memory_of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The bytes that wait for being read, when they are all the tensor's; None when there are none, or more."""
        name = self._file_of.get(tensor.data_ptr())
        if name not in self._waiting:
            return None
        memory = self._waiting[name].memory[tensor.data_ptr()]
        return memory if memory.nbytes == tensor.nbytes else None

    def uses(self, components: Mapping[Any, Any]) -> Counter[int]:
        """How often the memory at each address is met in the loaded components."""
        return Counter(map(address_of, _with_memory(components))) if self._waiting else Counter()

    def _files(self, values: Iterable[Any]) -> Iterator[str]:
        for value in values:
            for one in _with_memory(value):
                name = self._file_of.get(address_of(one))
                if name in self._waiting:
                    yield name

    def _read(self, names: Iterable[str], live: Mapping[int, torch.Tensor]) -> None:
        shards = [self._waiting.pop(name) for name in names]
        _in_parallel([lambda shard=shard: shard.read(live) for shard in shards])  # type: ignore[misc]


#: Of what was read at once, or came from elsewhere.
NOTHING_UNREAD: Final = Unread()


def _in_parallel(jobs: list[Callable[[], None]]) -> None:
    """Hashing releases the interpreter lock; of two threads a core one hashes while the other waits for the disk. The
    calling thread is one of them, and does alone what no other can be had for."""
    waiting, faults = deque(jobs), list[Exception]()

    def work() -> None:
        while waiting:
            try:
                job = waiting.popleft()
            except IndexError:  # another thread was faster
                return
            try:
                job()
            except Exception as fault:  # noqa: BLE001 - raised below, once all have ended
                faults.append(fault)

    helpers = list[ReadThread]()
    try:
        with suppress(RuntimeError):
            for _ in jobs[1 : 2 * len(os.sched_getaffinity(0))]:
                helpers.append(ReadThread(work))
                helpers[-1].start()
        work()
    finally:
        waiting.clear()  # interrupted: nobody begins another one
        end_all(helpers)
    for fault in sorted(faults, key=lambda fault: not isinstance(fault, CkptdError)):
        raise fault


def _with_memory(value: Any) -> Iterator[torch.Tensor | numpy.ndarray]:
    """Every tensor and array below value that has memory, as often as it is met."""
    if isinstance(value, torch.Tensor):
        if value.layout is torch.strided and value.numel() and not value.is_meta:
            yield value
    elif isinstance(value, numpy.ndarray):
        yield value
    elif isinstance(value, Unbuilt):
        yield from _with_memory(value.content)
    else:
        for _, item in items_below(value):
            if type(item) not in SCALARS:  # a history of losses is long
                yield from _with_memory(item)
        yield from _with_memory(vars(value).get("_metadata")) if hasattr(value, "_metadata") else ()


def address_of(one: torch.Tensor | numpy.ndarray) -> int:
    """Where the memory begins that a tensor or array is, or is a view of."""
    return one.untyped_storage().data_ptr() if isinstance(one, torch.Tensor) else int(one.ctypes.data)
