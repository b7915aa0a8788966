"""Pods and nodes of the past, from the series that kube-state-metrics left in Prometheus.

What stays the same of a pod is asked for once, at the end of the time; only restarts and the states
of nodes are asked for moment by moment.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from meshwright.observe.fleet.sources.kubernetes.pods import QUEUES, USERS, WORK, workload
from meshwright.observe.fleet.sources.kubernetes.resources import gpu_part, resource_of
from meshwright.observe.fleet.sources.prometheus.answers import Floats, Series
from meshwright.observe.fleet.sources.prometheus.asking import Fleet
from meshwright.observe.fleet.sources.prometheus.client import Prometheus
from meshwright.observe.fleet.sources.prometheus.grid import window
from meshwright.observe.fleet.tables import JOBS, NODES

_GPU_RESOURCES = 'resource=~"nvidia_com_(gpu|mig).*|amd_com_gpu|gpu_intel_com_.*"'
_STATES = {"Succeeded": "completed", "Failed": "failed", "Running": "running", "Pending": "pending"}
_TERMINATED = {"OOMKilled": "out_of_memory", "Evicted": "preempted", "DeadlineExceeded": "timeout",
    "Completed": "completed"}  # fmt: skip
_POD_REASONS = {"Evicted": "preempted", "NodeLost": "node_fail", "NodeAffinity": "node_fail",
    "Shutdown": "node_fail", "UnexpectedAdmissionError": "node_fail"}  # fmt: skip
_STEP_S = 60.0
_LONGEST_LIFE_S = 30 * 86400.0
"""Restarts are not looked for further back."""
Pod = tuple[str, str, str]


class _Ask(NamedTuple):
    """Whom to ask about which time."""

    server: Prometheus
    fleet: Fleet
    since_s: float
    until_s: float

    @property
    def span(self) -> str:
        return f"{max(60, round(self.until_s - self.since_s))}s"

    def last(self, metric: str, *matchers: str) -> list[Series]:
        """Ask for the newest value that each series had in this time."""
        if metric not in self.fleet.names:
            return []
        return self.server.query(
            f"last_over_time({self.fleet.of(metric, *matchers)}[{self.span}])", self.until_s
        )

    def pods(self, metric: str, *matchers: str) -> dict[Pod, Series]:
        return {_pod(each.labels): each for each in self.last(metric, *matchers)}

    def last_true(self, metric: str) -> dict[Pod, float]:
        """Ask when a metric was last one.

        The time of the sample itself is wanted: a server shows it for some minutes more.
        """
        inner = f"(timestamp({metric}) and {metric} == 1)[{self.span}:{round(_STEP_S)}s]"
        found = self.server.query(f"max_over_time({inner})", self.until_s)
        times: dict[Pod, float] = {}
        for each in found:
            pod = _pod(each.labels)
            times[pod] = max(times.get(pod, 0.0), float(each.values[-1]))
        return times

    def steps(self, expression: str) -> list[Series]:
        """Ask for every minute."""
        start_s = _STEP_S * np.ceil(self.since_s / _STEP_S)
        return self.server.query_range(expression, start_s, self.until_s, _STEP_S)


Nodes = dict[str, tuple[str, float]]
"""How nodes stood last, and since when."""


class _Life(NamedTuple):
    """What became of a pod."""

    start_s: float | None
    end_s: float | None
    state: str
    reason: str | None
    ended_by: str | None
    """Why its containers ended, where they did before the pod."""
    restarts: tuple[float, ...] = ()


def read_state_metrics(
    server: Prometheus, fleet: Fleet, since_s: float, until_s: float, before: Nodes
) -> tuple[list[tuple[str, pa.Table]], Nodes]:
    """Return rows of nodes and of jobs, and how nodes stand at the end.

    `before` is how they stood at the end of the last reading: a state that goes on keeps its
    beginning.
    """
    ask = _Ask(server, fleet, since_s, until_s)
    nodes, standing = _node_rows(ask, before)
    found = [("nodes", pa.Table.from_pylist(nodes, schema=NODES))] if nodes else []
    rows = _job_rows(ask)
    if rows:
        found.append(("jobs", pa.Table.from_pylist(rows, schema=JOBS)))
    return found, standing


def _pod(labels: Mapping[str, str]) -> Pod:
    """Name a pod; `exported_…` are its own labels where Prometheus put the exporter's over them."""
    space = labels.get("exported_namespace") or labels.get("namespace", "")
    return space, labels.get("exported_pod") or labels.get("pod", ""), labels.get("uid", "")


