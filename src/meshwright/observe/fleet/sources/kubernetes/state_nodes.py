"""Nodes of the past, from kube-state-metrics: cut at changes of readiness and of cordons."""

from collections.abc import Iterable
from typing import Any

import numpy as np

from meshwright.observe.fleet.sources.kubernetes.resources import gpu_part, resource_of
from meshwright.observe.fleet.sources.kubernetes.state_asking import STEP_S, Ask
from meshwright.observe.fleet.sources.prometheus.answers import Floats, Series
from meshwright.observe.fleet.sources.prometheus.grid import window

Nodes = dict[str, tuple[str, float]]
"""How nodes stood last, and since when."""


def node_rows(ask: Ask, before: Nodes) -> tuple[list[dict[str, Any]], Nodes]:
    """Cut the time of each node at changes of its readiness and its cordon."""
    gpus: dict[str, float] = {}
    sizes: dict[tuple[str, str], float] = {}
    for each in ask.last("kube_node_status_capacity"):
        node, resource = each.labels.get("node", ""), each.labels.get("resource", "")
        sizes[node, resource] = float(each.values[-1])
        if part := gpu_part(resource_of(resource)):
            gpus[node] = gpus.get(node, 0.0) + part * float(each.values[-1])
    kinds = {each.labels.get("node", ""): each.labels.get("label_nvidia_com_gpu_product")
             for each in ask.last("kube_node_labels")}  # fmt: skip
    ready = _by_node(ask, "kube_node_status_condition", 'condition="Ready"', 'status="true"')
    cordoned = _by_node(ask, "kube_node_spec_unschedulable")
    rows, now = list[dict[str, Any]](), dict(before)
    for node in sorted(gpus):
        common = {
            "cluster": ask.fleet.cluster, "node": node, "gpus": round(gpus[node]),
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


def _by_node(ask: Ask, metric: str, *matchers: str) -> dict[str, Series]:
    if metric not in ask.fleet.names:
        return {}
    selected = ask.fleet.of(metric, *matchers)
    asked = f"max by (node) (last_over_time({selected}[{window(STEP_S)}]))"
    return {each.labels.get("node", ""): each for each in ask.steps(asked)}


def _stretches(
    ready: Series | None, cordoned: Series | None
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


def _at(series: Series, times: Floats) -> Floats:
    """Return the value that a series had last, at each of some times."""
    place = np.searchsorted(series.time_s, times, side="right") - 1
    return np.where(place >= 0, series.values[np.maximum(place, 0)], 0.0)
