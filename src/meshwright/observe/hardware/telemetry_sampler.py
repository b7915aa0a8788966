"""What a GPU says of itself while it is measured: clock, power, heat, and what holds it back.

NVML is asked every few hundredths of a second by a thread of its own. Where there is no NVML, or
it does not answer, nothing is known and nothing is said.
"""

import threading
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from meshwright.observe.hardware.nvml import NvmlDevice

if TYPE_CHECKING:
    import torch

SAMPLE_INTERVAL_S = 0.03
THROTTLE_REASON_BITS = {
    0x2: "applications_clocks_setting",
    0x4: "sw_power_cap",
    0x8: "hw_slowdown",
    0x10: "sync_boost",
    0x20: "sw_thermal_slowdown",
    0x40: "hw_thermal_slowdown",
    0x80: "hw_power_brake_slowdown",
}
"""Bits of NVML's clock event reasons by name; an idle GPU (0x1) is not throttled."""


class Telemetry(msgspec.Struct, frozen=True, kw_only=True):
    """What the device said of itself while something was measured."""

    clock_mhz: float | None = None
    """Of the streaming multiprocessors, the median."""
    power_w: float | None = None
    """The median."""
    temperature_c: float | None = None
    """The highest."""
    throttle_reasons: tuple[str, ...] = ()
    """Why the clock was held back at any time, such as `sw_power_cap`."""


class _Sample(NamedTuple):
    clock_mhz: float | None
    power_w: float | None
    temperature_c: float | None
    held_back: int | None


class TelemetrySampler:
    """Asks one GPU again and again while it is running."""

    def __init__(self, device: "torch.device", gpu: NvmlDevice | None = None) -> None:
        self._gpu = NvmlDevice(device) if gpu is None else gpu
        self._samples = list[_Sample]()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> "TelemetrySampler":
        """Begin to ask."""
        self._samples.clear()
        self._stop.clear()
        if self._gpu.is_available:
            self._thread = threading.Thread(target=self._ask_on, daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Ask no more."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def summarize(self) -> Telemetry | None:
        """Return what was seen since the beginning, or None where nobody answered."""
        if not self._samples:
            return None
        clocks, watts, degrees, bits = zip(*self._samples, strict=True)
        seen = 0
        for each in bits:
            seen |= each or 0
        return Telemetry(
            clock_mhz=_median(clocks),
            power_w=_median(watts),
            temperature_c=max((each for each in degrees if each is not None), default=None),
            throttle_reasons=tuple(
                name for bit, name in THROTTLE_REASON_BITS.items() if seen & bit
            ),
        )

    def _ask_on(self) -> None:
        gpu = self._gpu
        while True:
            sample = _Sample(
                gpu.clock_mhz(), gpu.power_w(), gpu.temperature_c(), gpu.throttle_reasons()
            )
            if all(each is None for each in sample):
                return
            self._samples.append(sample)
            if self._stop.wait(SAMPLE_INTERVAL_S):
                return


def _median(values: tuple[float | None, ...]) -> float | None:
    known = [each for each in values if each is not None]
    return median(known) if known else None
