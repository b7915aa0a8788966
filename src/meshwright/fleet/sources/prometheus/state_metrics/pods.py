"""Pods and nodes of the past, from the series that kube-state-metrics left in Prometheus.

What stays the same of a pod is asked for once, at the end of the time; only restarts and the states
of nodes are asked for moment by moment.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from meshwright.fleet.sources.kubernetes.pods import (
    QUEUE_LABELS,
    USER_LABELS,
    WORK_LABELS,
    find_workload_name,
)
from meshwright.fleet.sources.kubernetes.resources import compute_gpu_fraction, decode_resource_name
from meshwright.fleet.sources.kubernetes.whole_nodes import infer_whole_node_allocations
from meshwright.fleet.sources.prometheus.client import PrometheusClient
from meshwright.fleet.sources.prometheus.promql_text import match_any, match_value
from meshwright.fleet.sources.prometheus.query import PrometheusScope
from meshwright.fleet.sources.prometheus.response import TimeSeries
from meshwright.fleet.sources.prometheus.state_metrics.nodes import NodeStates, build_node_rows
from meshwright.fleet.sources.prometheus.state_metrics.query import (
    STEP_S,
    PodKey,
    StateMetricsQuery,
    parse_pod_key,
)
from meshwright.fleet.sources.prometheus.time_grid import format_promql_range
from meshwright.fleet.tables import JOBS, NODES

_GPU_RESOURCES = 'resource=~"nvidia_com_(gpu|mig).*|amd_com_gpu|gpu_intel_com_.*"'
_STATES = {"Succeeded": "completed", "Failed": "failed", "Running": "running", "Pending": "pending"}
_TERMINATED = {"OOMKilled": "out_of_memory", "Evicted": "preempted", "DeadlineExceeded": "timeout",
    "Completed": "completed"}  # fmt: skip
_POD_REASONS = {"Evicted": "preempted", "NodeLost": "node_fail", "NodeAffinity": "node_fail",
    "Shutdown": "node_fail", "UnexpectedAdmissionError": "node_fail"}  # fmt: skip
_RANDOM_NAMES = ("ReplicaSet", "Job", "DaemonSet", "CronJob")
"""Kinds whose pods have a name that never comes back."""
_LONGEST_LIFE_S = 30 * 86400.0
"""Restarts are not looked for further back."""


class _Life(NamedTuple):
    """What became of a pod."""

    start_s: float | None
    end_s: float | None
    state: str
    reason: str | None
    ended_by: str | None
    """Why its containers ended, where they did before the pod."""
    restarts: tuple[float, ...] = ()


class StateMetricsCursor(NamedTuple):
    """What one reading leaves for the next."""

    nodes: NodeStates
    """How nodes stood: a state that goes on keeps its beginning."""
    names: dict[str, tuple[str, int, int]]
    """Of jobs whose name may come back: the uid of the last pod, its first and its last attempt."""


def read_state_metrics(
    server: PrometheusClient,
    fleet: PrometheusScope,
    since_s: float,
    until_s: float,
    before: StateMetricsCursor,
) -> tuple[list[tuple[str, pa.Table]], StateMetricsCursor]:
    """Return rows of nodes and of jobs, and what the next reading needs to know."""
    ask = StateMetricsQuery(server, fleet, since_s, until_s)
    nodes, standing = build_node_rows(ask, before.nodes)
    found = [("nodes", pa.Table.from_pylist(nodes, schema=NODES))] if nodes else []
    rows, names = _job_rows(ask, before.names)
    if rows:
        sizes = {row["node"]: row["gpus"] for row in nodes}
        found.append(("allocations", infer_whole_node_allocations(rows, sizes, until_s)))
        found.append(("jobs", pa.Table.from_pylist(rows, schema=JOBS)))
    return found, StateMetricsCursor(standing, names)


def _job_rows(
    ask: StateMetricsQuery, names: Mapping[str, tuple[str, int, int]]
) -> tuple[list[dict[str, Any]], dict[str, tuple[str, int, int]]]:
    gpus, cpus, memory = _requests(ask)
    if not gpus:
        return [], dict(names)
    created, owners = ask.query_pods("kube_pod_created"), ask.query_pods("kube_pod_owner")
    info, lives = ask.query_pods("kube_pod_info"), _lives(ask, gpus)
    labels = ask.query_pods("kube_pod_labels")
    rows, fixed = list[dict[str, Any]](), set[str]()
    for pod, (number, placed) in gpus.items():
        space, name, uid = pod
        told = info[pod].labels if pod in info else {}
        node = placed or told.get("node", "")
        owner = owners[pod].labels if pod in owners else {}
        if owner.get("owner_kind") not in _RANDOM_NAMES:
            fixed.add(f"{space}/{name}")
        own = labels[pod].labels if pod in labels else {}
        common = {
            "cluster": ask.scope.cluster, "job": f"{space}/{name}", "scheduler_id": uid or None,
            "name": _owner(name, owner), "team": space,
            "user": _labelled(own, USER_LABELS), "partition": _labelled(own, QUEUE_LABELS),
            "workload": _labelled(own, WORK_LABELS),
            "qos": told.get("priority_class") or None,
            "submit_s": _value(created, pod), "eligible_s": _value(created, pod),
            "gpus": number, "num_nodes": 1 if node else None, "nodes": [node] if node else None,
            "cpus": cpus.get(pod), "memory_requested": memory.get(pod), "seen_s": ask.until_s,
        }  # fmt: skip
        rows += [common | each for each in _attempts(lives[pod])]
    now = {job: each for job, each in _numbered(rows, names).items() if job in fixed}
    return rows, dict(names) | now


def _lives(ask: StateMetricsQuery, pods: Iterable[PodKey]) -> dict[PodKey, _Life]:
    placed = ask.query_pods("kube_pod_status_scheduled_time")
    started, ended = (
        ask.query_pods("kube_pod_start_time"),
        ask.query_pods("kube_pod_completion_time"),
    )
    phases, ends = _phases(ask), _terminations(ask)
    why = {pod: each.labels.get("reason", "") for pod, each in
           ask.query_pods("kube_pod_status_reason").items() if each.values[-1] > 0}  # fmt: skip
    seen = ask.query_last_true(ask.scope.build_selector("kube_pod_status_phase"))
    ran = ask.query_last_true(ask.scope.build_selector("kube_pod_status_phase", 'phase="Running"'))
    starts = {pod: _value(placed, pod) or _value(started, pod) for pod in pods}
    restarts = _restarts(ask, starts)
    found: dict[PodKey, _Life] = {}
    for pod, start_s in starts.items():
        state, reason = _STATES.get(phases.get(pod, ""), "unknown"), why.get(pod)
        end_s, ended_by = _value(ended, pod), ends.get(pod)
        if state == "failed":
            state = _POD_REASONS.get(reason or "", _TERMINATED.get(ended_by or "", state))
            reason = reason or ended_by
        if state in ("running", "pending") and seen.get(pod, 0.0) <= ask.until_s - 5 * STEP_S:
            state, reason = "cancelled", "its pod was deleted"
            end_s = seen.get(pod) if start_s else None
        elif state not in ("running", "pending") and end_s is None:
            # What a pod told after it last ran was no work.
            end_s = ran.get(pod, seen.get(pod))
        found[pod] = _Life(start_s, end_s, state, reason, ended_by, restarts.get(pod, ()))
    return found


def _attempts(life: _Life) -> Iterable[dict[str, Any]]:
    """Cut a pod's life at its restarts."""
    begins = [life.start_s, *life.restarts]
    for number, begin_s in enumerate(begins):
        if number + 1 < len(begins):
            state, reason = _TERMINATED.get(life.ended_by or "", "failed"), life.ended_by
            end_s: float | None = begins[number + 1]
        else:
            state, reason, end_s = life.state, life.reason, life.end_s
        yield {"attempt": number, "state": state, "reason": reason, "start_s": begin_s,
               "end_s": end_s}  # fmt: skip


