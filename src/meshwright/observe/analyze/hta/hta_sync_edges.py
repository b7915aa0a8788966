"""What synchronization and queues tell Holistic Trace Analysis 0.5 about the order of kernels."""

from typing import NamedTuple

import numpy as np

from meshwright.observe.analyze.hta.hta_trace_rows import HtaTraceRows
from meshwright.observe.analyze.spans.intervals import Flags, Ints

LAUNCH_CALLS = (
    "cudaLaunchKernel",
    "cudaLaunchKernelExC",
    "cuLaunchKernel",
    "cudaMemcpyAsync",
    "cudaMemsetAsync",
    "runFunction - job_prep_and_submit_for_execution",
    "hipLaunchKernel",
    "hipExtModuleLaunchKernel",
    "hipMemsetAsync",
    "hipMemcpyAsync",
    "hipMemcpyWithStream",
)
"""Calls that it counts as launches; a graph's launch is none."""


class HtaSyncEdges(NamedTuple):
    """What waits for what."""

    launch_before_record: dict[int, int]
    """Correlation of an event's record -> row of the launch before it on the event's stream."""
    next_kernel: dict[int, int]
    """Row of a `cudaStreamWaitEvent` -> row of the kernel that is launched next on its stream."""


def find_launches(rows: HtaTraceRows, keep: Flags) -> Ints:
    """Rows of the launches that have a kernel, in the order of time."""
    found = np.flatnonzero(keep & rows.match_names(*LAUNCH_CALLS) & (rows.correlated_row > 0))
    return found[np.argsort(rows.ts[found], kind="stable")]


def count_waiting_kernels(rows: HtaTraceRows, keep: Flags) -> Ints:
    """Kernels that wait on a stream after every launch and start; -1 where it does not count."""
    launch = find_launches(rows, keep)
    device = np.flatnonzero(keep & (rows.stream != -1))
    device = device[np.isin(rows.correlation[device], rows.correlation[launch])]
    stream_of = dict(
        zip(rows.correlation[device].tolist(), rows.stream[device].tolist(), strict=True)
    )
    streams = [stream_of.get(one, -1) for one in rows.correlation[launch].tolist()]
    row = np.concatenate([launch, device])
    change = np.repeat([1, -1], [launch.size, device.size])
    stream = np.concatenate([np.array(streams, dtype=np.int64), rows.stream[device]])
    order = np.lexsort((rows.ts[row], stream))
    row, change, stream = row[order], change[order], stream[order]
    total = np.cumsum(change)
    first = np.flatnonzero(np.append(True, stream[1:] != stream[:-1])[: stream.size])
    before = np.append(0, total)[first]
    counts = np.diff(np.append(first, stream.size))
    lengths = np.full(rows.ts.size, -1, dtype=np.int64)
    lengths[row] = total - np.repeat(before, counts)
    return lengths


def find_sync_edges(rows: HtaTraceRows, keep: Flags) -> HtaSyncEdges:
    """Find which launch an event's record stands behind, and which kernel a wait holds up."""
    launch = find_launches(rows, keep)
    launch = launch[rows.correlated_row[launch] > 0]
    kernel = rows.correlated_row[launch] - 1
    usable = (rows.stream[kernel] != -1) & keep[kernel]
    launch, kernel = launch[usable], kernel[usable]
    return HtaSyncEdges(
        _recorded(rows, keep, launch, kernel),
        _next_kernels(rows, keep, launch, kernel) if "Stream Wait Event" in rows.names else {},
    )


def _recorded(rows: HtaTraceRows, keep: Flags, launch: Ints, kernel: Ints) -> dict[int, int]:
    waiting = np.flatnonzero(keep & (rows.wait_stream > -1))
    place = {
        int(rows.event_record[row]): (int(rows.device[row]), int(rows.wait_stream[row]))
        for row in waiting[::-1].tolist()
    }
    found = {}
    lanes: dict[tuple[int, int], Ints] = {}
    for row in np.flatnonzero(keep & rows.match_names("cudaEventRecord")).tolist():
        lane = place.get(int(rows.correlation[row]))
        if lane is None:
            continue
        if lane not in lanes:
            own = (rows.device[kernel] == lane[0]) & (rows.stream[kernel] == lane[1])
            lanes[lane] = launch[own]
        at = int(np.searchsorted(rows.ts[lanes[lane]], rows.ts[row], side="right"))
        if at:
            found[int(rows.correlation[row])] = int(lanes[lane][at - 1])
    return found


def _next_kernels(rows: HtaTraceRows, keep: Flags, launch: Ints, kernel: Ints) -> dict[int, int]:
    calls = np.flatnonzero(
        keep & rows.match_names("cudaStreamWaitEvent") & (rows.correlated_row > 0)
    )
    found = {}
    lanes: dict[tuple[int, int, int], Ints] = {}
    for row in calls.tolist():
        stream = int(rows.stream[rows.correlated_row[row] - 1])
        lane = (int(rows.process[row]), int(rows.thread[row]), stream)
        if lane not in lanes:
            own = (rows.process[launch] == lane[0]) & (rows.thread[launch] == lane[1])
            lanes[lane] = np.flatnonzero(own & (rows.stream[kernel] == stream))
        here = lanes[lane]
        at = int(np.searchsorted(rows.ts[launch[here]], rows.ts[row], side="right"))
        if at < here.size:
            found[row] = int(kernel[here[at]])
    return found
