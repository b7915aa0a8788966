"""All that a memory snapshot tells about each of its devices."""

from typing import NamedTuple

import numpy as np

from meshwright.observe.analyze.memory.categories import sort_memory
from meshwright.observe.analyze.memory.growth import Growth, growth
from meshwright.observe.analyze.memory.lifetimes import Live, devices, lifetimes, live
from meshwright.observe.analyze.memory.peak import Moment, moment
from meshwright.observe.analyze.memory.replay import replay
from meshwright.observe.analyze.memory.shortage import Shortage, shortages
from meshwright.observe.analyze.memory.totals import Fragmentation, Totals, fragmentation, totals
from meshwright.timeline.readers.memory_snapshot import Numbers, Snapshot


class DeviceMemory(NamedTuple):
    """One device."""

    device: int
    totals: Totals
    live: Live
    peak: Moment
    growth: Growth
    fragmentation: Fragmentation
    shortages: tuple[Shortage, ...]


def memory_report(snapshot: Snapshot) -> tuple[DeviceMemory, ...]:
    """Analyse each device of a snapshot."""
    lives = lifetimes(snapshot)
    known = sort_memory(snapshot, lives)
    found = []
    for device in devices(snapshot):
        now = live(snapshot, device)
        replayed = replay(snapshot, device)
        found.append(
            DeviceMemory(
                device,
                totals(snapshot, lives, now, replayed),
                now,
                moment(known, device, now.peak_event, now.peak_bytes),
                growth(known, now),
                fragmentation(snapshot, device),
                shortages(known, now, replayed),
            )
        )
    return tuple(found)


def timeline(snapshot: Snapshot, now: Live, most: int = 400) -> list[tuple[int, int]]:
    """Return (time in µs, live bytes), thinned to the highest of each stretch."""
    if not now.event.size:
        return []
    edges = np.linspace(0, now.event.size, min(most, now.event.size) + 1).astype(np.int64)[:-1]
    tops = np.maximum.reduceat(now.bytes, edges)
    times: Numbers = snapshot.events.time_us[now.event[edges]]
    return list(zip(times.tolist(), tops.tolist(), strict=True))
