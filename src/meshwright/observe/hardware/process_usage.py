"""Reads from `/proc` what processes and their machine take of processors and memory."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple


class ProcessUsage(NamedTuple):
    """What processes have taken so far."""

    time_s: float
    cpu_s: dict[int, float]
    """Processor time by process."""
    machine_cpu_s: float | None
    memory_bytes: int


class UsageRates(NamedTuple):
    """What they take per second, between two looks."""

    job_cores: float | None
    machine_cores: float | None
    memory_bytes: int


def read_usage(pids: Iterable[int], time_s: float) -> ProcessUsage:
    """Look now; processes that are gone count nothing."""
    tick, page = os.sysconf("SC_CLK_TCK"), os.sysconf("SC_PAGE_SIZE")
    cpu_s, memory = {}, 0
    for pid in pids:
        fields = _after_name(Path(f"/proc/{pid}/stat"))
        if len(fields) > 21:
            # proc(5): utime, stime and rss are fields 14, 15 and 24; the name was the second.
            cpu_s[pid] = (int(fields[11]) + int(fields[12])) / tick
            memory += int(fields[21]) * page
    return ProcessUsage(time_s, cpu_s, _machine(tick), memory)


def compute_rates(before: ProcessUsage, after: ProcessUsage) -> UsageRates:
    """What was taken per second between two looks, by processes that are in both."""
    passed = after.time_s - before.time_s
    if passed <= 0:
        return UsageRates(None, None, after.memory_bytes)
    same = before.cpu_s.keys() & after.cpu_s.keys()
    job = sum(after.cpu_s[pid] - before.cpu_s[pid] for pid in same) / passed
    machine = None
    if before.machine_cpu_s is not None and after.machine_cpu_s is not None:
        machine = (after.machine_cpu_s - before.machine_cpu_s) / passed
    return UsageRates(job if same else None, machine, after.memory_bytes)


def _after_name(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return []


def _machine(tick: int) -> float | None:
    """Busy time of all processors: all but idle, waiting for input and what guests count again."""
    try:
        first = Path("/proc/stat").read_text(encoding="utf-8").split("\n", 1)[0].split()
        user, nice, system, _idle, _wait, hard, soft, steal = map(int, first[1:9])
    except (OSError, ValueError):
        return None
    return (user + nice + system + hard + soft + steal) / tick
