"""HTA's queue lengths, memory bandwidth and launch statistics."""

from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from meshwright.observe.analyze.hta.hta_frame import MEMORY, HtaFrame, sort_as_hta
from meshwright.observe.analyze.spans.intervals import Ints
from meshwright.timeline.readers.parsing.arrow_arrays import take_rows
from meshwright.timeline.timeline import Timeline

_ENQUEUE = (
    "cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cudaMemcpyAsync",
    "cudaMemsetAsync", "runFunction - job_prep_and_submit_for_execution", "hipLaunchKernel",
    "hipExtModuleLaunchKernel", "hipMemsetAsync", "hipMemcpyAsync", "hipMemcpyWithStream",
)  # fmt: skip
"""Calls that HTA counts into a stream's queue."""
_LAUNCH = (
    "cudaLaunchKernel", "cudaLaunchKernelExC", "cudaMemcpyAsync", "cudaMemsetAsync",
    "runFunction - job_prep_and_submit_for_execution",
)  # fmt: skip
"""Calls whose launches HTA times: fewer than it counts into queues."""


class SeriesDescription(NamedTuple):
    """What pandas' `describe` says of a series."""

    num: int
    mean: float
    std: float | None
    min: float
    p25: float
    median: float
    p75: float
    max: float


class HtaQueueLength(NamedTuple):
    """A row of HTA's `get_queue_length_summary`."""

    rank: int
    stream: int
    length: SeriesDescription


class HtaMemoryBandwidth(NamedTuple):
    """A row of HTA's `get_memory_bw_summary`."""

    rank: int
    name: str
    """`Memset`, or a copy and its direction: `Memcpy DtoH`."""
    gb_per_s: SeriesDescription


class HtaLaunchStats(NamedTuple):
    """HTA's `get_cuda_kernel_launch_stats`, column by column, one entry per launch."""

    rank: int
    correlation: Ints
    host_us: Ints
    device_us: Ints
    delay_us: Ints
    """From the end of the call to the start on the device, not below 0."""


def get_queue_lengths(frame: HtaFrame) -> tuple[HtaQueueLength, ...] | None:
    """How many launches wait or run on each stream, at every change; None where HTA gives up."""
    device = frame.mask_device()
    calls = frame.take(frame.match_names(_ENQUEUE) & frame.has_correlation)
    left, right = _join(calls.correlation, device.correlation)
    of_calls = np.flatnonzero(np.isin(device.correlation, calls.correlation))
    unmatched = ~np.isin(calls.correlation, device.correlation)
    if left.size + int(unmatched.sum()) != of_calls.size:
        return None
    time = np.append(calls.ts[left], device.ts[of_calls])
    stream = np.append(device.stream[right], device.stream[of_calls])
    change = np.append(np.ones(left.size), np.full(of_calls.size, -1)).astype(np.int64)
    order = sort_as_hta(time)
    stream, change = stream[order], change[order]
    return tuple(
        HtaQueueLength(frame.rank, number, describe(np.cumsum(change[stream == number])))
        for number in np.unique(stream).tolist()
    )


def get_memory_bandwidth(part: Timeline, frame: HtaFrame) -> tuple[HtaMemoryBandwidth, ...]:
    """The bandwidth of copies and fills that run at once, at every change, where above 0."""
    copies = frame.mask_device().match_kernel_type(MEMORY)
    rate = _rates(part, copies)
    length = np.where(copies.duration == 0, 1, copies.duration)
    time = np.append(copies.ts, copies.ts + length)
    change = np.append(rate, -rate)
    order = sort_as_hta(time)
    kinds = [_copy_kind(name) for name in copies.names]
    distinct = sorted({kinds[code] for code in np.unique(copies.name).tolist()})
    found = []
    for kind in distinct:
        has = np.array([name == kind for name in kinds] + [False], dtype=np.bool_)[copies.name]
        running = np.cumsum(change[order][np.append(has, has)[order]])
        if np.any(running > 0):
            found.append(HtaMemoryBandwidth(frame.rank, kind, describe(running[running > 0])))
    return tuple(found)


def get_launch_stats(frame: HtaFrame) -> HtaLaunchStats:
    """Length of call and kernel, and the delay between, for each launch."""
    wanted = frame.correlation[frame.match_names(_LAUNCH)]
    known = np.isin(frame.correlation, wanted)
    host = frame.take(known & (frame.stream == -1))
    device = frame.take(known & (frame.stream != -1))
    left, right = _join(host.correlation, device.correlation)
    delay = device.ts[right] - host.ts[left] - host.duration[left]
    return HtaLaunchStats(
        frame.rank,
        host.correlation[left],
        host.duration[left],
        device.duration[right],
        np.maximum(delay, 0),
    )


def describe(values: npt.NDArray[Any]) -> SeriesDescription:
    """Count, mean, deviation, least, quarters and most of a series."""
    quarter, median, three_quarters = np.quantile(values, [0.25, 0.5, 0.75]).tolist()
    return SeriesDescription(
        int(values.size),
        float(values.mean()),
        float(values.std(ddof=1)) if values.size > 1 else None,
        float(values.min()),
        quarter,
        median,
        three_quarters,
        float(values.max()),
    )


def _join(left: Ints, right: Ints) -> tuple[Ints, Ints]:
    """Places of equal numbers in both, each with each, in the order of the left."""
    order = np.argsort(right, kind="stable")
    first = np.searchsorted(right[order], left, side="left")
    count = np.searchsorted(right[order], left, side="right") - first
    of_left = np.repeat(np.arange(left.size), count)
    within = np.arange(of_left.size) - np.repeat(np.cumsum(count) - count, count)
    return of_left, order[first[of_left] + within]


class _Arguments(msgspec.Struct):
    rate: float | str | None = msgspec.field(default=None, name="memory bandwidth (GB/s)")


_DECODER = msgspec.json.Decoder(_Arguments)


def _rates(part: Timeline, copies: HtaFrame) -> npt.NDArray[Any]:
    """What the profiler says of each copy's bandwidth, GB/s; 0 where it says nothing."""
    if "extra" not in part.spans.column_names or not copies.row.size:
        return np.zeros(copies.row.size)
    rows = np.flatnonzero(_filed(part))[copies.row]
    texts = take_rows(part.spans.column("extra"), rows).to_pylist()
    return np.array([_rate(text) if text else 0.0 for text in texts])


def _rate(text: str) -> float:
    try:
        return float(_DECODER.decode(text).rate or 0.0)
    except ValueError:  # arguments that are no profiler's
        return 0.0


def _filed(part: Timeline) -> npt.NDArray[np.bool_]:
    category = part.string_column("category")
    filed: npt.NDArray[np.bool_] = category.codes >= 0
    for code, value in enumerate(category.values):
        if value == "Trace":
            filed &= category.codes != code
    return filed


def _copy_kind(name: str) -> str:
    if name.startswith("Memset"):
        return "Memset"
    return name[: len("Memcpy DtoH")] if name.startswith("Memcpy") else "Memcpy Unknown"
