"""`Readback`: numbers on their way from the device to the host, to be read when they are there.

Asking a tensor for its value queues a copy behind everything that was queued before, so the host
would wait for the step it has just started. Here the copy is queued with the step it belongs to,
into pinned memory, and only that step is waited for.
"""

from collections.abc import Mapping

import torch
from torch import Tensor


class Readback:
    """Named scalars of one step."""

    def __init__(self, scalars: Mapping[str, Tensor]) -> None:
        """Queue the copy; nothing is waited for."""
        self._names = tuple(scalars)
        # Doubles hold every float and every count exactly.
        there = torch.stack([each.detach().double().reshape(()) for each in scalars.values()])
        self._done: torch.cuda.Event | None = None
        if not there.is_cuda:
            self._values = there
            return
        self._values = torch.empty(there.shape, dtype=there.dtype, pin_memory=True)
        self._values.copy_(there, non_blocking=True)
        self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._done.record(torch.cuda.current_stream(there.device))

    def read(self) -> dict[str, float]:
        """Wait for the step that left the numbers, and return them."""
        if self._done is not None:
            self._done.synchronize()
        return dict(zip(self._names, self._values.tolist(), strict=True))