def _job_rows(ask: _Ask) -> list[dict[str, Any]]:
    gpus, cpus, memory = _requests(ask)
    if not gpus:
        return []
    created, owners = ask.pods("kube_pod_created"), ask.pods("kube_pod_owner")
    info, lives = ask.pods("kube_pod_info"), _lives(ask, gpus)
    labels = ask.pods("kube_pod_labels")
    rows = list[dict[str, Any]]()
    for pod, (number, placed) in gpus.items():
        space, name, uid = pod
        told = info[pod].labels if pod in info else {}
        node = placed or told.get("node", "")
        owner = owners[pod].labels if pod in owners else {}
        own = labels[pod].labels if pod in labels else {}
        common = {
            "cluster": ask.fleet.cluster, "job": f"{space}/{name}", "number": uid or None,
            "name": _owner(name, owner), "team": space,
            "user": _labelled(own, USERS), "partition": _labelled(own, QUEUES),
            "work": _labelled(own, WORK),
            "qos": told.get("priority_class") or None,
            "submit_s": _value(created, pod), "eligible_s": _value(created, pod),
            "gpus": number, "num_nodes": 1 if node else None, "nodes": [node] if node else None,
            "cpus": cpus.get(pod), "memory_asked": memory.get(pod), "seen_s": ask.until_s,
        }  # fmt: skip
        rows += [common | each for each in _attempts(lives[pod])]
    return _numbered(rows)


def _lives(ask: _Ask, pods: Iterable[Pod]) -> dict[Pod, _Life]:
    placed = ask.pods("kube_pod_status_scheduled_time")
    started, ended = ask.pods("kube_pod_start_time"), ask.pods("kube_pod_completion_time")
    phases, ends = _phases(ask), _terminations(ask)
    why = {pod: each.labels.get("reason", "") for pod, each in
           ask.pods("kube_pod_status_reason").items() if each.values[-1] > 0}  # fmt: skip
    seen = ask.last_true(ask.fleet.of("kube_pod_status_phase"))
    starts = {pod: _value(placed, pod) or _value(started, pod) for pod in pods}
    restarts = _restarts(ask, starts)
    found: dict[Pod, _Life] = {}
    for pod, start_s in starts.items():
        state, reason = _STATES.get(phases.get(pod, ""), "unknown"), why.get(pod)
        end_s, ended_by = _value(ended, pod), ends.get(pod)
        if state == "failed":
            state = _POD_REASONS.get(reason or "", _TERMINATED.get(ended_by or "", state))
            reason = reason or ended_by
        if state in ("running", "pending") and seen.get(pod, 0.0) <= ask.until_s - 5 * _STEP_S:
            state, reason = "cancelled", "its pod was deleted"
            end_s = seen.get(pod) if start_s else None
        elif state not in ("running", "pending") and end_s is None:
            end_s = _last_running(ask, pod, seen)
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


