"""Which device had which index, and which job held it: stretches of time in which labels agree.

A device keeps its UUID where its index changes: after one has fallen off the bus, those behind it
move up. Labels of pods and jobs come and go with every start; a stretch ends where they were last
seen, and a gap no longer than a few scrapes does not end it.
"""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from meshwright.observe.fleet.sources.prometheus.answers import Series
from meshwright.observe.fleet.sources.prometheus.asking import Fleet, Slice
from meshwright.observe.fleet.sources.prometheus.grid import stretches, window
from meshwright.observe.fleet.sources.prometheus.labels import (
    DEVICE_LABELS,
    GPU_LABELS,
    JOB_LABELS,
    gpu_of,
    instance_of,
    job_of,
    kind_of,
    node_of,
    part_of,
    uuid_of,
)
from meshwright.observe.fleet.sources.prometheus.names import FIELDS
from meshwright.observe.fleet.sources.source import rows_of

GAP_S = 300.0
"""Without a sample for this long, Prometheus itself takes a series for gone."""
READ_AGAIN_S = 600.0
"""How much of the time before it an ingest reads once more, because samples come late."""
_BY = ", ".join((*GPU_LABELS, *DEVICE_LABELS, *JOB_LABELS))
_JOB_NUMBERS = "nvidia_gpu_jobId"
"""A gauge whose value is the number of the job that holds a GPU, as jobstats' exporter has it."""
_SEEN_BY = ("gpu_util", "memory_used", "power_w", "temperature_c", "engine_active")


class Device(NamedTuple):
    """A device under an index, from one moment on."""

    node: str
    gpu: int
    uuid: str
    kind: str | None
    since_s: float
    last_s: float
    until_s: float | None = None
    told: bool = False
    """Whether a row says all of this."""


class Hold(NamedTuple):
    """A job's hold of a GPU."""

    job: str
    node: str
    gpu: int
    start_s: float
    last_s: float
    share: float
    told_s: float | None = None
    """Until when a row says that it was held."""


class Seen(NamedTuple):
    """What labels said in a slice of time."""

    devices: tuple[Device, ...]
    holds: tuple[Hold, ...]


def seen(cut: Slice) -> Seen:
    """Ask who was where in a slice of time."""
    step_s = cut.grid.step_s
    series = [
        each
        for metric in _metrics(cut.fleet)
        for each in cut.ask(
            f"max by ({_BY}) (last_over_time({cut.fleet.of(metric)}[{window(step_s)}]))"
        )
    ]
    gap_s = max(GAP_S, 3 * step_s)
    numbered = _numbered(cut)
    return Seen(
        tuple(_devices(series, cut.fleet, step_s, gap_s)),
        tuple(_holds([*series, *numbered], cut.fleet, step_s, gap_s)),
    )


def _numbered(cut: Slice) -> list[Series]:
    """Read a gauge of numbers of jobs as if they were labels."""
    if _JOB_NUMBERS not in cut.fleet.names:
        return []
    metric = cut.fleet.of(_JOB_NUMBERS)
    asked = f"max by ({_BY}) (last_over_time({metric}[{window(cut.grid.step_s)}]))"
    return [
        Series(each.labels | {"hpc_job": str(int(number))}, each.time_s[each.values == number],
               each.values[each.values == number])
        for each in cut.ask(asked)
        for number in np.unique(each.values[each.values > 0])
    ]  # fmt: skip


def _metrics(fleet: Fleet) -> list[str]:
    """Metrics of the first two columns that this fleet has: divided GPUs lack the first."""
    named = {field.column: [name.text for name in field.names] for field in FIELDS}
    found = [[name for name in named[column] if name in fleet.names] for column in _SEEN_BY]
    return [name for names in [each for each in found if each][:2] for name in names]


def _devices(
    series: Iterable[Series], fleet: Fleet, step_s: float, gap_s: float
) -> Iterable[Device]:
    times: dict[tuple[str, int, str], list[Series]] = {}
    for each in series:
        node, gpu, uuid = (
            node_of(each.labels, fleet.naming),
            gpu_of(each.labels),
            uuid_of(each.labels),
        )
        if node and gpu is not None and uuid:
            times.setdefault((node, gpu, uuid), []).append(each)
    for (node, gpu, uuid), found in times.items():
        kind = kind_of(found[0].labels)
        for first, last in _runs(found, gap_s):
            yield Device(node, gpu, uuid, kind, first - step_s, last)


def _holds(series: Iterable[Series], fleet: Fleet, step_s: float, gap_s: float) -> Iterable[Hold]:
    found: dict[tuple[str, str, int], dict[str, tuple[float, list[Series]]]] = {}
    for each in series:
        job, gpu = job_of(each.labels), gpu_of(each.labels)
        node = node_of(each.labels, fleet.naming)
        if job and node and gpu is not None:
            instances = found.setdefault((job, node, gpu), {})
            part = part_of(each.labels)
            instances.setdefault(instance_of(each.labels), (part, []))[1].append(each)
    for (job, node, gpu), instances in found.items():
        share = min(1.0, sum(part for part, _ in instances.values()))
        everything = [each for _, some in instances.values() for each in some]
        for first, last in _runs(everything, gap_s):
            yield Hold(job, node, gpu, first - step_s, last, share)


