"""Which device had which index, and which job held it: stretches of time in which labels agree.

A device keeps its UUID where its index changes: after one has fallen off the bus, those behind it
move up. Labels of pods and jobs come and go with every start; a stretch ends where they were last
seen, and a gap no longer than a few scrapes does not end it.
"""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from meshwright.fleet.sources.prometheus.labels import (
    DEVICE_LABELS,
    GPU_LABELS,
    JOB_LABELS,
    parse_gpu,
    parse_gpu_kind,
    parse_job,
    parse_mig_fraction,
    parse_mig_instance,
    parse_node,
    parse_uuid,
)
from meshwright.fleet.sources.prometheus.metric_names import METRIC_FIELDS
from meshwright.fleet.sources.prometheus.query import PrometheusScope, QueryWindow
from meshwright.fleet.sources.prometheus.response import TimeSeries
from meshwright.fleet.sources.prometheus.time_grid import find_runs, format_promql_range
from meshwright.fleet.sources.source import make_rows

STALENESS_S = 300.0
"""Without a sample for this long, Prometheus itself takes a series for gone."""
OVERLAP_S = 600.0
"""How much of the time before it an ingest reads once more, because samples come late."""
_BY = ", ".join((*GPU_LABELS, *DEVICE_LABELS, *JOB_LABELS))
_JOB_NUMBERS = "nvidia_gpu_jobId"
"""A gauge whose value is the number of the job that holds a GPU, as jobstats' exporter has it."""
_SEEN_BY = ("gpu_util", "memory_used", "power_w", "temperature_c", "engine_active")


class DeviceSpan(NamedTuple):
    """A device under an index, from one moment on."""

    node: str
    gpu: int
    uuid: str
    kind: str | None
    since_s: float
    last_s: float
    until_s: float | None = None
    is_written: bool = False
    """Whether a row says all of this."""


class AllocationSpan(NamedTuple):
    """A job's hold of a GPU."""

    job: str
    node: str
    gpu: int
    start_s: float
    last_s: float
    gpu_fraction: float
    written_until_s: float | None = None
    """Until when a row says that it was held."""


class LabelSnapshot(NamedTuple):
    """What labels said in a slice of time."""

    devices: tuple[DeviceSpan, ...]
    allocations: tuple[AllocationSpan, ...]


def read_labels(cut: QueryWindow) -> LabelSnapshot:
    """Ask who was where in a slice of time."""
    step_s = cut.grid.step_s
    series = [
        each
        for metric in _metrics(cut.scope)
        for each in cut.query_range(
            f"max by ({_BY}) "
            f"(last_over_time({cut.scope.build_selector(metric)}[{format_promql_range(step_s)}]))"
        )
    ]
    gap_s = max(STALENESS_S, 3 * step_s)
    numbered = _numbered(cut)
    return LabelSnapshot(
        tuple(_devices(series, cut.scope, step_s, gap_s)),
        tuple(_holds([*series, *numbered], cut.scope, step_s, gap_s)),
    )


def _numbered(cut: QueryWindow) -> list[TimeSeries]:
    """Read a gauge of numbers of jobs as if they were labels."""
    if _JOB_NUMBERS not in cut.scope.metric_names:
        return []
    metric = cut.scope.build_selector(_JOB_NUMBERS)
    asked = f"max by ({_BY}) (last_over_time({metric}[{format_promql_range(cut.grid.step_s)}]))"
    return [
        TimeSeries(each.labels | {"hpc_job": str(int(number))}, each.time_s[each.values == number],
               each.values[each.values == number])
        for each in cut.query_range(asked)
        for number in np.unique(each.values[each.values > 0])
    ]  # fmt: skip


def _metrics(fleet: PrometheusScope) -> list[str]:
    """Metrics of the first two columns that this fleet has: divided GPUs lack the first."""
    named = {field.column: [name.name for name in field.names] for field in METRIC_FIELDS}
    found = [[name for name in named[column] if name in fleet.metric_names] for column in _SEEN_BY]
    return [name for names in [each for each in found if each][:2] for name in names]


