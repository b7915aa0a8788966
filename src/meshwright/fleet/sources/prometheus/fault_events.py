"""Events from metrics of faults: when an Xid changed, and by how much counters of errors rose.

The server tells which series changed at all; only those are read, sample by sample, so that an
event has the time at which it was first seen. The gauge of Xids keeps the newest one for good: only
its change is an event, and where the same one comes twice only the exporter's counts show it.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from meshwright.fleet.sources.prometheus.labels import parse_gpu, parse_node, parse_uuid, strip_port
from meshwright.fleet.sources.prometheus.metric_names import (
    FAULT_METRICS,
    PORT_FAULT_METRICS,
    FaultMetric,
    mask_blanks,
)
from meshwright.fleet.sources.prometheus.promql_text import match_any
from meshwright.fleet.sources.prometheus.query import PrometheusScope, QueryWindow
from meshwright.fleet.sources.prometheus.response import Floats, TimeSeries
from meshwright.fleet.sources.source import make_rows

LOOKBACK_S, XID_LOOKBACK_S = 3600.0, 86400.0
"""How far before a slice the last value is looked for: of an Xid long, since the gauge outlives an
exporter that was away for an hour."""
_TRUST = {"code": 0, "window": 1, "counter": 2, "flag": 2}
_AT_ONCE = 100
"""Series whose samples are asked for in one question."""


class FaultEvent(NamedTuple):
    """One row of events."""

    node: str
    gpu: int | None
    time_s: float
    kind: str
    code: int | None
    increase: float
    text: str
    priority: int
    """Of two metrics that tell one Xid the one with more holds."""


def read_fault_events(cut: QueryWindow) -> pa.Table:
    """Read what went wrong in a slice of time."""
    found = [
        event
        for fault in (*FAULT_METRICS, *PORT_FAULT_METRICS)
        for name in fault.names
        if name in cut.scope.metric_names
        for event in _events(cut, fault, name)
    ]
    return _table(_once(found, 2 * cut.scope.scrape_interval_s), cut.scope.cluster)


def _events(cut: QueryWindow, fault: FaultMetric, name: str) -> Iterable[FaultEvent]:
    before_s = XID_LOOKBACK_S if fault.value_kind == "code" else LOOKBACK_S
    first_s = cut.grid.start_s - cut.grid.step_s - before_s
    span = f"{round(1000 * (cut.grid.end_s - first_s))}ms"
    metric = cut.scope.build_selector(name)
    # Not `changes`: VictoriaMetrics takes the first sample for one.
    asked = f"max_over_time({metric}[{span}]) != min_over_time({metric}[{span}])"
    if fault.value_kind in ("code", "flag"):
        asked += f" or last_over_time({metric}[{span}]) > 0"
    elif fault.kind == "xid":  # these appear with the first Xid, and their first value is a rise
        some = cut.scope.build_selector(name, 'xid!=""')
        asked = f"last_over_time({some}[{span}])"
    who = [each.labels for each in cut.query_instant(asked)]
    groups: dict[tuple[str, ...], list[TimeSeries]] = {}
    for each in _raw(cut, name, who, span):
        groups.setdefault(_identity(each.labels, cut.scope), []).append(each)
    for series in groups.values():
        yield from _of_device(cut, fault, series, first_s)


def _raw(
    cut: QueryWindow, name: str, who: Sequence[dict[str, str]], span: str
) -> Iterable[TimeSeries]:
    """Ask for all samples of some series, by a label that names their devices."""
    for label in ("UUID", "uuid", "gpu_uuid", "instance"):
        values = sorted({each[label] for each in who if each.get(label)})
        who = [each for each in who if not each.get(label)]
        for first in range(0, len(values), _AT_ONCE):
            wanted = match_any(label, values[first : first + _AT_ONCE])
            metric = cut.scope.build_selector(name, wanted)
            yield from cut.query_instant(f"{metric}[{span}]")
    if who:  # no such label at all
        yield from cut.query_instant(f"{cut.scope.build_selector(name)}[{span}]")


def _identity(labels: dict[str, str], fleet: PrometheusScope) -> tuple[str, ...]:
    """What stays the same of a device while its pods, jobs and index change."""
    device = parse_uuid(labels) or f"{labels.get('gpu', '')}:{labels.get('device', '')}"
    names = ("port", "xid", "link", "GPU_I_ID")
    return (
        parse_node(labels, fleet.node_naming),
        device,
        *(labels.get(name, "") for name in names),
    )


def _of_device(
    cut: QueryWindow, fault: FaultMetric, series: Sequence[TimeSeries], first_s: float
) -> Iterable[FaultEvent]:
    time_s, values, of = _in_order(series)
    if not len(values):
        return
    # With no sample near the start of what was read, there was none before: it began at nought.
    fresh = time_s[0] > first_s + 3 * cut.scope.scrape_interval_s
    begins = 0.0 if fresh and fault.kind == "xid" else values[0]
    rises = _rises(np.concatenate(([begins], values)), fault)
    inside = (time_s > cut.grid.start_s - cut.grid.step_s) & (time_s <= cut.grid.end_s)
    for at in np.flatnonzero((rises > 0) & inside):
        labels = series[of[at]].labels
        code = int(values[at]) if fault.value_kind == "code" else _code(labels)
        gpu = None if fault in PORT_FAULT_METRICS else parse_gpu(labels)
        node = _node(labels, cut.scope)
        text = _text(labels, fault, code)
        time, rise, trust = float(time_s[at]), float(rises[at]), _TRUST[fault.value_kind]
        yield FaultEvent(node, gpu, time, fault.kind, code, rise, text, trust)


def _node(labels: dict[str, str], fleet: PrometheusScope) -> str:
    host = fleet.node_naming.node_by_instance.get(strip_port(labels.get("instance", "")), "")
    named = any(labels.get(each) for each in ("Hostname", "hostname", fleet.node_naming.node_label))
    return parse_node(labels if named or not host else {"Hostname": host}, fleet.node_naming)


def _in_order(series: Sequence[TimeSeries]) -> tuple[Floats, Floats, npt.NDArray[np.int64]]:
    """Return times, values and the number of the series of all samples that say something."""
    time_s = np.concatenate([each.time_s for each in series])
    values = mask_blanks(np.concatenate([each.values for each in series]))
    of = np.repeat(np.arange(len(series)), [len(each.time_s) for each in series])
    known = ~np.isnan(values)
    time_s, values, of = time_s[known], values[known], of[known]
    order = np.unique(time_s, return_index=True)[1]  # two series of one device agree
    return time_s[order], values[order], of[order]


def _rises(values: Floats, fault: FaultMetric) -> Floats:
    """By how much each value is above the one before; a counter that fell began anew at nought."""
    change = np.diff(values)
    if fault.value_kind == "code":
        return np.where((change != 0) & (values[1:] > 0), 1.0, 0.0)
    if fault.value_kind == "counter":
        return np.where(change < 0, values[1:], change)
    return np.maximum(change, 0.0)


def _code(labels: dict[str, str]) -> int | None:
    xid = labels.get("xid", "")
    return int(xid) if xid.isdigit() else None


def _text(labels: dict[str, str], fault: FaultMetric, code: int | None) -> str:
    if fault.kind == "xid":
        return f"Xid {code}"
    if fault in PORT_FAULT_METRICS:
        return f"{labels.get('device', 'port')}/{labels.get('port', '?')}: {fault.text}"
    return fault.text


def _once(found: Iterable[FaultEvent], near_s: float) -> list[FaultEvent]:
    """Leave one of an Xid that several metrics tell, and one row for each key."""
    groups: dict[tuple[str, int | None, str, int | None], list[FaultEvent]] = {}
    for event in sorted(found, key=lambda one: one.time_s):
        groups.setdefault((event.node, event.gpu, event.kind, event.code), []).append(event)
    kept = [event for group in groups.values() for event in _joined(_surest(group, near_s))]
    return sorted(kept, key=lambda one: one.time_s)


def _surest(group: Sequence[FaultEvent], near_s: float) -> Iterable[FaultEvent]:
    """Leave out what a better metric tells as well, at about the same time."""
    for event in group:
        better = (one.time_s for one in group if one.priority > event.priority)
        if not any(abs(time - event.time_s) <= near_s for time in better):
            yield event


def _joined(group: Iterable[FaultEvent]) -> Iterable[FaultEvent]:
    """Add up what several counters, or ports of a node, tell of one moment."""
    last: FaultEvent | None = None
    for event in group:
        if last is not None and event.time_s == last.time_s:
            text = last.text if event.text in last.text else f"{last.text}; {event.text}"
            last = last._replace(increase=last.increase + event.increase, text=text)
            continue
        if last is not None:
            yield last
        last = event
    if last is not None:
        yield last


def _table(found: Sequence[FaultEvent], cluster: str) -> pa.Table:
    return make_rows(
        "events",
        {
            "cluster": pa.array([cluster] * len(found), pa.string()),
            "node": pa.array([one.node for one in found], pa.string()),
            "gpu": pa.array([one.gpu for one in found], pa.int32()),
            "time_s": pa.array([one.time_s for one in found], pa.float64()),
            "kind": pa.array([one.kind for one in found], pa.string()),
            "code": pa.array([one.code for one in found], pa.int32()),
            "count": pa.array([one.increase for one in found], pa.float64()),
            "text": pa.array([one.text for one in found], pa.string()),
        },
    )
