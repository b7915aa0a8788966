"""Nodes of the past, from kube-state-metrics: cut at changes of readiness and of cordons."""

from collections.abc import Iterable
from typing import Any

import numpy as np

from meshwright.fleet.sources.kubernetes.resources import compute_gpu_fraction, decode_resource_name
from meshwright.fleet.sources.prometheus.response import Floats, TimeSeries
from meshwright.fleet.sources.prometheus.state_metrics.query import STEP_S, StateMetricsQuery
from meshwright.fleet.sources.prometheus.time_grid import format_promql_range

NodeStates = dict[str, tuple[str, float]]
"""How nodes stood last, and since when."""


def build_node_rows(
    ask: StateMetricsQuery, before: NodeStates
) -> tuple[list[dict[str, Any]], NodeStates]:
    """Cut the time of each node at changes of its readiness and its cordon."""
    gpus: dict[str, float] = {}
    sizes: dict[tuple[str, str], float] = {}
    for each in ask.query_last("kube_node_status_capacity"):
        node, resource = each.labels.get("node", ""), each.labels.get("resource", "")
        sizes[node, resource] = float(each.values[-1])
        if part := compute_gpu_fraction(decode_resource_name(resource)):
            gpus[node] = gpus.get(node, 0.0) + part * float(each.values[-1])
    kinds = {each.labels.get("node", ""): each.labels.get("label_nvidia_com_gpu_product")
             for each in ask.query_last("kube_node_labels")}  # fmt: skip
    ready = _by_node(ask, "kube_node_status_condition", 'condition="Ready"', 'status="true"')
    cordoned = _by_node(ask, "kube_node_spec_unschedulable")
    rows, now = list[dict[str, Any]](), dict(before)
    for node in sorted(gpus):
        common = {
            "cluster": ask.scope.cluster, "node": node, "gpus": round(gpus[node]),
            "gpu_kind": kinds.get(node), "cpus": sizes.get((node, "cpu")),
            "memory": sizes.get((node, "memory")), "seen_s": ask.until_s,
        }  # fmt: skip
        found = _going_on(before.get(node), _stretches(ready.get(node), cordoned.get(node)))
        for since_s, until_s, state in found:
            reason = {"draining": "cordoned", "down": "not ready"}.get(state)
            rows.append(common | {"since_s": since_s, "until_s": until_s, "state": state,
                                  "reason": reason})  # fmt: skip
        if found:
            now[node] = (found[-1][2], found[-1][0])
    return rows, now


def _going_on(
    old: tuple[str, float] | None, found: Iterable[tuple[float, float | None, str]]
) -> list[tuple[float, float | None, str]]:
    """Join the first stretch with the last one of the reading before."""
    rows = [each for each in found if old is None or each[1] is None or each[1] > old[1]]
    if old is None or not rows:
        return rows
    state, since_s = old
    if rows[0][2] == state:
        return [(since_s, rows[0][1], state), *rows[1:]]
    return [(since_s, max(since_s, rows[0][0]), state), *rows]


def _by_node(ask: StateMetricsQuery, metric: str, *matchers: str) -> dict[str, TimeSeries]:
    if metric not in ask.scope.metric_names:
        return {}
    selected = ask.scope.build_selector(metric, *matchers)
    asked = f"max by (node) (last_over_time({selected}[{format_promql_range(STEP_S)}]))"
    return {each.labels.get("node", ""): each for each in ask.query_range(asked)}


def _stretches(
    ready: TimeSeries | None, cordoned: TimeSeries | None
) -> Iterable[tuple[float, float | None, str]]:
    if ready is None:
        return
    closed = np.zeros(len(ready.time_s), dtype=bool)
    if cordoned is not None and len(cordoned.time_s):
        closed = _at(cordoned, ready.time_s) > 0
    state = np.where(ready.values <= 0, 2, np.where(closed, 1, 0))
    cuts = np.concatenate(([0], np.flatnonzero(np.diff(state)) + 1))
    for at, first in enumerate(cuts):
        until_s = float(ready.time_s[cuts[at + 1]]) if at + 1 < len(cuts) else None
        yield float(ready.time_s[first]), until_s, ("up", "draining", "down")[state[first]]


def _at(series: TimeSeries, times: Floats) -> Floats:
    """Return the value that a series had last, at each of some times."""
    place = np.searchsorted(series.time_s, times, side="right") - 1
    return np.where(place >= 0, series.values[np.maximum(place, 0)], 0.0)
