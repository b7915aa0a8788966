"""GPUs of this machine, asked through NVML, the library that comes with the driver.

Signatures and constants are those of NVML's header (docs.nvidia.com/deploy/nvml-api); a question
that a GPU does not answer leaves no metric.
"""

import ctypes
from collections.abc import Iterator
from typing import Any

from meshwright.fleet.exporter.metric_sample import MetricSample

_SM_CLOCK, _ON_DIE, _SUCCESS, _TOO_SMALL = 1, 0, 0, 7


class _Utilisation(ctypes.Structure):
    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


class _Memory(ctypes.Structure):
    _fields_ = (
        ("total", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    )


def read_gpu_metrics(library: Any, hostname: str) -> Iterator[MetricSample]:
    """Ask all GPUs; a GPU that has fallen off the bus is left out, and the others keep theirs."""
    count = ctypes.c_uint()
    if library.nvmlDeviceGetCount_v2(ctypes.byref(count)) != _SUCCESS:
        return
    for index in range(count.value):
        handle = ctypes.c_void_p()
        if library.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle)) == _SUCCESS:
            yield from _one(library, index, handle, hostname)


def _one(library: Any, index: int, handle: Any, hostname: str) -> Iterator[MetricSample]:
    labels = {
        "gpu": str(index),
        "uuid": _text(library, "nvmlDeviceGetUUID", handle),
        "modelName": _text(library, "nvmlDeviceGetName", handle),
        "hostname": hostname,
    }
    busy, memory = _Utilisation(), _Memory()
    figures: list[tuple[str, str, float | None]] = []
    if library.nvmlDeviceGetUtilizationRates(handle, ctypes.byref(busy)) == _SUCCESS:
        figures.append(("util_ratio", "Share of time in which a kernel ran", busy.gpu / 100))
    if library.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)) == _SUCCESS:
        figures.append(("memory_used_bytes", "Memory in use", float(memory.used)))
        figures.append(("memory_total_bytes", "Memory there is", float(memory.total)))
    power = _number(library, "nvmlDeviceGetPowerUsage", handle)
    clock = _number(library, "nvmlDeviceGetClockInfo", handle, _SM_CLOCK)
    figures += [
        ("power_watts", "Power drawn", None if power is None else power / 1e3),
        ("sm_clock_hertz", "Clock of the multiprocessors", None if clock is None else 1e6 * clock),
        ("temperature_celsius", "Temperature of the chip",
         _number(library, "nvmlDeviceGetTemperature", handle, _ON_DIE)),
        ("throttle_reasons", "Why clocks are held back, as NVML's bits",
         _number(library, "nvmlDeviceGetCurrentClocksThrottleReasons", handle,
                 kind=ctypes.c_ulonglong)),
        ("processes", "Processes that hold a context: none on a GPU that is held is waste",
         _processes(library, handle)),
    ]  # fmt: skip
    for name, text, value in figures:
        if value is not None:
            yield MetricSample(f"mw_gpu_{name}", text, labels, value)


def _processes(library: Any, handle: Any) -> float | None:
    """Count processes; with no room given, NVML answers how many there are."""
    count = ctypes.c_uint(0)
    ask = getattr(library, "nvmlDeviceGetComputeRunningProcesses", None)
    if ask is None:
        return None
    answer = ask(handle, ctypes.byref(count), None)
    return float(count.value) if answer in (_SUCCESS, _TOO_SMALL) else None


def _number(
    library: Any, name: str, handle: Any, *given: int, kind: Any = ctypes.c_uint
) -> float | None:
    ask, answer = getattr(library, name, None), kind()
    if ask is None or ask(handle, *given, ctypes.byref(answer)) != _SUCCESS:
        return None
    return float(answer.value)


def _text(library: Any, name: str, handle: Any) -> str:
    text = ctypes.create_string_buffer(96)
    if getattr(library, name)(handle, text, ctypes.c_uint(96)) != _SUCCESS:
        return ""
    return text.value.decode("utf-8", "replace")