def _numbered(
    rows: list[dict[str, Any]], names: Mapping[str, tuple[str, int, int]]
) -> dict[str, tuple[str, int, int]]:
    """Number attempts on where a name came back with another pod behind it."""
    lives: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for row in rows:
        lives.setdefault(row["job"], {}).setdefault(row["scheduler_id"] or "", []).append(row)
    now: dict[str, tuple[str, int, int]] = {}
    for job, pods in lives.items():
        uid, first, last = names.get(job, ("", 0, -1))
        ordered = sorted(pods, key=lambda each: pods[each][0]["submit_s"] or 0.0)
        # Those before the one that is known were numbered when they were read.
        ordered = ordered[ordered.index(uid) :] if uid in ordered else ordered
        for each in ordered:
            first = first if each == uid else last + 1
            for row in pods[each]:
                row["attempt"] += first
            last = max(row["attempt"] for row in pods[each])
            now[job] = (each, first, last)
        for row in [row for each in pods.keys() - set(ordered) for row in pods[each]]:
            rows.remove(row)
    return now


def _requests(
    ask: StateMetricsQuery,
) -> tuple[dict[PodKey, tuple[float, str]], dict[PodKey, float], dict[PodKey, float]]:
    gpus: dict[PodKey, tuple[float, str]] = {}
    name = "kube_pod_container_resource_requests"
    for each in ask.query_last(name, _GPU_RESOURCES):
        part = compute_gpu_fraction(decode_resource_name(each.labels.get("resource", "")))
        pod, value = parse_pod_key(each.labels), float(each.values[-1]) * part
        if value:
            before, node = gpus.get(pod, (0.0, ""))
            gpus[pod] = (before + value, node or each.labels.get("node", ""))
    others: list[dict[PodKey, float]] = []
    for resource in ("cpu", "memory"):
        found: dict[PodKey, float] = {}
        for each in ask.query_last(name, match_value("resource", resource)) if gpus else []:
            pod = parse_pod_key(each.labels)
            if pod in gpus:
                found[pod] = found.get(pod, 0.0) + float(each.values[-1])
        others.append(found)
    return gpus, others[0], others[1]