def _devices(
    series: Iterable[TimeSeries], fleet: PrometheusScope, step_s: float, gap_s: float
) -> Iterable[DeviceSpan]:
    times: dict[tuple[str, int, str], list[TimeSeries]] = {}
    for each in series:
        node, gpu, uuid = (
            parse_node(each.labels, fleet.node_naming),
            parse_gpu(each.labels),
            parse_uuid(each.labels),
        )
        if node and gpu is not None and uuid:
            times.setdefault((node, gpu, uuid), []).append(each)
    for (node, gpu, uuid), found in times.items():
        kind = parse_gpu_kind(found[0].labels)
        for first, last in _runs(found, gap_s):
            yield DeviceSpan(node, gpu, uuid, kind, first - step_s, last)


def _holds(
    series: Iterable[TimeSeries], fleet: PrometheusScope, step_s: float, gap_s: float
) -> Iterable[AllocationSpan]:
    found: dict[tuple[str, str, int], dict[str, tuple[float, list[TimeSeries]]]] = {}
    for each in series:
        job, gpu = parse_job(each.labels), parse_gpu(each.labels)
        node = parse_node(each.labels, fleet.node_naming)
        if job and node and gpu is not None:
            instances = found.setdefault((job, node, gpu), {})
            part = parse_mig_fraction(each.labels)
            instances.setdefault(parse_mig_instance(each.labels), (part, []))[1].append(each)
    for (job, node, gpu), instances in found.items():
        share = min(1.0, sum(part for part, _ in instances.values()))
        everything = [each for _, some in instances.values() for each in some]
        for first, last in _runs(everything, gap_s):
            yield AllocationSpan(job, node, gpu, first - step_s, last, share)


def _runs(series: list[TimeSeries], gap_s: float) -> Iterable[tuple[float, float]]:
    return find_runs(np.concatenate([each.time_s for each in series]), gap_s)


class AllocationTracker:
    """Stretches that go on from slice to slice, and from one ingest to the next."""

    def __init__(self, kept: Mapping[str, Any] | None = None) -> None:
        kept = kept or {}
        self._devices = {
            (device.node, device.gpu): device
            for device in (DeviceSpan(*each) for each in kept.get("devices", ()))
        }
        self._holds = {
            (hold.job, hold.node, hold.gpu): hold
            for hold in (AllocationSpan(*each) for each in kept.get("holds", ()))
        }

    def to_cursor(self) -> dict[str, Any]:
        """Return what the next ingest needs to go on, as plain values."""
        return {"devices": list(self._devices.values()), "holds": list(self._holds.values())}

    def add_snapshot(
        self,
        now: LabelSnapshot,
        cut: QueryWindow,
        memory: Mapping[tuple[str, int], float],
        *,
        last: bool = True,
    ) -> tuple[pa.Table, pa.Table]:
        """Add a slice of time; return rows of `gpus` and of `allocations` that say something new.

        `memory` is that of GPUs, where it is known. How long a job has held a GPU that it still
        holds is told after the last slice.
        """
        end_s, gap_s = cut.grid.end_s, max(STALENESS_S, 3 * cut.grid.step_s)
        devices = self._add_devices(now.devices, gap_s)
        holds = self._add_holds(now.allocations, gap_s)
        for key, one in self._holds.items():
            if one.written_until_s != one.last_s and (last or one.last_s < end_s - gap_s):
                holds.append(one)
                self._holds[key] = one._replace(written_until_s=one.last_s)
        known = {*holds, *self._holds.values()}
        # The last minutes are read again by the next ingest: it has to know what ended there.
        old_s = end_s - gap_s - OVERLAP_S
        self._holds = {key: one for key, one in self._holds.items() if one.last_s >= old_s}
        gpus = _gpus(devices, cut.scope.cluster, end_s, memory)
        return gpus, _held(holds, known, cut.scope.cluster, end_s)

    def _add_devices(self, found: tuple[DeviceSpan, ...], gap_s: float) -> list[DeviceSpan]:
        """Join devices with those before, and return those of which there is something to tell."""
        news: list[DeviceSpan] = []
        alive: dict[str, float] = {}
        for one in sorted(found, key=lambda each: each.since_s):
            alive[one.node] = max(alive.get(one.node, 0.0), one.last_s)
            before = self._devices.get((one.node, one.gpu))
            if before is None:
                self._devices[one.node, one.gpu] = one
                continue
            if one.last_s <= before.last_s:
                continue  # read a second time
            same = before.uuid == one.uuid
            if same and (before.until_s is None or one.since_s <= before.last_s + gap_s):
                again = before.until_s is None and before.is_written
                longer = before._replace(last_s=one.last_s, until_s=None, is_written=again)
                self._devices[one.node, one.gpu] = longer
                continue
            if before.until_s is None:
                news.append(before._replace(until_s=min(before.last_s, one.since_s)))
            self._devices[one.node, one.gpu] = one
        for key, one in list(self._devices.items()):
            last_s = alive.get(one.node, 0.0)
            # It is gone when others of its node go on without it, not when the node is silent.
            if one.until_s is None and one.last_s < last_s - gap_s:
                self._devices[key] = one._replace(until_s=one.last_s, is_written=False)
            elif one.until_s is not None and one.last_s < last_s - gap_s - OVERLAP_S:
                del self._devices[key]
        for key, one in self._devices.items():
            if not one.is_written:
                news.append(one)
                self._devices[key] = one._replace(is_written=True)
        return news

    def _add_holds(self, found: tuple[AllocationSpan, ...], gap_s: float) -> list[AllocationSpan]:
        """Join holds with those before; return those that another one of the job has replaced."""
        ended: list[AllocationSpan] = []
        for one in sorted(found, key=lambda each: each.start_s):
            key = (one.job, one.node, one.gpu)
            before = self._holds.get(key)
            if before is None:
                self._holds[key] = one
            elif one.start_s <= before.last_s + gap_s:
                last_s, share = (
                    max(before.last_s, one.last_s),
                    max(before.gpu_fraction, one.gpu_fraction),
                )
                self._holds[key] = before._replace(last_s=last_s, gpu_fraction=share)
            else:
                if before.written_until_s != before.last_s:
                    ended.append(before)
                self._holds[key] = one
        return ended


