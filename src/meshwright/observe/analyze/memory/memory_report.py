"""All that a memory snapshot tells about each of its devices."""

from typing import NamedTuple

import numpy as np

from meshwright.observe.analyze.memory.allocation_lifetimes import (
    LiveBytes,
    find_lifetimes,
    list_devices,
    trace_live_bytes,
)
from meshwright.observe.analyze.memory.allocator_replay import replay_allocator
from meshwright.observe.analyze.memory.memory_categories import categorize_memory
from meshwright.observe.analyze.memory.memory_growth import MemoryGrowth, find_growth
from meshwright.observe.analyze.memory.memory_peak import LiveMemory, attribute_live_memory
from meshwright.observe.analyze.memory.memory_totals import (
    MemoryFragmentation,
    MemoryTotals,
    measure_fragmentation,
    sum_memory,
)
from meshwright.observe.analyze.memory.oom_report import OutOfMemoryReport, explain_ooms
from meshwright.timeline.readers.memory_snapshot.memory_snapshot_reader import (
    MemorySnapshot,
    Numbers,
)


class DeviceMemoryReport(NamedTuple):
    """One device."""

    device: int
    totals: MemoryTotals
    live: LiveBytes
    peak: LiveMemory
    growth: MemoryGrowth
    fragmentation: MemoryFragmentation
    oom_reports: tuple[OutOfMemoryReport, ...]


def analyze_memory(snapshot: MemorySnapshot) -> tuple[DeviceMemoryReport, ...]:
    """Analyse each device of a snapshot."""
    lives = find_lifetimes(snapshot)
    known = categorize_memory(snapshot, lives)
    found = []
    for device in list_devices(snapshot):
        now = trace_live_bytes(snapshot, device)
        replayed = replay_allocator(snapshot, device)
        found.append(
            DeviceMemoryReport(
                device,
                sum_memory(snapshot, lives, now, replayed),
                now,
                attribute_live_memory(known, device, now.peak_event, now.peak_bytes),
                find_growth(known, now),
                measure_fragmentation(snapshot, device),
                explain_ooms(known, now, replayed),
            )
        )
    return tuple(found)


def downsample_live_bytes(
    snapshot: MemorySnapshot, now: LiveBytes, most: int = 400
) -> list[tuple[int, int]]:
    """Return (time in µs, live bytes), thinned to the highest of each stretch."""
    if not now.event.size:
        return []
    edges = np.linspace(0, now.event.size, min(most, now.event.size) + 1).astype(np.int64)[:-1]
    tops = np.maximum.reduceat(now.bytes, edges)
    times: Numbers = snapshot.events.time_us[now.event[edges]]
    return list(zip(times.tolist(), tops.tolist(), strict=True))
