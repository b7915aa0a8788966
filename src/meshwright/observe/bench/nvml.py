"""NVIDIA's management library, asked directly: it comes with every driver, and needs no package.

Whatever it does not answer is None. Devices are found by their UUID, because the library counts all
GPUs of a machine, and torch only those that `CUDA_VISIBLE_DEVICES` leaves.
"""

import ctypes
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

LIBRARY = "libnvidia-ml.so.1"
# Numbers of nvml.h.
_CLOCK_SM, _TEMPERATURE_GPU, _UNCORRECTED, _SINCE_BOOT = 1, 0, 1, 0


@cache
def library() -> Any:
    """Return the library, ready to be asked, or None where there is none."""
    try:
        found = ctypes.CDLL(LIBRARY)
    except OSError:
        return None
    return None if found.nvmlInit_v2() else found


def driver_version() -> str:
    """Return what the driver calls itself; empty where there is none."""
    found = library()
    text = ctypes.create_string_buffer(96)
    if found is None or found.nvmlSystemGetDriverVersion(text, ctypes.c_uint(96)):
        return ""
    return text.value.decode()


class Gpu:
    """One GPU of this machine."""

    def __init__(self, device: "torch.device", nvml: Any = None) -> None:
        self._nvml = library() if nvml is None else nvml
        self._handle = None if self._nvml is None else self._find(device)

    def _find(self, device: "torch.device") -> Any:
        import torch

        handle = ctypes.c_void_p()
        number = device.index or 0
        uuid = getattr(torch.cuda.get_device_properties(number), "uuid", None)
        if uuid is not None:
            name = f"GPU-{uuid}".encode()
            if not self._nvml.nvmlDeviceGetHandleByUUID(name, ctypes.byref(handle)):
                return handle
        fault = self._nvml.nvmlDeviceGetHandleByIndex_v2(number, ctypes.byref(handle))
        return None if fault else handle

    @property
    def answers(self) -> bool:
        """Whether the library knows it."""
        return self._handle is not None

    def clock_mhz(self) -> float | None:
        """Of the streaming multiprocessors, now."""
        return self._number("nvmlDeviceGetClockInfo", _CLOCK_SM)

    def most_clock_mhz(self) -> float | None:
        """Of the streaming multiprocessors, at most."""
        return self._number("nvmlDeviceGetMaxClockInfo", _CLOCK_SM)

    def power_w(self) -> float | None:
        """What it draws now."""
        found = self._number("nvmlDeviceGetPowerUsage")
        return None if found is None else found / 1e3

    def power_limit_w(self) -> float | None:
        """What it may draw."""
        found = self._number("nvmlDeviceGetEnforcedPowerLimit")
        return None if found is None else found / 1e3

    def temperature_c(self) -> float | None:
        """Of the chip, now."""
        return self._number("nvmlDeviceGetTemperature", _TEMPERATURE_GPU)

    def held_back(self) -> int | None:
        """Bits that say what holds the clock back."""
        found = self._number("nvmlDeviceGetCurrentClocksThrottleReasons", kind=ctypes.c_ulonglong)
        return None if found is None else int(found)

    def uncorrected_errors(self) -> float | None:
        """Errors of the memory that could not be mended since the driver was loaded."""
        name = "nvmlDeviceGetTotalEccErrors"
        return self._number(name, _UNCORRECTED, _SINCE_BOOT, kind=ctypes.c_ulonglong)

    def link_width(self) -> tuple[float, float] | None:
        """Lanes to the host, as they are and as the device has them."""
        now = self._number("nvmlDeviceGetCurrPcieLinkWidth")
        most = self._number("nvmlDeviceGetMaxPcieLinkWidth")
        return None if now is None or most is None else (now, most)

    def _number(self, name: str, *words: int, kind: Any = ctypes.c_uint) -> float | None:
        if self._handle is None:
            return None
        value = kind()
        try:
            call = getattr(self._nvml, name)
        except AttributeError:  # an older driver
            return None
        return None if call(self._handle, *words, ctypes.byref(value)) else float(value.value)