def _runs(series: list[Series], gap_s: float) -> Iterable[tuple[float, float]]:
    return stretches(np.concatenate([each.time_s for each in series]), gap_s)


class Holding:
    """Stretches that go on from slice to slice, and from one ingest to the next."""

    def __init__(self, kept: Mapping[str, Any] | None = None) -> None:
        kept = kept or {}
        self._devices = {
            (device.node, device.gpu): device
            for device in (Device(*each) for each in kept.get("devices", ()))
        }
        self._holds = {
            (hold.job, hold.node, hold.gpu): hold
            for hold in (Hold(*each) for each in kept.get("holds", ()))
        }

    def kept(self) -> dict[str, Any]:
        """Return what the next ingest needs to go on, as plain values."""
        return {"devices": list(self._devices.values()), "holds": list(self._holds.values())}

    def add(
        self,
        now: Seen,
        cut: Slice,
        memory: Mapping[tuple[str, int], float],
        *,
        last: bool = True,
    ) -> tuple[pa.Table, pa.Table]:
        """Add a slice of time; return rows of `gpus` and of `held` that say something new.

        `memory` is that of GPUs, where it is known. How long a job has held a GPU that it still
        holds is told after the last slice.
        """
        end_s, gap_s = cut.grid.end_s, max(GAP_S, 3 * cut.grid.step_s)
        devices = self._add_devices(now.devices, gap_s)
        holds = self._add_holds(now.holds, gap_s)
        for key, one in self._holds.items():
            if one.told_s != one.last_s and (last or one.last_s < end_s - gap_s):
                holds.append(one)
                self._holds[key] = one._replace(told_s=one.last_s)
        known = {*holds, *self._holds.values()}
        # The last minutes are read again by the next ingest: it has to know what ended there.
        old_s = end_s - gap_s - READ_AGAIN_S
        self._holds = {key: one for key, one in self._holds.items() if one.last_s >= old_s}
        gpus = _gpus(devices, cut.fleet.cluster, end_s, memory)
        return gpus, _held(holds, known, cut.fleet.cluster, end_s)

    def _add_devices(self, found: tuple[Device, ...], gap_s: float) -> list[Device]:
        """Join devices with those before, and return those of which there is something to tell."""
        news: list[Device] = []
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
                again = before.until_s is None and before.told
                longer = before._replace(last_s=one.last_s, until_s=None, told=again)
                self._devices[one.node, one.gpu] = longer
                continue
            if before.until_s is None:
                news.append(before._replace(until_s=min(before.last_s, one.since_s)))
            self._devices[one.node, one.gpu] = one
        for key, one in list(self._devices.items()):
            last_s = alive.get(one.node, 0.0)
            # It is gone when others of its node go on without it, not when the node is silent.
            if one.until_s is None and one.last_s < last_s - gap_s:
                self._devices[key] = one._replace(until_s=one.last_s, told=False)
            elif one.until_s is not None and one.last_s < last_s - gap_s - READ_AGAIN_S:
                del self._devices[key]
        for key, one in self._devices.items():
            if not one.told:
                news.append(one)
                self._devices[key] = one._replace(told=True)
        return news

    def _add_holds(self, found: tuple[Hold, ...], gap_s: float) -> list[Hold]:
        """Join holds with those before; return those that another one of the job has replaced."""
        ended: list[Hold] = []
        for one in sorted(found, key=lambda each: each.start_s):
            key = (one.job, one.node, one.gpu)
            before = self._holds.get(key)
            if before is None:
                self._holds[key] = one
            elif one.start_s <= before.last_s + gap_s:
                last_s, share = max(before.last_s, one.last_s), max(before.share, one.share)
                self._holds[key] = before._replace(last_s=last_s, share=share)
            else:
                if before.told_s != before.last_s:
                    ended.append(before)
                self._holds[key] = one
        return ended


def _gpus(
    devices: list[Device], cluster: str, seen_s: float, memory: Mapping[tuple[str, int], float]
) -> pa.Table:
    return rows_of(
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


def _held(found: list[Hold], known: Iterable[Hold], cluster: str, seen_s: float) -> pa.Table:
    crowd: dict[tuple[str, int], list[Hold]] = {}
    for one in known:
        crowd.setdefault((one.node, one.gpu), []).append(one)
    shares = [one.share / _sharers(one, crowd[one.node, one.gpu]) for one in found]
    return rows_of(
        "held",
        {
            "cluster": pa.array([cluster] * len(found), pa.string()),
            "job": pa.array([one.job for one in found], pa.string()),
            "attempt": pa.array([0] * len(found), pa.int32()),
            "node": pa.array([one.node for one in found], pa.string()),
            "gpu": pa.array([one.gpu for one in found], pa.int32()),
            "start_s": pa.array([one.start_s for one in found], pa.float64()),
            "end_s": pa.array([one.last_s for one in found], pa.float64()),
            "share": pa.array(shares, pa.float64()),
            "seen_s": pa.array([seen_s] * len(found), pa.float64()),
        },
    )


def _sharers(one: Hold, others: list[Hold]) -> int:
    """Count the jobs that hold a whole GPU together with this one: it is each one's in part."""
    if one.share < 1.0:
        return 1
    together = {
        each.job
        for each in others
        if each.share == 1.0 and each.start_s < one.last_s and one.start_s < each.last_s
    }
    return len(together | {one.job})