def _phases(ask: StateMetricsQuery) -> dict[PodKey, str]:
    """Return the newest phase: the one whose series is at one, and of several the last in order."""
    order = ("Pending", "Running", "Unknown", "Failed", "Succeeded")
    found: dict[PodKey, str] = {}
    for each in ask.query_last("kube_pod_status_phase"):
        phase, pod = each.labels.get("phase", ""), parse_pod_key(each.labels)
        if each.values[-1] > 0 and phase in order:
            held = found.get(pod)
            if held is None or order.index(phase) > order.index(held):
                found[pod] = phase
    return found


def _terminations(ask: StateMetricsQuery) -> dict[PodKey, str]:
    found = ask.query_last("kube_pod_container_status_last_terminated_reason")
    found += ask.query_last("kube_pod_container_status_terminated_reason")
    return {
        parse_pod_key(each.labels): each.labels.get("reason", "")
        for each in found
        if each.values[-1] > 0
    }


def _restarts(
    ask: StateMetricsQuery, starts: Mapping[PodKey, float | None]
) -> dict[PodKey, tuple[float, ...]]:
    """Return when containers were started again, each pod's read from its start on.

    Restarts older than what the server keeps are told to have been at the first moment it has.
    """
    name = "kube_pod_container_status_restarts_total"
    again = [
        pod
        for each in ask.query_last(name)
        if each.values[-1] > 0 and (pod := parse_pod_key(each.labels)) in starts
    ]
    spaces: dict[str, list[PodKey]] = {}
    for pod in again:
        spaces.setdefault(pod[0], []).append(pod)
    found: dict[PodKey, tuple[float, ...]] = {}
    for space, pods in spaces.items():
        began = min((starts[pod] or ask.since_s for pod in pods), default=ask.since_s)
        whole = ask._replace(since_s=max(min(began, ask.since_s), ask.until_s - _LONGEST_LIFE_S))
        names = match_any("pod", sorted({pod[1] for pod in pods}))
        metric = ask.scope.build_selector(name, match_value("namespace", space), names)
        for each in whole.query_range(f"last_over_time({metric}[{format_promql_range(STEP_S)}])"):
            rises = np.maximum(np.diff(each.values, prepend=0.0), 0)
            times = tuple(np.repeat(each.time_s, rises.astype(int)).tolist())
            pod = parse_pod_key(each.labels)
            # Of several containers the one that was started most often counts.
            found[pod] = max(found.get(pod, ()), times, key=len)
    return found


def _owner(pod: str, labels: Mapping[str, str]) -> str:
    name, kind = labels.get("owner_name", ""), labels.get("owner_kind", "")
    if name in ("", "<none>"):
        return pod
    if kind == "ReplicaSet":
        return name.rpartition("-")[0] or name
    return find_workload_name(pod, [{"name": name, "kind": kind}], {})


def _labelled(labels: Mapping[str, str], names: Iterable[str]) -> str | None:
    """Return the first of some labels of a pod, which are told with `_` for `.`, `/` and `-`."""
    told = (labels.get("label_" + re.sub(r"[^a-zA-Z0-9]", "_", name)) for name in names)
    return next((each for each in told if each), None)


def _value(found: Mapping[PodKey, TimeSeries], pod: PodKey) -> float | None:
    value = float(found[pod].values[-1]) if pod in found else 0.0
    return value or None
