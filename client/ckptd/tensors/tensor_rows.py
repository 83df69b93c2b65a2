# ruff: noqa: TID253
"""The tensors of one snapshot as rows: what each is, where its bytes will lie, and which are tied."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]

from ckptd.errors import UnstorableState
from ckptd.format.storage_types import STORAGE_TYPES
from ckptd.limits import MAX_TENSOR_DIMS, PAGE_ALIGNED_FROM_BYTES, PAGE_ALIGNMENT, SMALL_ALIGNMENT
from ckptd.snapshot import keypath
from ckptd.snapshot.descriptor import TensorSpec
from ckptd.snapshot.values import TensorRef
from ckptd.tensors.torch_support import NAME_OF_DTYPE

_NOT_LAZY = (False, False)
_PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)
_has_names = getattr(torch.Tensor, "has_names", None)  # newer versions have no named dimensions any more


class TensorRows:
    """Collects tensors while a state is walked.

    Attributes:
        rows: One TensorSpec per tensor met, ties included.
        sources: The tensors to copy, without a graph: one per row that isn't an alias, in the order of the rows.
        data_bytes: Length of the region all offsets lie in.
    """

    def __init__(self) -> None:
        self.rows: list[TensorSpec] = []
        self.sources: list[torch.Tensor] = []
        self.data_bytes = 0
        self._owners: dict[tuple[Any, ...], int] = {}
        self._kept: list[torch.Tensor] = []

    def __repr__(self) -> str:
        return f"<TensorRows {len(self.rows)} rows, {self.data_bytes} bytes>"

    def add(self, tensor: torch.Tensor, path: keypath.Path) -> TensorRef:
        """Take a row for tensor, tied to an earlier one when it is the same memory seen the same way.

        Raises:
            UnstorableState: It has no bytes of its own that a file could hold (sparse, meta, DTensor, …).
        """
        check_storable(tensor, path)
        parameter = type(tensor) is torch.nn.Parameter
        requires_grad = tensor.requires_grad and tensor.is_leaf
        seen = tensor.detach() if tensor.requires_grad else tensor
        number, shape, nbytes = len(self.rows), tuple(seen.shape), seen.nbytes
        # Equal address, shape, stride and dtype is what makes a tie: both names show the same bytes.
        lazy = (seen.is_conj(), seen.is_neg())
        place = (seen.data_ptr(), shape, seen.stride(), seen.dtype, seen.device, lazy)
        first = self._owners.setdefault(place, number) if nbytes else number
        owner = None if first == number else first
        source = seen if owner is not None or lazy == _NOT_LAZY else _resolved_at(seen, path)
        offset = self.rows[owner].offset if owner is not None else self._reserve(nbytes)
        self.rows.append(
            TensorSpec(
                path=path,
                dtype=NAME_OF_DTYPE[source.dtype],
                itemsize=source.itemsize,
                shape=shape,
                stride=memory_order(source) if owner is None else self.rows[owner].stride,
                offset=offset,
                nbytes=nbytes,
                alias_of=owner,
                requires_grad=requires_grad,
                parameter=parameter,
            )
        )
        if owner is None:
            self.sources.append(source)
            if source is not seen:
                self._kept.append(seen)  # alive, so that its address can't be taken by another tensor
        return TensorRef(number)

    def _reserve(self, nbytes: int) -> int:
        if nbytes == 0:
            return 0
        alignment = _alignment(nbytes)
        offset = -(-self.data_bytes // alignment) * alignment
        self.data_bytes = offset + nbytes
        return offset


def most_bytes(nbytes: int) -> int:
    """The most that a tensor of so many bytes adds to the length of the region."""
    return nbytes + _alignment(nbytes)


def _alignment(nbytes: int) -> int:
    return PAGE_ALIGNMENT if nbytes >= PAGE_ALIGNED_FROM_BYTES else SMALL_ALIGNMENT


def check_storable(tensor: torch.Tensor, path: keypath.Path) -> None:
    """Raise UnstorableState, naming the key path, for a tensor that can't be stored exactly."""
    fault = _fault(tensor)
    if fault:
        what, todo = fault
        raise UnstorableState(what, where=keypath.show(path), seen=_describe(tensor), todo=todo)


