"""All figures of HTA that are reproduced, for one timeline."""

from typing import NamedTuple

from meshwright.observe.analyze.hta.hta_counters import (
    HtaLaunchStats,
    HtaMemoryBandwidth,
    HtaQueueLength,
    get_launch_stats,
    get_memory_bandwidth,
    get_queue_lengths,
)
from meshwright.observe.analyze.hta.hta_device_time import (
    HtaKernelType,
    HtaTemporalBreakdown,
    get_comm_comp_overlap,
    get_kernel_types,
    get_temporal_breakdown,
)
from meshwright.observe.analyze.hta.hta_frame import build_frames
from meshwright.observe.analyze.hta.hta_idle import HtaStreamIdle, get_idle_breakdown
from meshwright.observe.analyze.hta.hta_kernels import HtaKernelTime, get_kernel_breakdown
from meshwright.timeline.timeline import Timeline


class HtaReport(NamedTuple):
    """What HTA's standard analyses print, all ranks one after another."""

    temporal_breakdown: tuple[HtaTemporalBreakdown, ...]
    overlap_percent: dict[int, float | None]
    """By rank; None where there is no communication."""
    idle_breakdown: tuple[HtaStreamIdle, ...]
    kernel_types: tuple[HtaKernelType, ...]
    """Over all ranks."""
    kernel_breakdown: tuple[HtaKernelTime, ...]
    queue_lengths: tuple[HtaQueueLength, ...]
    memory_bandwidth: tuple[HtaMemoryBandwidth, ...]
    launch_stats: tuple[HtaLaunchStats, ...]


def build_hta_report(timeline: Timeline) -> HtaReport:
    """Reproduce HTA's figures; the rows need the profiler's arguments in `extra`."""
    ranks = build_frames(timeline)
    parts = {part.ranks[0]: part for part in timeline.split_by_rank()}
    return HtaReport(
        temporal_breakdown=tuple(get_temporal_breakdown(frame) for frame in ranks),
        overlap_percent={frame.rank: get_comm_comp_overlap(frame) for frame in ranks},
        idle_breakdown=tuple(row for frame in ranks for row in get_idle_breakdown(frame)),
        kernel_types=get_kernel_types(ranks),
        kernel_breakdown=tuple(row for frame in ranks for row in get_kernel_breakdown(frame)),
        queue_lengths=tuple(row for frame in ranks for row in get_queue_lengths(frame) or ()),
        memory_bandwidth=tuple(
            row for frame in ranks for row in get_memory_bandwidth(parts[frame.rank], frame)
        ),
        launch_stats=tuple(get_launch_stats(frame) for frame in ranks),
    )
