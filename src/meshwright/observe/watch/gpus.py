"""Asks the driver what the GPUs do, through NVML, the library that the driver brings along.

Called from the watcher only, never from the job. Signatures and constants are those of NVML's
header (docs.nvidia.com/deploy/nvml-api); a question that a GPU does not answer leaves a None.
"""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from meshwright.observe.watch.hardware import Gpu

_LIBRARIES = ("libnvidia-ml.so.1", "libnvidia-ml.so")
_SM_CLOCK = 1
_ON_DIE = 0
REASONS = {
    0x02: "fixed application clocks",
    0x04: "its power limit",
    0x08: "a hardware slowdown",
    0x10: "sync boost",
    0x20: "heat (software)",
    0x40: "heat (hardware)",
    0x80: "the power brake",
    0x100: "display clocks",
}
"""NVML's reasons for a lower clock; that a GPU idles (0x01) is none."""


class _Utilisation(ctypes.Structure):
    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


class _Memory(ctypes.Structure):
    _fields_ = (
        ("total", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    )


class Gpus:
    """The GPUs of this machine."""

    def __init__(self, library: Any) -> None:
        self._library = library
        self._handles: list[ctypes.c_void_p] = []
        count = ctypes.c_uint()
        if library.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0:
            return
        for index in range(count.value):
            handle = ctypes.c_void_p()
            if library.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle)) == 0:
                self._handles.append(handle)

    def sample(self) -> tuple[Gpu, ...]:
        """Ask every GPU."""
        return tuple(self._one(index, handle) for index, handle in enumerate(self._handles))

    def _one(self, index: int, handle: ctypes.c_void_p) -> Gpu:
        ask, library = self._number, self._library
        busy, memory = _Utilisation(), _Memory()
        answered = library.nvmlDeviceGetUtilizationRates(handle, ctypes.byref(busy)) == 0
        sized = library.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)) == 0
        power_mw = ask("nvmlDeviceGetPowerUsage", handle)
        reasons = ask(
            "nvmlDeviceGetCurrentClocksThrottleReasons", handle, kind=ctypes.c_ulonglong
        )  # fmt: skip
        return Gpu(
            index,
            busy.gpu / 100 if answered else None,
            memory.used if sized else None,
            power_mw / 1000 if power_mw is not None else None,
            ask("nvmlDeviceGetTemperature", handle, _ON_DIE),
            ask("nvmlDeviceGetClockInfo", handle, _SM_CLOCK),
            tuple(text for bit, text in REASONS.items() if (reasons or 0) & bit),
        )

    def _number(self, name: str, *given: Any, kind: Any = ctypes.c_uint) -> int | None:
        answer = kind()
        function = getattr(self._library, name, None)
        if function is None or function(*given, ctypes.byref(answer)) != 0:
            return None
        return int(answer.value)


@contextmanager
def open_gpus() -> Iterator[Gpus | None]:
    """Open the driver's library; None where this machine has no GPU of NVIDIA's."""
    library = _load()
    if library is None or library.nvmlInit_v2() != 0:
        yield None
        return
    try:
        yield Gpus(library)
    finally:
        library.nvmlShutdown()


def _load() -> Any:
    for name in _LIBRARIES:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    return None
