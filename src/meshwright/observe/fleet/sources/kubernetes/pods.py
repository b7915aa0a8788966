"""Pods as jobs: a pod that asks for GPUs is a job, each start of its containers an attempt.

GPUs are held from the moment a pod has a node until its last container has ended, also while
images are pulled and while a crashed container waits to be started again: an attempt therefore
begins where the one before it ended.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import pyarrow as pa

from meshwright.observe.fleet.sources.kubernetes.quantities import (
    amount,
    inside,
    listed,
    mapping,
    moment,
)
from meshwright.observe.fleet.sources.kubernetes.resources import POOLS, asked, gpus_of, pod_total
from meshwright.observe.fleet.sources.source import rows_of
from meshwright.observe.fleet.tables import JOBS

QUEUES = ("kueue.x-k8s.io/queue-name", "volcano.sh/queue-name", "runai/queue")
USERS = (
    "hub.jupyter.org/username",
    "user",
    "username",
    "owner",
    "created-by",
    "app.kubernetes.io/created-by",
)
WORK = ("model", "meshwright/work", "app.kubernetes.io/name")
_NOTEBOOK = re.compile(r"jupyter|notebook|code-server|vscode|rstudio", re.IGNORECASE)
_REASONS = {
    "OOMKilled": "out_of_memory",
    "Evicted": "preempted",
    "Preempting": "preempted",
    "PreemptionByScheduler": "preempted",
    "PreemptionByKueueScheduler": "preempted",
    "DeadlineExceeded": "timeout",
    "NodeLost": "node_fail",
    "NodeShutdown": "node_fail",
    "Terminated": "node_fail",
    "UnexpectedAdmissionError": "node_fail",
    "DeletionByPodGC": "node_fail",
    "Completed": "completed",
}
_SIGNALS = 128
"""Exit codes above are of a container that a signal ended."""


class _Attempt(NamedTuple):
    number: int
    start_s: float | None
    end_s: float | None
    state: str
    exit_code: int | None
    reason: str | None


def jobs(
    pods: Iterable[Mapping[str, Any]],
    nodes: Mapping[str, Mapping[str, Any]],
    cluster: str,
    seen_s: float,
) -> pa.Table:
    """Return attempts of all pods that ask for GPUs; `nodes` are labels of nodes by their name."""
    rows = [row for pod in pods for row in _rows(pod, nodes, cluster, seen_s)]
    return (
        pa.Table.from_pylist(rows, schema=JOBS)
        if rows
        else rows_of("jobs", {"cluster": pa.array([], pa.string())})
    )


def _rows(
    pod: Mapping[str, Any], nodes: Mapping[str, Mapping[str, Any]], cluster: str, seen_s: float
) -> Iterable[dict[str, Any]]:
    meta, spec, status = (mapping(pod, name) for name in ("metadata", "spec", "status"))
    node = spec.get("nodeName")
    labels = nodes.get(node or "", {})
    gpus = pod_total(spec, lambda one: gpus_of(one, labels))
    if not gpus:
        return
    own = mapping(meta, "labels")
    notes = mapping(meta, "annotations")
    space, name = meta.get("namespace") or "default", meta.get("name") or ""
    queue = _first(own, QUEUES) or _first(notes, QUEUES)
    common = {
        "cluster": cluster,
        "job": f"{space}/{name}",
        "number": meta.get("uid"),
        "name": workload(name, listed(meta, "ownerReferences"), own),
        "user": _first(own, USERS) or _first(notes, USERS),
        "team": space,
        "partition": queue or _first(labels, POOLS) or _first(mapping(spec, "nodeSelector"), POOLS),
        "qos": spec.get("priorityClassName"),
        "interactive": _interactive(spec, own),
        "work": _first(own, WORK),
        "submit_s": moment(meta.get("creationTimestamp")),
        "eligible_s": _eligible(meta, spec, status),
        "limit_s": amount(spec.get("activeDeadlineSeconds")),
        "gpus": gpus,
        "gpu_kind": labels.get("nvidia.com/gpu.product"),
        "num_nodes": 1 if node else None,
        "nodes": [node] if node else None,
        "cpus": pod_total(spec, lambda one: amount(asked(one).get("cpu")) or 0.0) or None,
        "memory_asked": pod_total(spec, lambda one: amount(asked(one).get("memory")) or 0.0)
        or None,
        "seen_s": seen_s,
    }
    for one in _attempts(meta, spec, status):
        code = one.exit_code
        yield common | {
            "attempt": one.number,
            "state": one.state,
            "exit_code": code,
            "signal": code - _SIGNALS if code is not None and _SIGNALS < code <= 192 else None,
            "reason": one.reason,
            "start_s": one.start_s,
            "end_s": one.end_s,
        }


def workload(pod: str, owners: Sequence[Mapping[str, Any]], labels: Mapping[str, Any]) -> str:
    """Return the name of what a pod belongs to, the same for all pods and all runs of it."""
    owner = next((each for each in owners if each.get("controller")), owners[0] if owners else {})
    name, kind = str(owner.get("name") or ""), owner.get("kind")
    if kind == "ReplicaSet" and (found := labels.get("pod-template-hash")):
        return name.removesuffix(f"-{found}")
    if kind == "Job":
        # A JobSet or a CronJob stands behind some.
        above = labels.get("jobset.sigs.k8s.io/jobset-name")
        return str(above) if above else re.sub(r"-\d{8,10}$", "", name)
    return name or pod


def _attempts(
    meta: Mapping[str, Any], spec: Mapping[str, Any], status: Mapping[str, Any]
) -> Iterable[_Attempt]:
    """Tell the newest attempts: Kubernetes remembers the one before it, and forgets the others."""
    held_s = _placed(status)
    main = _main(spec, status)
    last = int(main.get("restartCount") or 0)
    before = mapping(main, "lastState", "terminated")
    start_s = held_s
    if last and before:
        ended_s = moment(before.get("finishedAt"))
        # Of the first attempt it is known when the pod got its node, of others when they began.
        began_s = held_s if last == 1 else moment(before.get("startedAt"))
        yield _ended(last - 1, began_s, ended_s, before)
        start_s = ended_s
    yield _newest(last, start_s, meta, status, main)


def _newest(
    number: int,
    start_s: float | None,
    meta: Mapping[str, Any],
    status: Mapping[str, Any],
    main: Mapping[str, Any],
) -> _Attempt:
    phase = status.get("phase")
    over = mapping(main, "state", "terminated")
    why = status.get("reason") or _disruption(status) or inside(main, "state", "waiting", "reason")
    if phase == "Pending" and start_s is None:
        return _Attempt(number, None, None, "pending", None, _waits(status))
    if phase in ("Pending", "Running"):
        return _Attempt(number, start_s, None, "running", None, why)
    ends = [moment(inside(each, "state", "terminated", "finishedAt"))
            for each in listed(status, "containerStatuses")]  # fmt: skip
    end_s = max((each for each in ends if each is not None), default=None)
    end_s = end_s if end_s is not None else moment(meta.get("deletionTimestamp"))
    if phase == "Succeeded":
        return _Attempt(number, start_s, end_s, "completed", 0, None)
    if phase == "Failed":
        found = _ended(number, start_s, end_s, over)
        return found._replace(state=_REASONS.get(str(why), found.state), reason=why or found.reason)
    return _Attempt(number, start_s, end_s, "unknown", None, why)


def _ended(
    number: int, start_s: float | None, end_s: float | None, over: Mapping[str, Any]
) -> _Attempt:
    code = over.get("exitCode")
    reason = over.get("reason")
    state = _REASONS.get(str(reason), "completed" if code == 0 else "failed")
    return _Attempt(number, start_s, end_s, state, code, reason)


def _main(spec: Mapping[str, Any], status: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the state of the container with the GPUs, of several the one started most often."""
    names = {each.get("name") for each in listed(spec, "containers") if gpus_of(each)}
    found = [each for each in listed(status, "containerStatuses") if each.get("name") in names]
    return max(found, key=lambda each: int(each.get("restartCount") or 0), default={})


