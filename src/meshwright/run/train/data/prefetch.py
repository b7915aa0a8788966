"""Makes batches in background threads and hands them out in order.

Threads, not processes: making a batch is a few hundred numpy calls that copy from mapped files, and
numpy lets go of the interpreter while it copies. `benchmarks/train_data.py` measures both the rate
of a thread and how long a busy consumer waits.

On a GPU each batch is made in pinned memory that is used again once its copy has ended; the copy is
queued on the consumer's current stream and the host does not wait for it. A fault in a thread is
raised to the consumer when it asks for that step. Threads end when the loader is closed or
forgotten.
"""

import threading
import time
import weakref
from types import TracebackType
from typing import Protocol

import torch

from meshwright.run.train.data.batch import BatchBuffers, TrainBatch

_LAST_WORDS_S = 5.0
"""How long a thread is waited for: one that hangs in a dead file system dies with the process."""


class BatchFactory(Protocol):
    """Makes the batch of a step."""

    def __call__(self, step: int, into: BatchBuffers | None = None) -> TrainBatch:
        """Return the batch, made in given memory or in new."""


class BufferFactory(Protocol):
    """Makes memory for a batch."""

    def __call__(self, *, pinned: bool = False) -> BatchBuffers:
        """Return it."""


class DeviceCopy(Protocol):
    """A copy on its way to a device."""

    def synchronize(self) -> None:
        """Wait until it has ended."""


class DeviceSender(Protocol):
    """Sends batches to a device out of memory that is used again."""

    pinned: bool
    """Whether that memory must be pinned."""

    def send(self, batch: TrainBatch) -> tuple[TrainBatch, DeviceCopy]:
        """Begin to copy a batch, and return it as it will be there."""


class CudaSender:
    """Queues copies on the current stream of the thread that asks for the batch."""

    pinned = True

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def send(self, batch: TrainBatch) -> tuple[TrainBatch, DeviceCopy]:
        """Queue the copy; work queued after it finds the batch there."""
        moved = batch.to(self._device, non_blocking=True)
        ended = torch.cuda.Event()  # type: ignore[no-untyped-call]
        ended.record(torch.cuda.current_stream(self._device))
        return moved, ended


class _Slot:
    """Memory of one batch, and the copy that may still read from it."""

    def __init__(self, buffers: BatchBuffers) -> None:
        self.buffers = buffers
        self.copy: DeviceCopy | None = None

    def wait(self) -> None:
        """Wait until the last copy out of this memory has ended."""
        if self.copy is not None:
            self.copy.synchronize()


class _Shared:
    """What the loader and its threads share, under one lock."""

    def __init__(self, first: int, until: int | None, ahead: int, slots: list[_Slot]) -> None:
        self.changed = threading.Condition()
        self.next_made = first
        self.next_taken = first
        self.until = until
        self.ahead = ahead
        self.ready: dict[int, tuple[TrainBatch, _Slot | None] | BaseException] = {}
        self.slots = slots
        self.reuses = bool(slots)
        self.closed = False

    def may_make(self) -> bool:
        """Tell whether a thread should begin another step."""
        if self.until is not None and self.next_made >= self.until:
            return False
        room = bool(self.slots) or not self.reuses
        return room and self.next_made < self.next_taken + self.ahead


def _work(shared: _Shared, make: BatchFactory) -> None:
    """Make one step after the other until the loader is closed."""
    while True:
        with shared.changed:
            while not shared.closed and not shared.may_make():
                shared.changed.wait()
            if shared.closed:
                return
            step = shared.next_made
            shared.next_made += 1
            slot = shared.slots.pop() if shared.reuses else None
        made: tuple[TrainBatch, _Slot | None] | BaseException
        try:
            if slot is not None:
                slot.wait()
            made = (make(step, slot.buffers if slot else None), slot)
        except BaseException as error:  # noqa: BLE001 - whatever it is, the consumer must hear of it
            made = error
        with shared.changed:
            shared.ready[step] = made
            shared.changed.notify_all()


def _close(shared: _Shared) -> None:
    with shared.changed:
        shared.closed = True
        shared.changed.notify_all()


class PrefetchLoader:
    """An iterator over batches on a device."""

    wait_s: float
    """Seconds that the last batch was waited for."""
    total_wait_s: float
    """Seconds that all batches were waited for."""

    def __init__(
        self,
        make: BatchFactory,
        memory: BufferFactory,
        *,
        first: int = 0,
        until: int | None = None,
        sender: DeviceSender | None = None,
        ahead: int = 4,
        workers: int = 1,
    ) -> None:
        self.wait_s = self.total_wait_s = 0.0
        self._sender = sender
        slots = []
        if sender is not None:
            # One more than is made ahead: the consumer's copy may still run.
            slots = [_Slot(memory(pinned=sender.pinned)) for _ in range(ahead + 1)]
        self._shared = _Shared(first, until, ahead, slots)
        # Threads hold what they share but not the loader, so that one forgotten is closed.
        self._threads = [
            threading.Thread(
                target=_work, args=(self._shared, make), name=f"data-{number}", daemon=True
            )
            for number in range(min(workers, ahead))
        ]
        for thread in self._threads:
            thread.start()
        self._finalizer = weakref.finalize(self, _close, self._shared)

    def __iter__(self) -> "PrefetchLoader":
        return self

    def __next__(self) -> TrainBatch:
        made = self._take()
        if isinstance(made, BaseException):
            self.close()
            raise made
        batch, slot = made
        if slot is None or self._sender is None:
            return batch
        moved, slot.copy = self._sender.send(batch)
        shared = self._shared
        with shared.changed:
            shared.slots.insert(0, slot)
            shared.changed.notify_all()
        return moved

    def _take(self) -> tuple[TrainBatch, _Slot | None] | BaseException:
        shared = self._shared
        began = time.perf_counter()
        with shared.changed:
            step = shared.next_taken
            if shared.until is not None and step >= shared.until:
                raise StopIteration
            while step not in shared.ready and not shared.closed:
                shared.changed.wait()
            if shared.closed:
                raise RuntimeError(f"the loader was closed before step {step} was taken")
            made = shared.ready.pop(step)
            shared.next_taken += 1
            shared.changed.notify_all()
        self.wait_s = time.perf_counter() - began
        self.total_wait_s += self.wait_s
        if isinstance(made, BaseException):
            made.add_note(f"while making the batch of step {step}")
        return made

    def close(self) -> None:
        """End the threads; a batch that one of them is making is finished first, if it can be."""
        self._finalizer()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(_LAST_WORDS_S)

    def __enter__(self) -> "PrefetchLoader":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
