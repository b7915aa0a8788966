"""`AsyncMetricReader`: copies metrics from the device to the host without a synchronization.

Asking a tensor for its value queues a copy behind everything that was queued before, so the host
would wait for the step it has just started. Here the copy is queued with the step it belongs to,
into pinned memory, and only that step is waited for. A `DeviceTimestamp` is when the device got
there, which the host's clock does not tell: it may look early or late.
"""

import time
from collections.abc import Mapping

import torch
from torch import Tensor


class DeviceTimestamp:
    """When a device reaches what has been queued so far."""

    def __init__(self, device: torch.device) -> None:
        self.host_s = time.perf_counter()
        self.event: torch.cuda.Event | None = None
        if device.type == "cuda":
            self.event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            self.event.record(torch.cuda.current_stream(device))

    def wait(self) -> None:
        """Wait until the device is there."""
        if self.event is not None:
            self.event.synchronize()

    def elapsed_since_s(self, earlier: "DeviceTimestamp") -> float:
        """Return the time since an earlier moment of the same device; both must have come."""
        if self.event is None or earlier.event is None:
            return self.host_s - earlier.host_s
        return float(earlier.event.elapsed_time(self.event)) / 1e3


class AsyncMetricReader:
    """Named scalars of one step."""

    def __init__(self, scalars: Mapping[str, Tensor]) -> None:
        """Queue the copy; nothing is waited for."""
        self._names = tuple(scalars)
        # Doubles hold every float and every count exactly.
        there = torch.stack([each.detach().double().reshape(()) for each in scalars.values()])
        self._values = there
        if there.is_cuda:
            self._values = torch.empty(there.shape, dtype=there.dtype, pin_memory=True)
            self._values.copy_(there, non_blocking=True)
        self.done_timestamp = DeviceTimestamp(there.device)

    def read(self) -> dict[str, float]:
        """Wait for the step that left the numbers, and return them."""
        self.done_timestamp.wait()
        return dict(zip(self._names, self._values.tolist(), strict=True))