def _placed(status: Mapping[str, Any]) -> float | None:
    """Return when a pod got its node: from then on its GPUs are nobody else's."""
    for each in listed(status, "conditions"):
        if each.get("type") == "PodScheduled" and each.get("status") == "True":
            return moment(each.get("lastTransitionTime"))
    return moment(status.get("startTime"))


def _eligible(
    meta: Mapping[str, Any], spec: Mapping[str, Any], status: Mapping[str, Any]
) -> float | None:
    """Return when a pod might have started; a gate that is still closed keeps it from that."""
    gated = spec.get("schedulingGates") or any(
        each.get("reason") == "SchedulingGated" for each in listed(status, "conditions")
    )
    return None if gated else moment(meta.get("creationTimestamp"))


def _waits(status: Mapping[str, Any]) -> str | None:
    for each in listed(status, "conditions"):
        if each.get("type") == "PodScheduled" and each.get("status") == "False":
            return each.get("message") or each.get("reason")
    return None


def _disruption(status: Mapping[str, Any]) -> str | None:
    for each in listed(status, "conditions"):
        if each.get("type") == "DisruptionTarget" and each.get("status") == "True":
            return each.get("reason")
    return None


def _interactive(spec: Mapping[str, Any], labels: Mapping[str, Any]) -> bool:
    if "notebook-name" in labels or labels.get("component") == "singleuser-server":
        return True
    return any(
        (each.get("stdin") and each.get("tty")) or _NOTEBOOK.search(str(each.get("image") or ""))
        for each in listed(spec, "containers")
    )


def _first(found: Mapping[str, Any], names: Iterable[str]) -> str | None:
    return next((str(found[name]) for name in names if found.get(name)), None)
