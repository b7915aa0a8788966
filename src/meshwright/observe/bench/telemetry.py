"""What a GPU says of itself while it is measured: clock, power, heat, and what holds it back.

NVML is asked every few hundredths of a second by a thread of its own. Where there is no NVML, or
it does not answer, nothing is known and nothing is said.
"""

import threading
from statistics import median
from typing import Any

from meshwright.observe.bench.case import Telemetry

EVERY_S = 0.03
REASONS = {
    0x2: "clocks_set",
    0x4: "power_cap",
    0x8: "hardware_slowdown",
    0x10: "sync_boost",
    0x20: "software_thermal",
    0x40: "hardware_thermal",
    0x80: "power_brake",
}
"""Bits of NVML's clock event reasons; idling (0x1) holds nobody back."""


class Sampler:
    """Asks one GPU again and again while it is running."""

    def __init__(self, index: int = 0) -> None:
        self._nvml, self._gpu = _open(index)
        self._samples = list[tuple[float, float, float, int]]()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> "Sampler":
        """Begin to ask."""
        self._samples.clear()
        self._stop.clear()
        if self._nvml is not None:
            self._thread = threading.Thread(target=self._ask_on, daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Ask no more."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def telemetry(self) -> Telemetry | None:
        """Return what was seen since the beginning, or None where nobody answered."""
        if not self._samples:
            return None
        clocks, watts, degrees, bits = zip(*self._samples, strict=True)
        seen = 0
        for each in bits:
            seen |= each
        return Telemetry(
            clock_mhz=median(clocks),
            power_w=median(watts),
            temperature_c=max(degrees),
            throttle=tuple(name for bit, name in REASONS.items() if seen & bit),
        )

    def _ask_on(self) -> None:
        while True:
            sample = _ask(self._nvml, self._gpu)
            if sample is None:
                return
            self._samples.append(sample)
            if self._stop.wait(EVERY_S):
                return


def _open(index: int) -> tuple[Any, Any]:
    try:
        import pynvml  # type: ignore[import-not-found]

        pynvml.nvmlInit()
        return pynvml, pynvml.nvmlDeviceGetHandleByIndex(index)
    except Exception:  # noqa: BLE001  # no library, no driver or no such device: all the same here
        return None, None


def _ask(nvml: Any, gpu: Any) -> tuple[float, float, float, int] | None:
    try:
        return (
            float(nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_SM)),
            nvml.nvmlDeviceGetPowerUsage(gpu) / 1e3,
            float(nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU)),
            int(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(gpu)),
        )
    except nvml.NVMLError:
        return None