def _fault(tensor: torch.Tensor) -> tuple[str, str] | None:
    kind = type(tensor)
    if kind not in _PLAIN_TYPES:
        if kind.__name__ == "DTensor":
            return "a DTensor can't be stored: one process per run", "store its local or its full tensor"
        if isinstance(tensor, UninitializedTensorMixin):
            return "a lazy parameter has no values yet", "run a forward pass before the first snapshot"
        return "a tensor subclass can't be stored", "store a plain torch.Tensor"
    if tensor.layout is not torch.strided:
        if tensor.layout is torch._mkldnn:  # type: ignore[attr-defined]
            return (
                "an mkldnn tensor can't be stored: its bytes are in an order of its own",
                "store to_dense()",
            )
        return (
            f"a sparse tensor can't be stored ({tensor.layout})",
            "store to_dense(), or its indices and values",
        )
    if tensor.is_quantized:
        return "a quantized tensor can't be stored", "store int_repr() with its scale and zero point"
    if tensor.is_meta:
        return "a tensor on the meta device has no values", "materialise it first"
    if tensor.is_nested:
        return "a nested tensor can't be stored", "store its unbound parts"
    if torch._is_functional_tensor(tensor):
        return "a tensor inside torch.func.functionalize has no values yet", "snapshot outside of it"
    if _has_names is not None and _has_names(tensor):
        return "a tensor with named dimensions can't be stored", "store rename(None)"
    if NAME_OF_DTYPE.get(tensor.dtype) not in STORAGE_TYPES:
        return "a tensor of a dtype that no archive holds", "store view(torch.uint8)"
    if not _has_memory(tensor):
        return (
            "a tensor that has no memory (freed, or inside vmap)",
            "snapshot where it is whole: gather it first",
        )
    if tensor.dim() > MAX_TENSOR_DIMS:
        return f"a tensor has more than {MAX_TENSOR_DIMS} dimensions", "reshape it"
    return None


def _has_memory(tensor: torch.Tensor) -> bool:
    """Whether the storage covers the tensor: one that was resized below it, reading would kill the process.

    False also for a tensor that has no storage, as inside torch.func.vmap.
    """
    count = tensor.numel()
    if count and not tensor.is_contiguous():
        count = 1 + sum(
            (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
        )
    needed = (tensor.storage_offset() + count) * tensor.itemsize if count else 0
    try:
        return needed <= tensor.untyped_storage().nbytes()
    except NotImplementedError:
        return False


def _describe(tensor: torch.Tensor) -> str:
    return f"{type(tensor).__module__}.{type(tensor).__qualname__} {tensor.dtype} on {tensor.device}"


def _resolved_at(tensor: torch.Tensor, path: keypath.Path) -> torch.Tensor:
    try:
        return resolved(tensor)
    except RuntimeError as error:  # torch 2.6 has no class of its own for it
        if "not implemented" not in str(error):
            raise
        raise UnstorableState(
            "a lazily negated or conjugated tensor of a dtype that torch can't do it for", where=keypath.show(path),
            seen=_describe(tensor), todo="store the tensor that it is a view of",
        ) from error  # fmt: skip


def resolved(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor without lazy conjugation or negation: its bytes are its values."""
    if tensor.is_conj():
        try:
            tensor = tensor.resolve_conj()
        except NotImplementedError:  # bcomplex32 in the first torch that has it
            tensor = _conjugated(tensor.conj())
    return tensor.resolve_neg() if tensor.is_neg() else tensor


def _conjugated(tensor: torch.Tensor) -> torch.Tensor:
    """A copy with the sign of each imaginary part flipped."""
    copy = tensor.clone()
    torch.view_as_real(copy)[..., 1].neg_()
    return copy


def memory_order(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """The strides when the bytes are dense but not in C order (channels_last, transposed), else None."""
    if tensor.is_contiguous() or tensor.numel() == 0:
        return None
    expected = 1
    strides = tensor.stride()
    for stride, size in sorted((s, n) for s, n in zip(strides, tensor.shape, strict=True) if n > 1):
        if stride != expected:
            return None
        expected *= size
    return tuple(strides)
