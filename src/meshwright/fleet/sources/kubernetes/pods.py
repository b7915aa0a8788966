"""Pods as jobs: a pod that asks for GPUs is a job, each start of its containers an attempt.

GPUs are held from the moment a pod has a node until its last container has ended, also while
images are pulled and while a crashed container waits to be started again: an attempt therefore
begins where the one before it ended.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import pyarrow as pa

from meshwright.fleet.sources.kubernetes.quantities import (
    get_list,
    get_mapping,
    get_path,
    parse_quantity,
    parse_time,
)
from meshwright.fleet.sources.kubernetes.resources import (
    NODE_POOL_LABELS,
    count_container_gpus,
    read_requests,
    sum_pod_requests,
)
from meshwright.fleet.sources.source import make_rows
from meshwright.fleet.tables import JOBS

QUEUE_LABELS = ("kueue.x-k8s.io/queue-name", "volcano.sh/queue-name", "runai/queue")
USER_LABELS = (
    "hub.jupyter.org/username",
    "user",
    "username",
    "owner",
    "created-by",
    "app.kubernetes.io/created-by",
)
WORK_LABELS = ("model", "meshwright/work", "app.kubernetes.io/name")
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


def build_job_rows(
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
        else make_rows("jobs", {"cluster": pa.array([], pa.string())})
    )


def _rows(
    pod: Mapping[str, Any], nodes: Mapping[str, Mapping[str, Any]], cluster: str, seen_s: float
) -> Iterable[dict[str, Any]]:
    meta, spec, status = (get_mapping(pod, name) for name in ("metadata", "spec", "status"))
    node = spec.get("nodeName")
    labels = nodes.get(node or "", {})
    gpus = sum_pod_requests(spec, lambda one: count_container_gpus(one, labels))
    if not gpus:
        return
    own = get_mapping(meta, "labels")
    notes = get_mapping(meta, "annotations")
    space, name = meta.get("namespace") or "default", meta.get("name") or ""
    queue = _first(own, QUEUE_LABELS) or _first(notes, QUEUE_LABELS)
    common = {
        "cluster": cluster,
        "job": f"{space}/{name}",
        "scheduler_id": meta.get("uid"),
        "name": find_workload_name(name, get_list(meta, "ownerReferences"), own),
        "user": _first(own, USER_LABELS) or _first(notes, USER_LABELS),
        "team": space,
        "partition": queue
        or _first(labels, NODE_POOL_LABELS)
        or _first(get_mapping(spec, "nodeSelector"), NODE_POOL_LABELS),
        "qos": spec.get("priorityClassName"),
        "interactive": _interactive(spec, own),
        "workload": _first(own, WORK_LABELS),
        "submit_s": parse_time(meta.get("creationTimestamp")),
        "eligible_s": _eligible(meta, spec, status),
        "time_limit_s": parse_quantity(spec.get("activeDeadlineSeconds")),
        "gpus": gpus,
        "gpu_kind": labels.get("nvidia.com/gpu.product"),
        "num_nodes": 1 if node else None,
        "nodes": [node] if node else None,
        "cpus": sum_pod_requests(
            spec, lambda one: parse_quantity(read_requests(one).get("cpu")) or 0.0
        )
        or None,
        "memory_requested": sum_pod_requests(
            spec, lambda one: parse_quantity(read_requests(one).get("memory")) or 0.0
        )
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


def find_workload_name(
    pod: str, owners: Sequence[Mapping[str, Any]], labels: Mapping[str, Any]
) -> str:
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
    before = get_mapping(main, "lastState", "terminated")
    start_s = held_s
    if last and before:
        ended_s = parse_time(before.get("finishedAt"))
        # Of the first attempt it is known when the pod got its node, of others when they began.
        began_s = held_s if last == 1 else parse_time(before.get("startedAt"))
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
    over = get_mapping(main, "state", "terminated")
    why = (
        status.get("reason") or _disruption(status) or get_path(main, "state", "waiting", "reason")
    )
    if phase == "Pending" and start_s is None:
        return _Attempt(number, None, None, "pending", None, _waits(status))
    if phase in ("Pending", "Running"):
        return _Attempt(number, start_s, None, "running", None, why)
    ends = [parse_time(get_path(each, "state", "terminated", "finishedAt"))
            for each in get_list(status, "containerStatuses")]  # fmt: skip
    end_s = max((each for each in ends if each is not None), default=None)
    end_s = end_s if end_s is not None else parse_time(meta.get("deletionTimestamp"))
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
    names = {
        each.get("name") for each in get_list(spec, "containers") if count_container_gpus(each)
    }
    found = [each for each in get_list(status, "containerStatuses") if each.get("name") in names]
    return max(found, key=lambda each: int(each.get("restartCount") or 0), default={})


def _placed(status: Mapping[str, Any]) -> float | None:
    """Return when a pod got its node: from then on its GPUs are nobody else's."""
    for each in get_list(status, "conditions"):
        if each.get("type") == "PodScheduled" and each.get("status") == "True":
            return parse_time(each.get("lastTransitionTime"))
    return parse_time(status.get("startTime"))


def _eligible(
    meta: Mapping[str, Any], spec: Mapping[str, Any], status: Mapping[str, Any]
) -> float | None:
    """Return when a pod might have started; a gate that is still closed keeps it from that."""
    gated = spec.get("schedulingGates") or any(
        each.get("reason") == "SchedulingGated" for each in get_list(status, "conditions")
    )
    return None if gated else parse_time(meta.get("creationTimestamp"))


def _waits(status: Mapping[str, Any]) -> str | None:
    for each in get_list(status, "conditions"):
        if each.get("type") == "PodScheduled" and each.get("status") == "False":
            return each.get("message") or each.get("reason")
    return None


def _disruption(status: Mapping[str, Any]) -> str | None:
    for each in get_list(status, "conditions"):
        if each.get("type") == "DisruptionTarget" and each.get("status") == "True":
            return each.get("reason")
    return None


def _interactive(spec: Mapping[str, Any], labels: Mapping[str, Any]) -> bool:
    if "notebook-name" in labels or labels.get("component") == "singleuser-server":
        return True
    return any(
        (each.get("stdin") and each.get("tty")) or _NOTEBOOK.search(str(each.get("image") or ""))
        for each in get_list(spec, "containers")
    )


def _first(found: Mapping[str, Any], names: Iterable[str]) -> str | None:
    return next((str(found[name]) for name in names if found.get(name)), None)
