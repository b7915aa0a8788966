"""`TensorList`: many tensors as one, so that a single launch works on all of them.

A kernel gets a table of addresses and a table of chunks; program i looks up which tensor chunk i
lies in and where it begins there. A tensor's last chunk may be shorter. Lists of equal sizes
(parameters, gradients, moments) share one table of chunks. Tables are made once and kept by whoever
owns the tensors; for newly allocated gradients `repoint` renews the addresses only.

    grads = TensorList.from_tensors([p.grad for p in parameters])
    kernel[(grads.chunks.num_chunks,)](
        grads.addresses, grads.dtype_codes, *grads.chunks.tables, ...
    )
"""

# Triton compiles some of these functions itself: their arguments are its own values, not Python's.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from meshwright.errors import InputError, Problem
from meshwright.run.kernels.triton_compat import tl, triton

CHUNK_ELEMENTS = 16384
"""Elements of a chunk: 32 KiB of bfloat16. Small enough that hundreds of programs share a small
model, large enough that the tables of a large one are nothing beside its bytes (12 of 32,768)."""

DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""How a kernel that meets tensors of several types is told the type of each."""
MIXED_DTYPES = -1
"""In place of a kind: tensors differ, each has to be looked up."""
ALIGNMENT_BYTES = 16
"""What one thread reads or writes at a time, at best."""


class TensorChunks(NamedTuple):
    """Tensors of given sizes cut into chunks, as tables on the device."""

    elements: tuple[int, ...]
    """Elements of each tensor."""
    chunk_elements: int
    """Elements of every chunk but the last of each tensor."""
    num_chunks: int
    """How many chunks there are, over all tensors."""
    tensors: torch.Tensor
    """int32 [number]: the tensor in which each chunk lies."""
    starts: torch.Tensor
    """int64 [number]: the first element of each chunk, counted in its tensor."""
    lengths: torch.Tensor
    """int32 [number]: the elements of each chunk."""

    @property
    def tables(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """What a kernel needs to find its chunk, in the order `find_chunk` takes it."""
        return self.tensors, self.starts, self.lengths


class TensorList(NamedTuple):
    """Tensors of one device whose addresses lie on that device."""

    tensors: tuple[torch.Tensor, ...]
    """The tensors themselves: as long as the list lives, so do their addresses."""
    pointers: tuple[int, ...]
    """The addresses, as the host knows them."""
    addresses: torch.Tensor
    """int64 [tensors]: the addresses."""
    dtype_codes: torch.Tensor
    """int32 [tensors]: a value of `DTYPE_CODES` for each tensor."""
    common_dtype_code: int
    """The kind of all tensors, or `MIXED_DTYPES`."""
    is_aligned: bool
    """Whether every tensor begins at a multiple of 16 bytes."""
    chunks: TensorChunks
    """Where to cut."""

    @classmethod
    def from_tensors(
        cls, tensors: Iterable[torch.Tensor], *, chunk_elements: int = CHUNK_ELEMENTS
    ) -> "TensorList":
        """List dense tensors of one device; they may differ in type (float32, bfloat16, float16).

        `chunk_elements` has to be a power of two, so that a kernel can take it as its tile.
        """
        held = tuple(tensors)
        problems = _problems(held)
        if chunk_elements < 16 or chunk_elements & (chunk_elements - 1):
            fix = f"use {CHUNK_ELEMENTS}"
            what = f"{chunk_elements} is not a power of two of at least 16"
            problems.append(Problem("chunk_elements", what, fix))
        if problems:
            raise InputError(problems)
        return _list(held, _cut(tuple(each.numel() for each in held), chunk_elements, held[0]))

    def with_chunks_of(self, tensors: Iterable[torch.Tensor]) -> "TensorList":
        """List tensors that lie in memory as these do, element for element, sharing the chunks."""
        held = tuple(tensors)
        problems = _problems(held)
        if len(held) != len(self.tensors):
            what = f"{len(held)} tensors beside a list of {len(self.tensors)}"
            problems.append(Problem("tensors", what, "give one for each of the list"))
        problems += [
            Problem(
                f"tensors[{index}]",
                f"shape {tuple(other.shape)} with strides {other.stride()} beside shape "
                f"{tuple(mine.shape)} with strides {mine.stride()}",
                "give it the shape and the strides of its counterpart",
            )
            for index, (mine, other) in enumerate(zip(self.tensors, held, strict=False))
            if mine.shape != other.shape or not _same_order(mine, other)
        ]
        if problems:
            raise InputError(problems)
        return _list(held, self.chunks)

    def repoint(self, tensors: Sequence[torch.Tensor]) -> "TensorList":
        """Return this list where these are its very tensors, otherwise one `with_chunks_of` it."""
        if not self.tensors:
            return self._again(tuple(tensors))
        if len(tensors) == len(self.tensors) and all(
            mine is other or (mine.data_ptr() == other.data_ptr() and _alike(mine, other))
            for mine, other in zip(self.tensors, tensors, strict=True)
        ):
            return self
        return self.with_chunks_of(tensors)

    def release(self) -> "TensorList":
        """Return the list without its tensors, so that their memory is free until the next ones.

        `repoint` then takes tensors of the same sizes; where they have the addresses of the old
        ones, as an allocator mostly gives them in every step, no table is rebuilt.
        """
        return self._replace(tensors=())

    def _again(self, held: tuple[torch.Tensor, ...]) -> "TensorList":
        problems = _problems(held)
        if tuple(each.numel() for each in held) != self.chunks.elements:
            what = "tensors of other sizes than the list was made for"
            problems.append(Problem("tensors", what, "make a new list"))
        if problems:
            raise InputError(problems)
        kinds = {DTYPE_CODES[each.dtype] for each in held}
        if (
            kinds == {self.common_dtype_code}
            and tuple(each.data_ptr() for each in held) == self.pointers
        ):
            return self._replace(tensors=held)
        return _list(held, self.chunks)


def _alike(mine: torch.Tensor, other: torch.Tensor) -> bool:
    return (
        mine.dtype == other.dtype
        and mine.shape == other.shape
        and _same_order(mine, other)
        and mine.device == other.device
    )


def _same_order(mine: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether equal places in memory mean equal elements; strides of length-1 axes mean nothing."""
    return (mine.is_contiguous() and other.is_contiguous()) or mine.stride() == other.stride()


