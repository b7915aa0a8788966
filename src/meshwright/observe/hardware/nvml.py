"""NVIDIA's management library, asked directly: it comes with every driver, and needs no package.

Whatever it does not answer is None. Devices are found by their UUID, because the library counts all
GPUs of a machine, and torch only those that `CUDA_VISIBLE_DEVICES` leaves.
"""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

from meshwright.observe.hardware.hardware_sample import GpuSample

if TYPE_CHECKING:
    import torch


LIBRARY = "libnvidia-ml.so.1"

# Numbers of nvml.h.
_CLOCK_SM, _TEMPERATURE_GPU, _UNCORRECTED, _SINCE_BOOT = 1, 0, 1, 0


@cache
def load_nvml() -> Any:
    """Return the library, ready to be asked, or None where there is none."""
    try:
        found = ctypes.CDLL(LIBRARY)
    except OSError:
        return None
    return None if found.nvmlInit_v2() else found


def read_driver_version() -> str:
    """Return what the driver calls itself; empty where there is none."""
    found = load_nvml()
    text = ctypes.create_string_buffer(96)
    if found is None or found.nvmlSystemGetDriverVersion(text, ctypes.c_uint(96)):
        return ""
    return text.value.decode()


class NvmlDevice:
    """One GPU of this machine."""

    def __init__(self, device: "torch.device", nvml: Any = None) -> None:
        self._nvml = load_nvml() if nvml is None else nvml
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
    def is_available(self) -> bool:
        """Whether the library knows it."""
        return self._handle is not None

    def clock_mhz(self) -> float | None:
        """Of the streaming multiprocessors, now."""
        return self._number("nvmlDeviceGetClockInfo", _CLOCK_SM)

    def max_clock_mhz(self) -> float | None:
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

    def throttle_reasons(self) -> int | None:
        """Bits that say what holds the clock back."""
        found = self._number("nvmlDeviceGetCurrentClocksThrottleReasons", kind=ctypes.c_ulonglong)
        return None if found is None else int(found)

    def uncorrected_ecc_errors(self) -> float | None:
        """Errors of the memory that could not be mended since the driver was loaded."""
        name = "nvmlDeviceGetTotalEccErrors"
        return self._number(name, _UNCORRECTED, _SINCE_BOOT, kind=ctypes.c_ulonglong)

    def pcie_link_width(self) -> tuple[float, float] | None:
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


_LIBRARIES = ("libnvidia-ml.so.1", "libnvidia-ml.so")

_SM_CLOCK = 1

_ON_DIE = 0

THROTTLE_REASONS = {
    0x02: "applications_clocks_setting",
    0x04: "sw_power_cap",
    0x08: "hw_slowdown",
    0x10: "sync_boost",
    0x20: "sw_thermal_slowdown",
    0x40: "hw_thermal_slowdown",
    0x80: "hw_power_brake_slowdown",
    0x100: "display_clock_setting",
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


class NvmlDevices:
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

    def sample(self) -> tuple[GpuSample, ...]:
        """Ask every GPU."""
        return tuple(self._one(index, handle) for index, handle in enumerate(self._handles))

    def _one(self, index: int, handle: ctypes.c_void_p) -> GpuSample:
        ask, library = self._number, self._library
        busy, memory = _Utilisation(), _Memory()
        answered = library.nvmlDeviceGetUtilizationRates(handle, ctypes.byref(busy)) == 0
        sized = library.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)) == 0
        power_mw = ask("nvmlDeviceGetPowerUsage", handle)
        reasons = ask(
            "nvmlDeviceGetCurrentClocksThrottleReasons", handle, kind=ctypes.c_ulonglong
        )  # fmt: skip
        return GpuSample(
            index,
            busy.gpu / 100 if answered else None,
            memory.used if sized else None,
            power_mw / 1000 if power_mw is not None else None,
            ask("nvmlDeviceGetTemperature", handle, _ON_DIE),
            ask("nvmlDeviceGetClockInfo", handle, _SM_CLOCK),
            tuple(text for bit, text in THROTTLE_REASONS.items() if (reasons or 0) & bit),
        )

    def _number(self, name: str, *given: Any, kind: Any = ctypes.c_uint) -> int | None:
        answer = kind()
        function = getattr(self._library, name, None)
        if function is None or function(*given, ctypes.byref(answer)) != 0:
            return None
        return int(answer.value)


@contextmanager
def open_nvml() -> Iterator[NvmlDevices | None]:
    """Open the driver's library; None where this machine has no GPU of NVIDIA's."""
    library = _load()
    if library is None or library.nvmlInit_v2() != 0:
        yield None
        return
    try:
        yield NvmlDevices(library)
    finally:
        library.nvmlShutdown()


def _load() -> Any:
    for name in _LIBRARIES:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    return None
