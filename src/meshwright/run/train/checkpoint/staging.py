"""`StagingBuffers` and `stage_tensors`: copies of tensors in reused host memory.

A checkpoint is copied into equal pieces, in the order of its file. The writer takes each piece
once it is full and gives it back once it is on the disk, so a checkpoint can also pass through
fewer pieces than it fills. On CUDA the pieces are pinned and the copies are queued on the current
stream: later kernels of that stream wait for them, the host does not.
"""

from collections.abc import Callable, Iterable
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch

BUFFER_BYTES = 64 * 2**20
"""A power of two, as torch rounds pinned memory up to one; long enough for a disk's full rate."""


class StagedBuffer(NamedTuple):
    """A piece that holds data, or will once its copies are done."""

    buffer: torch.Tensor
    start: int
    """Byte of the data at which it starts."""
    length: int
    copy_event: torch.cuda.Event | None
    """Comes after the copies; None where they are already done."""

    def wait_for_bytes(self) -> memoryview:
        """Wait for the copies, and return the bytes."""
        if self.copy_event is not None:
            self.copy_event.synchronize()
        return view_as_memoryview(self.buffer[: self.length])


class StagingBuffers:
    """A bounded set of equal buffers."""

    def __init__(self, limit_bytes: int | None = None) -> None:
        self._limit_bytes = limit_bytes
        self._free: SimpleQueue[torch.Tensor] = SimpleQueue()
        self._count = 0
        self._pinned = False
        self.buffer_bytes = 0

    @property
    def total_bytes(self) -> int:
        """Host memory that they take."""
        return self._count * self.buffer_bytes

    def resize(self, data_bytes: int, *, pinned: bool) -> None:
        """Have enough pieces for so much data, or as many as the limit allows; none is in use."""
        needed = max(data_bytes, 1)
        if self._limit_bytes is None or needed <= self._limit_bytes:
            piece_bytes = min(BUFFER_BYTES, needed)
            count = -(-needed // piece_bytes)
        else:
            # Several, so that copying and writing go on side by side.
            piece_bytes = min(BUFFER_BYTES, max(self._limit_bytes // 4, 1))
            count = self._limit_bytes // piece_bytes
        if (piece_bytes, pinned) != (self.buffer_bytes, self._pinned):
            self._free, self._count = SimpleQueue(), 0
        self.buffer_bytes, self._pinned = piece_bytes, pinned
        while self._count < count:
            self._free.put(torch.empty(piece_bytes, dtype=torch.uint8, pin_memory=pinned))
            self._count += 1

    def prefault(self) -> None:
        """Write to every piece once: the system hands out memory only when it is written to."""
        for _ in range(self._count):
            self.release(self.acquire().zero_())

    def acquire(self) -> torch.Tensor:
        """Wait for a free piece."""
        return self._free.get()

    def release(self, memory: torch.Tensor) -> None:
        """Hand a piece back."""
        self._free.put(memory)


def stage_tensors(
    tensors: Iterable[torch.Tensor], pieces: StagingBuffers, send: Callable[[StagedBuffer], None]
) -> None:
    """Copy the tensors one after the other, sending each piece as soon as it is full."""
    memory: torch.Tensor | None = None
    start = length = 0
    queued = False

    def full() -> None:
        nonlocal memory, start, length, queued
        assert memory is not None
        copied = None
        if queued:
            copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            copied.record()
        send(StagedBuffer(memory, start, length, copied))
        memory, start, length, queued = None, start + length, 0, False

    try:
        for tensor in tensors:
            source = view_as_bytes(tensor)
            while source.numel():
                if memory is None:
                    memory = pieces.acquire()
                part = source[: memory.numel() - length]
                memory[length : length + part.numel()].copy_(part, non_blocking=True)
                length += part.numel()
                queued = queued or source.is_cuda
                source = source[part.numel() :]
                if length == memory.numel():
                    full()
        if memory is not None:
            full()
    finally:
        if memory is not None:
            pieces.release(memory)


def view_as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements as one row of bytes: a view where they lie together."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def view_as_memoryview(memory: torch.Tensor) -> memoryview:
    """Return a row of bytes in host memory as Python's own view of it."""
    row: Any = memory.numpy()  # typed as a buffer only from Python 3.12 on
    return memoryview(row)