def _numbered(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Number attempts on where a name came back with another pod behind it."""
    lives: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for row in rows:
        lives.setdefault(row["job"], {}).setdefault(row["number"] or "", []).append(row)
    for pods in lives.values():
        first = 0
        ordered = sorted(pods.values(), key=lambda found: found[0]["submit_s"] or 0.0)
        for found in ordered:
            for row in found:
                row["attempt"] += first
            first = max(row["attempt"] for row in found) + 1
    return rows


def _requests(ask: _Ask) -> tuple[dict[Pod, tuple[float, str]], dict[Pod, float], dict[Pod, float]]:
    gpus: dict[Pod, tuple[float, str]] = {}
    name = "kube_pod_container_resource_requests"
    for each in ask.last(name, _GPU_RESOURCES):
        part = gpu_part(resource_of(each.labels.get("resource", "")))
        pod, value = _pod(each.labels), float(each.values[-1]) * part
        if value:
            before, node = gpus.get(pod, (0.0, ""))
            gpus[pod] = (before + value, node or each.labels.get("node", ""))
    others: list[dict[Pod, float]] = []
    for resource in ("cpu", "memory"):
        found: dict[Pod, float] = {}
        for each in ask.last(name, f'resource="{resource}"') if gpus else []:
            pod = _pod(each.labels)
            if pod in gpus:
                found[pod] = found.get(pod, 0.0) + float(each.values[-1])
        others.append(found)
    return gpus, others[0], others[1]


def _phases(ask: _Ask) -> dict[Pod, str]:
    """Return the newest phase: the one whose series is at one, and of several the last in order."""
    order = ("Pending", "Running", "Unknown", "Failed", "Succeeded")
    found: dict[Pod, str] = {}
    for each in ask.last("kube_pod_status_phase"):
        phase, pod = each.labels.get("phase", ""), _pod(each.labels)
        if each.values[-1] > 0 and phase in order:
            held = found.get(pod)
            if held is None or order.index(phase) > order.index(held):
                found[pod] = phase
    return found


def _terminations(ask: _Ask) -> dict[Pod, str]:
    found = ask.last("kube_pod_container_status_last_terminated_reason")
    found += ask.last("kube_pod_container_status_terminated_reason")
    return {
        _pod(each.labels): each.labels.get("reason", "") for each in found if each.values[-1] > 0
    }


def _restarts(ask: _Ask, starts: Mapping[Pod, float | None]) -> dict[Pod, tuple[float, ...]]:
    """Return when containers were started again, each pod's read from its start on.

    Restarts older than what the server keeps are told to have been at the first moment it has.
    """
    name = "kube_pod_container_status_restarts_total"
    again = [
        pod
        for each in ask.last(name)
        if each.values[-1] > 0 and (pod := _pod(each.labels)) in starts
    ]
    spaces: dict[str, list[Pod]] = {}
    for pod in again:
        spaces.setdefault(pod[0], []).append(pod)
    found: dict[Pod, tuple[float, ...]] = {}
    for space, pods in spaces.items():
        began = min((starts[pod] or ask.since_s for pod in pods), default=ask.since_s)
        whole = ask._replace(since_s=max(min(began, ask.since_s), ask.until_s - _LONGEST_LIFE_S))
        names = "|".join(sorted({pod[1] for pod in pods}))
        metric = ask.fleet.of(name, f'namespace="{space}"', f'pod=~"{names}"')
        for each in whole.steps(f"last_over_time({metric}[{window(_STEP_S)}])"):
            rises = np.maximum(np.diff(each.values, prepend=0.0), 0)
            times = tuple(np.repeat(each.time_s, rises.astype(int)).tolist())
            pod = _pod(each.labels)
            # Of several containers the one that was started most often counts.
            found[pod] = max(found.get(pod, ()), times, key=len)
    return found


def _last_running(ask: _Ask, pod: Pod, seen: Mapping[Pod, float]) -> float | None:
    """Return when a pod that has ended was last seen to run; what it told since is no work."""
    space, name, _ = pod
    metric = ask.fleet.of(
        "kube_pod_status_phase", 'phase="Running"', f'namespace="{space}"', f'pod="{name}"'
    )
    return ask.last_true(metric).get(pod, seen.get(pod))


def _owner(pod: str, labels: Mapping[str, str]) -> str:
    name, kind = labels.get("owner_name", ""), labels.get("owner_kind", "")
    if name in ("", "<none>"):
        return pod
    if kind == "ReplicaSet":
        return name.rpartition("-")[0] or name
    return workload(pod, [{"name": name, "kind": kind}], {})


def _labelled(labels: Mapping[str, str], names: Iterable[str]) -> str | None:
    """Return the first of some labels of a pod, which are told with `_` for `.`, `/` and `-`."""
    told = (labels.get("label_" + re.sub(r"[^a-zA-Z0-9]", "_", name)) for name in names)
    return next((each for each in told if each), None)


def _value(found: Mapping[Pod, Series], pod: Pod) -> float | None:
    value = float(found[pod].values[-1]) if pod in found else 0.0
    return value or None


def _node_rows(ask: _Ask, before: Nodes) -> tuple[list[dict[str, Any]], Nodes]:
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


def _by_node(ask: _Ask, metric: str, *matchers: str) -> dict[str, Series]:
    if metric not in ask.fleet.names:
        return {}
    selected = ask.fleet.of(metric, *matchers)
    asked = f"max by (node) (last_over_time({selected}[{window(_STEP_S)}]))"
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
