"""Samples of the hardware and the processes under a job, and what changed in them.

Knows no driver: `nvml` and `process_usage` take the samples.
"""

from collections.abc import Callable, Iterable, Sequence
from statistics import median
from typing import TypeVar

import msgspec

_T = TypeVar("_T")
MIN_SAMPLES = 3
"""Samples on either side that a change is told from."""
MIN_CLOCK_DROP = 0.03
MIN_CORES_INCREASE = 0.5


class GpuSample(msgspec.Struct, frozen=True):
    """One GPU at one moment; None where the driver does not say."""

    index: int
    utilization: float | None = None
    """Part of the last second in which any kernel ran."""
    memory_bytes: int | None = None
    power_w: float | None = None
    temperature_c: float | None = None
    clock_mhz: float | None = None
    throttle_reasons: tuple[str, ...] = ()
    """Names of NVML's reasons, such as `hw_thermal_slowdown`."""


class HardwareSample(msgspec.Struct, frozen=True):
    """One moment."""

    time_s: float
    """Since 1970."""
    gpus: tuple[GpuSample, ...] = ()
    job_cores: float | None = None
    """Processor time that the watched processes took, per second."""
    machine_cores: float | None = None
    """The same of the whole machine."""
    memory_bytes: int | None = None
    """Resident memory of the watched processes."""


def format_throttle_reason(reason: str) -> str:
    """Return `HW thermal slowdown` for `hw_thermal_slowdown`."""
    part, _, rest = reason.partition("_")
    words = f"{part.upper()}_{rest}" if part in ("hw", "sw") else reason
    return words.replace("_", " ")


def describe_changes(
    before: Sequence[HardwareSample], after: Sequence[HardwareSample]
) -> tuple[str, ...]:
    """What in the hardware may explain that steps became slower, in words."""
    if len(before) < MIN_SAMPLES or len(after) < MIN_SAMPLES:
        return ()
    found = []
    for index in sorted({gpu.index for sample in after for gpu in sample.gpus}):
        old, new = _gpu(before, index), _gpu(after, index)
        was, now = (_middle(one, lambda gpu: gpu.clock_mhz) for one in (old, new))
        if was and now and now < (1 - MIN_CLOCK_DROP) * was:
            found.append(f"GPU {index}'s clock fell from {was:.0f} to {now:.0f} MHz")
        found += [
            f"GPU {index}: clocks throttled: {format_throttle_reason(reason)}"
            for reason in sorted({reason for gpu in new for reason in gpu.throttle_reasons})
            if _share(new, reason) > _share(old, reason) + 0.5
        ]
    was, now = (_middle(one, _others) for one in (before, after))
    if was is not None and now is not None and now > was + MIN_CORES_INCREASE:
        found.append(f"other processes take {now:.1f} cores, {max(was, 0):.1f} before")
    return tuple(found)


def _gpu(samples: Iterable[HardwareSample], index: int) -> list[GpuSample]:
    return [gpu for sample in samples for gpu in sample.gpus if gpu.index == index]


def _share(gpus: Sequence[GpuSample], reason: str) -> float:
    return sum(reason in gpu.throttle_reasons for gpu in gpus) / len(gpus) if gpus else 0.0


def _others(sample: HardwareSample) -> float | None:
    if sample.machine_cores is None or sample.job_cores is None:
        return None
    return sample.machine_cores - sample.job_cores


def _middle(of: Iterable[_T], value: Callable[[_T], float | None]) -> float | None:
    found = [said for one in of if (said := value(one)) is not None]
    return median(found) if found else None


class HardwareSummary(msgspec.Struct, frozen=True):
    """Medians over the samples that were kept."""

    gpus: tuple[GpuSample, ...] = ()
    job_cores: float | None = None
    machine_cores: float | None = None
    memory_bytes: int | None = None
    num_samples: int = 0


def summarize_samples(samples: Sequence[HardwareSample]) -> HardwareSummary:
    """Sum up samples: middles, the highest memory, and what held GPUs back in half of them."""
    gpus = []
    for index in sorted({gpu.index for sample in samples for gpu in sample.gpus}):
        own = _gpu(samples, index)
        reasons = sorted({reason for gpu in own for reason in gpu.throttle_reasons})
        gpus.append(
            GpuSample(
                index,
                _middle(own, lambda gpu: gpu.utilization),
                max(
                    (gpu.memory_bytes for gpu in own if gpu.memory_bytes is not None), default=None
                ),
                _middle(own, lambda gpu: gpu.power_w),
                _middle(own, lambda gpu: gpu.temperature_c),
                _middle(own, lambda gpu: gpu.clock_mhz),
                tuple(reason for reason in reasons if _share(own, reason) > 0.5),
            )
        )
    sizes = [one.memory_bytes for one in samples if one.memory_bytes is not None]
    return HardwareSummary(
        tuple(gpus),
        _middle(samples, lambda one: one.job_cores),
        _middle(samples, lambda one: one.machine_cores),
        max(sizes, default=None),
        len(samples),
    )
