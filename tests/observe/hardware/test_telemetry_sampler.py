"""NVML is asked without a package; what it does not answer is not known."""

import ctypes
import time
from typing import Any

import pytest

from meshwright.observe.hardware import nvml
from meshwright.observe.hardware.telemetry_sampler import TelemetrySampler

torch = pytest.importorskip("torch", reason="devices are torch's")


class Library:
    """What the driver's library does, by its conventions: 0 is success, results are pointers."""

    def __init__(self) -> None:
        self.asked_uuid = b""

    def nvmlDeviceGetHandleByUUID(self, name: bytes, handle: Any) -> int:  # noqa: N802
        self.asked_uuid = name
        return self._tell(handle, 7)

    def nvmlDeviceGetClockInfo(self, _handle: Any, kind: int, out: Any) -> int:  # noqa: N802
        assert kind == 1
        return self._tell(out, 1980)

    def nvmlDeviceGetPowerUsage(self, _handle: Any, out: Any) -> int:  # noqa: N802
        return self._tell(out, 698_500)

    def nvmlDeviceGetTemperature(self, _handle: Any, _kind: int, _out: Any) -> int:  # noqa: N802
        return 3  # not supported

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, _handle: Any, out: Any) -> int:  # noqa: N802
        return self._tell(out, 0x4 | 0x1)

    @staticmethod
    def _tell(out: Any, value: int) -> int:
        out._obj.value = value
        return 0


class Properties:
    uuid = "4f0c"


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> nvml.NvmlDevice:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: Properties())
    library = Library()
    found = nvml.NvmlDevice(torch.device("cuda", 0), library)
    assert library.asked_uuid == b"GPU-4f0c"
    return found


def test_answers_have_units_and_what_is_not_answered_is_none(gpu: nvml.NvmlDevice) -> None:
    assert gpu.is_available
    assert (gpu.clock_mhz(), gpu.power_w(), gpu.temperature_c()) == (1980.0, 698.5, None)
    assert gpu.uncorrected_ecc_errors() is None  # a driver without the call
    assert gpu.pcie_link_width() is None


def test_samples_are_summed_up(gpu: nvml.NvmlDevice) -> None:
    with TelemetrySampler(torch.device("cuda", 0), gpu) as sampler:
        time.sleep(0.01)
    found = sampler.summarize()
    assert found is not None
    assert (found.clock_mhz, found.power_w, found.temperature_c) == (1980.0, 698.5, None)
    assert found.throttle_reasons == ("sw_power_cap",)


def test_without_the_library_nothing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(_name: str) -> None:
        raise OSError

    nvml.load_nvml.cache_clear()
    monkeypatch.setattr(ctypes, "CDLL", absent)
    try:
        assert nvml.read_driver_version() == ""
        with TelemetrySampler(torch.device("cuda", 0)) as sampler:
            pass
        assert sampler.summarize() is None
    finally:
        nvml.load_nvml.cache_clear()
