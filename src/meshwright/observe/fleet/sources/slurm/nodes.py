"""How nodes stand and stood: snapshots of the controller, and the events that accounting keeps."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import pyarrow as pa

from meshwright.observe.fleet.sources.slurm.clock import Moments
from meshwright.observe.fleet.sources.slurm.delimited import Delimited
from meshwright.observe.fleet.sources.slurm.hostlist import names_of
from meshwright.observe.fleet.sources.slurm.objects import (
    Object,
    entries,
    inner,
    moment,
    number,
    text,
    words,
)
from meshwright.observe.fleet.sources.slurm.states import node_state
from meshwright.observe.fleet.sources.slurm.tres import MIB, gpus_of_gres, tres_of
from meshwright.observe.fleet.sources.source import rows_of

_WHO = re.compile(r"\s*\[[^\[\]@]*@([^\[\]]*)\]\s*$")
"""Behind a reason the controller writes who gave it and when."""


class Node(NamedTuple):
    """How one node stands at a moment, or stood for a while."""

    cluster: str
    node: str
    state: str
    since_s: float | None = None
    """None: not told."""
    until_s: float | None = None
    reason: str | None = None
    gpus: float | None = None
    gpu_kind: str | None = None
    partitions: tuple[str, ...] | None = None
    cpus: float | None = None
    memory: float | None = None
    boot_s: float | None = None


def node_rows(nodes: Sequence[Node], seen_s: float, renames: Mapping[str, str] = {}) -> pa.Table:
    """Return rows of the table of nodes; who tells no time stands so since it was seen."""

    def whole(value: float | None) -> int | None:
        return None if value is None else round(value)

    return rows_of(
        "nodes",
        {
            "cluster": pa.array([node.cluster for node in nodes], pa.string()),
            "node": pa.array([renames.get(node.node, node.node) for node in nodes], pa.string()),
            "since_s": pa.array(
                [seen_s if node.since_s is None else node.since_s for node in nodes], pa.float64()
            ),
            "until_s": pa.array([node.until_s for node in nodes], pa.float64()),
            "state": pa.array([node.state for node in nodes], pa.string()),
            "reason": pa.array([node.reason for node in nodes], pa.string()),
            "gpus": pa.array([whole(node.gpus) for node in nodes], pa.int32()),
            "gpu_kind": pa.array([node.gpu_kind for node in nodes], pa.string()),
            "partitions": pa.array(
                [None if node.partitions is None else list(node.partitions) for node in nodes],
                pa.list_(pa.string()),
            ),
            "cpus": pa.array([node.cpus for node in nodes], pa.float64()),
            "memory": pa.array([node.memory for node in nodes], pa.float64()),
            "seen_s": pa.array(np.full(len(nodes), seen_s)),
        },
    )


def from_blocks(blocks: Sequence[Mapping[str, Any]], cluster: str, zone: str) -> list[Node]:
    """Return the nodes of `scontrol show node`."""
    nodes = [block for block in blocks if "NodeName" in block]
    reasons = [_reason(block.get("Reason", "")) for block in nodes]
    since = _times([when for _, when in reasons], zone)
    boots = _times([block.get("BootTime", "") for block in nodes], zone)
    found = []
    for block, (reason, _), changed, boot in zip(nodes, reasons, since, boots, strict=True):
        tres = tres_of(block.get("CfgTRES", ""))
        gpus, kind = _gpus(block.get("Gres", ""), tres.gpus, tres.gpu_kind)
        state = node_state(block.get("State", ""))
        memory = block.get("RealMemory", "")
        found.append(
            Node(
                block.get("ClusterName") or cluster,
                block["NodeName"],
                state,
                boot if state == "up" else changed,
                reason=reason or None,
                gpus=gpus,
                gpu_kind=kind,
                partitions=tuple(part for part in block.get("Partitions", "").split(",") if part),
                cpus=float(block["CPUTot"]) if block.get("CPUTot", "").isdigit() else tres.cpus,
                memory=float(memory) * MIB if memory.isdigit() else tres.memory,
                boot_s=boot,
            )
        )
    return found


def from_objects(nodes: Sequence[Object], cluster: str) -> list[Node]:
    """Return the nodes of `scontrol --json`, of slurmrestd or of an older `sinfo --json`."""
    found = []
    for node in nodes:
        if not text(node.get("name")):
            continue
        tres = tres_of(text(node.get("tres")) or "")
        gpus, kind = _gpus(text(node.get("gres")) or "", tres.gpus, tres.gpu_kind)
        flags = entries(node, "state_flags")  # the older generation has them apart
        state = node_state("+".join((words(node.get("state")), *(str(flag) for flag in flags))))
        boot = moment(node.get("boot_time"))
        memory = number(node.get("real_memory"))
        found.append(
            Node(
                text(node.get("cluster_name")) or cluster,
                str(node["name"]),
                state,
                boot if state == "up" else moment(node.get("reason_changed_at")),
                reason=text(node.get("reason")),
                gpus=gpus,
                gpu_kind=kind,
                partitions=tuple(str(part) for part in entries(node, "partitions")),
                cpus=number(node.get("cpus")),
                memory=None if memory is None else memory * MIB,
                boot_s=boot,
            )
        )
    return found


def from_sinfo(groups: Sequence[Object], cluster: str) -> list[Node]:
    """Return the nodes of a newer `sinfo --json`, which tells alike ones together."""
    found: dict[str, Node] = {}
    for group in groups:
        gpus, kind = _gpus(text(inner(group, "gres").get("total")) or "", 0.0, None)
        reason = inner(group, "reason")
        state = node_state(words(inner(group, "node").get("state")))
        partition = text(inner(group, "partition").get("name"))
        memory = number(inner(group, "memory").get("maximum"))
        for name in (str(name) for name in entries(inner(group, "nodes"), "nodes")):
            before = found.get(name)
            parts = (before.partitions or ()) if before else ()
            found[name] = Node(
                text(group.get("cluster")) or cluster,
                name,
                state,
                None if state == "up" else moment(reason.get("time")),
                reason=text(reason.get("description")),
                gpus=gpus,
                gpu_kind=kind,
                partitions=tuple(dict.fromkeys((*parts, *([partition] if partition else [])))),
                cpus=number(inner(group, "cpus").get("maximum")),
                memory=None if memory is None else memory * MIB,
            )
    return list(found.values())


def read_sinfo(stream: BinaryIO, cluster: str) -> list[Node]:
    """Return the nodes of `sinfo -N` with `|` between its fields, with a header or without."""
    found: dict[str, Node] = {}
    for row in _sinfo_rows(stream.read().decode(errors="replace").splitlines()):
        gpus, kind = _gpus(row.get("GRES", ""), 0.0, None)
        reason = row.get("REASON", "").strip()
        cpus = (row.get("CPUS") or row.get("CPUS(A/I/O/T)", "")).strip().rpartition("/")[2]
        memory = row.get("MEMORY", "").strip()
        for name in names_of(row["NODELIST"].strip()):
            parts = found[name].partitions or () if name in found else ()
            partition = row.get("PARTITION", "").strip().rstrip("*")
            found[name] = Node(
                cluster,
                name,
                node_state(row.get("STATE", "").strip()),
                reason=None if reason in {"", "none"} else reason,
                gpus=gpus,
                gpu_kind=kind,
                partitions=tuple(dict.fromkeys((*parts, *([partition] if partition else [])))),
                cpus=float(cpus) if cpus.isdigit() else None,
                memory=float(memory) * MIB if memory.isdigit() else None,
            )
    return list(found.values())


def _sinfo_rows(lines: Sequence[str]) -> Iterator[dict[str, str]]:
    rows = [[field.strip() for field in line.split("|")] for line in lines if "|" in line]
    if rows and "NODELIST" in rows[0]:
        yield from (dict(zip(rows[0], row, strict=False)) for row in rows[1:])
        return
    # Without a header fields are known by what they look like; the node comes first.
    for node, *row in rows:
        told = {"NODELIST": node}
        for field in row:
            if re.fullmatch(r"\d+/\d+/\d+/\d+", field):
                told["CPUS(A/I/O/T)"] = field
            elif "GRES" not in told and gpus_of_gres(field)[0] is not None:
                told["GRES"] = field
            elif "STATE" not in told and node_state(field) != "unknown":
                told["STATE"] = field
            elif re.fullmatch(r"[A-Za-z][\w\-]*\*?", field):
                told["PARTITION"] = field
        yield told


def read_events(stream: BinaryIO, where: str, cluster: str, zone: str) -> list[Node]:
    """Return the stretches in which nodes were not up, of `sacctmgr -P show event`."""
    table = Delimited(stream, where)
    wanted = ("Cluster", "NodeName", "TimeStart", "TimeEnd", "State", "Reason", "TRES")
    rows = [row for block in table.tables(wanted) for row in block.to_pylist()]
    rows = [row for row in rows if row.get("NodeName")]  # the others are of the whole cluster
    starts = _times([row.get("TimeStart", "") for row in rows], zone)
    ends = _times([row.get("TimeEnd", "") for row in rows], zone)
    found = []
    for row, start, end in zip(rows, starts, ends, strict=True):
        tres = tres_of(row.get("TRES", ""))
        found.append(
            Node(
                row.get("Cluster") or cluster,
                row["NodeName"],
                node_state(row.get("State", "")),
                start,
                end,
                row.get("Reason") or None,
                tres.gpus,
                tres.gpu_kind,
                cpus=tres.cpus,
                memory=tres.memory,
            )
        )
    return found


def stretches(nodes: Iterable[Node], events: Sequence[Node], seen_s: float) -> list[Node]:
    """Put together what nodes are now and when they were not up: one row for each stretch.

    A node was up between its events. How it stands now holds where accounting has not heard yet.
    """
    by_node: dict[tuple[str, str], list[Node]] = {}
    for event in events:
        if event.since_s is not None:
            by_node.setdefault((event.cluster, event.node), []).append(event)
    rows: list[Node] = []
    for now in nodes:
        past = sorted(
            by_node.pop((now.cluster, now.node), []), key=lambda event: event.since_s or 0.0
        )
        rows += _one_node(now, past, seen_s) if past else [now]
    # Nodes that are there no more still were down once.
    rows += [event for past in by_node.values() for event in past]
    return rows


def _one_node(now: Node, past: Sequence[Node], seen_s: float) -> list[Node]:
    up = now._replace(state="up", reason=None, until_s=None)
    rows: list[Node] = []
    begin = now.boot_s if now.boot_s is not None and now.boot_s < (past[0].since_s or 0.0) else None
    for event in past:
        if begin is not None and event.since_s is not None and begin < event.since_s:
            rows.append(up._replace(since_s=begin, until_s=event.since_s))
        ends = event.until_s
        if ends is None and (now.state == "up" or event is not past[-1]):
            ends = seen_s  # it came back, which accounting has not heard yet
        rows.append(
            now._replace(
                state=event.state, reason=event.reason, since_s=event.since_s, until_s=ends
            )
        )
        begin = ends
    if begin is not None:
        last = up if now.state == "up" else now
        rows.append(last._replace(since_s=begin, until_s=None))
    return rows


def _gpus(gres: str, counted: float | None, kind: str | None) -> tuple[float | None, str | None]:
    count, named = gpus_of_gres(gres)
    return (counted if count is None else count), named or kind


def _reason(told: str) -> tuple[str, str]:
    """Part a reason from who gave it and when."""
    found = _WHO.search(told)
    reason = told[: found.start()] if found else told
    return ("" if reason in {"(null)", "none"} else reason.strip()), found[1] if found else ""


def _times(texts: Sequence[str], zone: str) -> list[float | None]:
    moments = Moments(pa.array(texts, pa.string()), zone).first
    return [None if np.isnan(value) else float(value) for value in moments.tolist()]
