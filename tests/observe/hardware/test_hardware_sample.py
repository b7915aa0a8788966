# ruff: noqa: ARG002, N802 - the driver's names, and arguments that a fake has no use for
import ctypes
import os
from typing import Any

from meshwright.observe.hardware.hardware_sample import (
    GpuSample,
    HardwareSample,
    describe_changes,
    summarize_samples,
)
from meshwright.observe.hardware.nvml import NvmlDevices
from meshwright.observe.hardware.process_usage import ProcessUsage, compute_rates, read_usage


def samples(
    clock: float, reasons: tuple[str, ...] = (), others: float = 0.0
) -> list[HardwareSample]:
    gpu = GpuSample(0, 0.9, 5, 600.0, 60.0, clock, reasons)
    return [HardwareSample(float(second), (gpu,), 1.0, 1.0 + others, 100) for second in range(5)]


def test_lower_clocks_and_their_reason_are_told() -> None:
    found = describe_changes(samples(1980), samples(1410, ("sw_power_cap",)))
    assert found == (
        "GPU 0's clock fell from 1980 to 1410 MHz",
        "GPU 0: clocks throttled: SW power cap",
    )


def test_other_processes_that_came_are_told() -> None:
    assert describe_changes(samples(1980), samples(1980, others=2.0)) == (
        "other processes take 2.0 cores, 0.0 before",
    )


def test_the_same_and_too_little_say_nothing() -> None:
    assert describe_changes(samples(1980), samples(1975)) == ()
    assert describe_changes(samples(1980)[:2], samples(1000)) == ()


def test_summary_takes_middles_and_the_most_memory() -> None:
    found = summarize_samples(samples(1980, ("sw_power_cap",)))
    assert found.gpus == (GpuSample(0, 0.9, 5, 600.0, 60.0, 1980, ("sw_power_cap",)),)
    assert (found.job_cores, found.memory_bytes, found.num_samples) == (1.0, 100, 5)


class Driver:
    """NVML as its header describes it, with one GPU that does not know its power."""

    def nvmlDeviceGetCount_v2(self, count: Any) -> int:
        count._obj.value = 1
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index: int, handle: Any) -> int:
        handle._obj.value = 77
        return 0

    def nvmlDeviceGetUtilizationRates(self, handle: Any, rates: Any) -> int:
        rates._obj.gpu = 93
        return 0

    def nvmlDeviceGetMemoryInfo(self, handle: Any, memory: Any) -> int:
        memory._obj.used = 2**40
        return 0

    def nvmlDeviceGetPowerUsage(self, handle: Any, power: Any) -> int:
        return 3

    def nvmlDeviceGetTemperature(self, handle: Any, sensor: int, value: Any) -> int:
        value._obj.value = 61
        return 0

    def nvmlDeviceGetClockInfo(self, handle: Any, kind: int, value: Any) -> int:
        value._obj.value = 1755 if kind == 1 else 0
        return 0

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: Any, value: Any) -> int:
        assert isinstance(value._obj, ctypes.c_ulonglong)
        value._obj.value = 0x04 | 0x01
        return 0


def test_driver_is_asked_and_what_it_does_not_know_stays_open() -> None:
    assert NvmlDevices(Driver()).sample() == (
        GpuSample(0, 0.93, 2**40, None, 61, 1755, ("sw_power_cap",)),
    )


def test_host_tells_what_a_process_takes() -> None:
    taken = read_usage([os.getpid(), 2**22 + 1], 5.0)
    assert list(taken.cpu_s) == [os.getpid()]
    assert taken.memory_bytes > 1 << 20
    assert taken.machine_cpu_s is not None


def test_rates_are_between_two_looks() -> None:
    before = ProcessUsage(10.0, {1: 5.0, 2: 1.0}, 100.0, 7)
    after = ProcessUsage(12.0, {1: 8.0, 3: 9.0}, 106.0, 8)
    assert compute_rates(before, after) == (1.5, 3.0, 8)