def _gpus(
    devices: list[DeviceSpan], cluster: str, seen_s: float, memory: Mapping[tuple[str, int], float]
) -> pa.Table:
    return make_rows(
        "gpus",
        {
            "cluster": pa.array([cluster] * len(devices), pa.string()),
            "node": pa.array([one.node for one in devices], pa.string()),
            "gpu": pa.array([one.gpu for one in devices], pa.int32()),
            "uuid": pa.array([one.uuid for one in devices], pa.string()),
            "since_s": pa.array([one.since_s for one in devices], pa.float64()),
            "until_s": pa.array([one.until_s for one in devices], pa.float64()),
            "kind": pa.array([one.kind for one in devices], pa.string()),
            "memory": pa.array([memory.get((one.node, one.gpu)) for one in devices], pa.float64()),
            "seen_s": pa.array([seen_s] * len(devices), pa.float64()),
        },
    )


def _held(
    found: list[AllocationSpan], known: Iterable[AllocationSpan], cluster: str, seen_s: float
) -> pa.Table:
    crowd: dict[tuple[str, int], list[AllocationSpan]] = {}
    for one in known:
        crowd.setdefault((one.node, one.gpu), []).append(one)
    shares = [one.gpu_fraction / _sharers(one, crowd[one.node, one.gpu]) for one in found]
    return make_rows(
        "allocations",
        {
            "cluster": pa.array([cluster] * len(found), pa.string()),
            "job": pa.array([one.job for one in found], pa.string()),
            "attempt": pa.array([0] * len(found), pa.int32()),
            "node": pa.array([one.node for one in found], pa.string()),
            "gpu": pa.array([one.gpu for one in found], pa.int32()),
            "start_s": pa.array([one.start_s for one in found], pa.float64()),
            "end_s": pa.array([one.last_s for one in found], pa.float64()),
            "gpu_fraction": pa.array(shares, pa.float64()),
            "seen_s": pa.array([seen_s] * len(found), pa.float64()),
        },
    )


def _sharers(one: AllocationSpan, others: list[AllocationSpan]) -> int:
    """Count the jobs that hold a whole GPU together with this one: it is each one's in part."""
    if one.gpu_fraction < 1.0:
        return 1
    together = {
        each.job
        for each in others
        if each.gpu_fraction == 1.0 and each.start_s < one.last_s and one.start_s < each.last_s
    }
    return len(together | {one.job})