def _problems(held: tuple[torch.Tensor, ...]) -> list[Problem]:
    if not held:
        return [Problem("tensors", "the list is empty", "give at least one tensor")]
    problems = []
    for index, each in enumerate(held):
        where = f"tensors[{index}]"
        if each.dtype not in DTYPE_CODES:
            known = ", ".join(str(kind).removeprefix("torch.") for kind in DTYPE_CODES)
            problems.append(Problem(where, f"type {each.dtype}", f"use one of {known}"))
        if each.device != held[0].device:
            what = f"is on {each.device}, the first one on {held[0].device}"
            problems.append(Problem(where, what, "make one list for each device"))
        if not _dense(each):
            what = f"shape {tuple(each.shape)} with strides {each.stride()} is not contiguous"
            problems.append(Problem(where, what, "give it as contiguous()"))
    return problems


def _dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill one stretch of memory, in whatever order."""
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def _list(held: tuple[torch.Tensor, ...], chunks: TensorChunks) -> TensorList:
    pointers = tuple(each.data_ptr() for each in held)
    kinds = [DTYPE_CODES[each.dtype] for each in held]
    device = held[0].device
    return TensorList(
        tensors=held,
        pointers=pointers,
        addresses=_on_device(np.array(pointers, dtype=np.int64), device),
        dtype_codes=_on_device(np.array(kinds, dtype=np.int32), device),
        common_dtype_code=kinds[0] if len(set(kinds)) == 1 else MIXED_DTYPES,
        is_aligned=all(pointer % ALIGNMENT_BYTES == 0 for pointer in pointers),
        chunks=chunks,
    )


def _cut(elements: tuple[int, ...], chunk_elements: int, beside: torch.Tensor) -> TensorChunks:
    sizes = np.array(elements, dtype=np.int64)
    counts = -(-sizes // chunk_elements)
    tensors = np.repeat(np.arange(len(sizes), dtype=np.int32), counts)
    first = np.cumsum(counts) - counts
    starts = (np.arange(len(tensors), dtype=np.int64) - first[tensors]) * chunk_elements
    lengths = np.minimum(sizes[tensors] - starts, chunk_elements).astype(np.int32)
    return TensorChunks(
        elements=elements,
        chunk_elements=chunk_elements,
        num_chunks=len(tensors),
        tensors=_on_device(tensors, beside.device),
        starts=_on_device(starts, beside.device),
        lengths=_on_device(lengths, beside.device),
    )


def _on_device(
    table: "np.ndarray[tuple[int], np.dtype[np.generic]]", device: torch.device
) -> torch.Tensor:
    there = torch.from_numpy(table)
    if device.type != "cuda":
        return there.to(device)
    # From pinned memory the copy does not wait for what the device is busy with; torch keeps the
    # pinned block until the copy is done.
    return there.pin_memory().to(device, non_blocking=True)


@triton.jit
def find_chunk(chunk_tensors, chunk_starts, chunk_lengths, index):
    """Look up chunk `index`: its tensor, its first element there, how many elements it has."""
    tensor = tl.load(chunk_tensors + index)
    start = tl.multiple_of(tl.load(chunk_starts + index), 16)
    return tensor, start, tl.load(chunk_lengths + index)


@triton.jit
def load_tensor_pointer(addresses, tensor, TYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """Return the address of a tensor of the list as a pointer to elements of `TYPE`."""
    pointer = tl.load(addresses + tensor).to(tl.pointer_type(TYPE))
    if ALIGNED:
        # With this said, and no mask, a thread moves 16 bytes at a time.
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def load_tile(pointer, length, TILE: tl.constexpr):
    """Load `TILE` elements of which the first `length` exist; 0 for the others.

    A mask that may change within 16 bytes would make every access a single element, therefore
    whole tiles go without one.
    """
    lane = tl.arange(0, TILE)
    if length >= TILE:
        value = tl.load(pointer + lane)
    else:
        value = tl.load(pointer + lane, mask=lane < length, other=0)
    return value
