"""Nodes of a cluster and how they stand: ready, cordoned, down."""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import pyarrow as pa

from meshwright.fleet.sources.kubernetes.quantities import (
    get_list,
    get_mapping,
    parse_quantity,
    parse_time,
)
from meshwright.fleet.sources.kubernetes.resources import NODE_POOL_LABELS, compute_gpu_fraction
from meshwright.fleet.sources.source import make_rows
from meshwright.fleet.tables import NODES

_ORDINARY = ("Ready", "MemoryPressure", "DiskPressure", "PIDPressure", "NetworkUnavailable")
_CORDON = "node.kubernetes.io/unschedulable"


class NodeStatus(NamedTuple):
    """How a node stands, since when, and why."""

    state: str
    since_s: float | None
    reason: str | None


def read_labels(nodes: Iterable[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Return the labels of nodes by their names."""
    return {str(each["metadata"]["name"]): get_mapping(each, "metadata", "labels")
            for each in nodes if get_mapping(each, "metadata").get("name")}  # fmt: skip


def build_node_rows(
    nodes: Iterable[Mapping[str, Any]],
    before: Mapping[str, tuple[str, float]],
    cluster: str,
    seen_s: float,
) -> tuple[pa.Table, dict[str, tuple[str, float]]]:
    """Return rows of nodes that have GPUs, and their states with the time these began.

    `before` is what the last reading returned: a state that goes on keeps its beginning, one that
    has changed ends where the new one begins.
    """
    rows, now = list[dict[str, Any]](), dict[str, tuple[str, float]]()
    for node in nodes:
        facts = _facts(node, cluster, seen_s)
        if not facts["gpus"]:
            continue
        name = str(facts["node"])
        here = parse_node_status(node)
        old = before.get(name)
        since_s = here.since_s if here.since_s is not None else seen_s
        if old is not None:
            since_s = old[1] if old[0] == here.state else max(since_s, old[1])
            if old[0] != here.state:
                rows.append(facts | {"state": old[0], "since_s": old[1], "until_s": since_s})
        now[name] = (here.state, since_s)
        rows.append(facts | {"state": here.state, "since_s": since_s, "reason": here.reason})
    gone = {name: old for name, old in before.items() if name not in now}
    rows += [
        {"cluster": cluster, "node": name, "state": state, "since_s": since_s, "until_s": seen_s,
         "reason": "no longer in the cluster", "seen_s": seen_s}
        for name, (state, since_s) in gone.items()
    ]  # fmt: skip
    if not rows:
        return make_rows("nodes", {"cluster": pa.array([], pa.string())}), now
    return pa.Table.from_pylist(rows, schema=NODES), now


def parse_node_status(node: Mapping[str, Any]) -> NodeStatus:
    """Say how a node stands by its conditions and its cordon."""
    conditions = {str(each.get("type")): each for each in get_list(node, "status", "conditions")}
    ready = conditions.get("Ready", {})
    faults = [
        f"{name}: {each.get('reason') or each.get('message') or 'true'}"
        for name, each in conditions.items()
        if name not in _ORDINARY and each.get("status") == "True"
    ]
    since_s = parse_time(ready.get("lastTransitionTime"))
    if ready.get("status") != "True":
        why = ready.get("message") or ready.get("reason") or "it has told nothing"
        return NodeStatus("down" if ready else "unknown", since_s, "; ".join([str(why), *faults]))
    if get_mapping(node, "spec").get("unschedulable"):
        added = [parse_time(each.get("timeAdded")) for each in get_list(node, "spec", "taints")
                 if each.get("key") == _CORDON]  # fmt: skip
        since_s = next((each for each in added if each is not None), None)
        return NodeStatus("draining", since_s, "; ".join(["cordoned", *faults]))
    return NodeStatus("up", since_s, "; ".join(faults) or None)


def _facts(node: Mapping[str, Any], cluster: str, seen_s: float) -> dict[str, Any]:
    labels, has = get_mapping(node, "metadata", "labels"), get_mapping(node, "status", "capacity")
    pools = [str(labels[each]) for each in NODE_POOL_LABELS if labels.get(each)]
    gpus = sum(
        compute_gpu_fraction(name, labels) * (parse_quantity(value) or 0.0)
        for name, value in has.items()
    )
    return {
        "cluster": cluster,
        "node": get_mapping(node, "metadata").get("name"),
        # A device that fails its check leaves `allocatable`, and stays in `capacity`.
        "gpus": round(gpus),
        "gpu_kind": labels.get("nvidia.com/gpu.product"),
        "partitions": pools[:1] or None,
        "cpus": parse_quantity(has.get("cpu")),
        "memory": parse_quantity(has.get("memory")),
        "seen_s": seen_s,
    }
