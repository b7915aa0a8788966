"""All figures of HTA that are reproduced, for one timeline."""

from typing import NamedTuple

from meshwright.observe.analyze.hta.counters import (
    Launches,
    MemoryBandwidth,
    QueueLength,
    launches,
    memory_bandwidth,
    queue_lengths,
)
from meshwright.observe.analyze.hta.device_time import (
    KernelType,
    TemporalBreakdown,
    kernel_types,
    overlap_percent,
    temporal_breakdown,
)
from meshwright.observe.analyze.hta.frame import frames
from meshwright.observe.analyze.hta.idle import StreamIdle, idle_breakdown
from meshwright.observe.analyze.hta.kernels import KernelTime, kernel_breakdown
from meshwright.timeline.timeline import Timeline


class Figures(NamedTuple):
    """What HTA's standard analyses print, all ranks one after another."""

    temporal: tuple[TemporalBreakdown, ...]
    overlap_percent: dict[int, float | None]
    """By rank; None where there is no communication."""
    idle: tuple[StreamIdle, ...]
    kernel_types: tuple[KernelType, ...]
    """Over all ranks."""
    kernels: tuple[KernelTime, ...]
    queue_lengths: tuple[QueueLength, ...]
    memory_bandwidth: tuple[MemoryBandwidth, ...]
    launches: tuple[Launches, ...]


def figures(timeline: Timeline) -> Figures:
    """Reproduce HTA's figures; the rows need the profiler's arguments in `extra`."""
    ranks = frames(timeline)
    parts = {part.ranks[0]: part for part in timeline.by_rank()}
    return Figures(
        temporal=tuple(temporal_breakdown(frame) for frame in ranks),
        overlap_percent={frame.rank: overlap_percent(frame) for frame in ranks},
        idle=tuple(row for frame in ranks for row in idle_breakdown(frame)),
        kernel_types=kernel_types(ranks),
        kernels=tuple(row for frame in ranks for row in kernel_breakdown(frame)),
        queue_lengths=tuple(row for frame in ranks for row in queue_lengths(frame) or ()),
        memory_bandwidth=tuple(
            row for frame in ranks for row in memory_bandwidth(parts[frame.rank], frame)
        ),
        launches=tuple(launches(frame) for frame in ranks),
    )
