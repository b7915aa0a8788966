"""How nodes stand and stood: snapshots of the controller, and the events that accounting keeps."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import pyarrow as pa

from meshwright.fleet.sources.slurm.formats.delimited_table import DelimitedTable
from meshwright.fleet.sources.slurm.formats.hostlist import expand_hostlist
from meshwright.fleet.sources.slurm.formats.json_objects import (
    Object,
    get_list,
    get_object,
    parse_number,
    parse_state_words,
    parse_text,
    parse_time,
)
from meshwright.fleet.sources.slurm.formats.local_time import LocalTimes
from meshwright.fleet.sources.slurm.formats.states import parse_node_state
from meshwright.fleet.sources.slurm.formats.tres import MIB, parse_gres_gpus, parse_tres
from meshwright.fleet.sources.source import make_rows

_WHO = re.compile(r"\s*\[[^\[\]@]*@([^\[\]]*)\]\s*$")
"""Behind a reason the controller writes who gave it and when."""


class SlurmNode(NamedTuple):
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
    memory_bytes: float | None = None
    boot_s: float | None = None


def build_node_rows(
    nodes: Sequence[SlurmNode], seen_s: float, renames: Mapping[str, str] = {}
) -> pa.Table:
    """Return rows of the table of nodes; who tells no time stands so since it was seen."""

    def whole(value: float | None) -> int | None:
        return None if value is None else round(value)

    return make_rows(
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
            "memory": pa.array([node.memory_bytes for node in nodes], pa.float64()),
            "seen_s": pa.array(np.full(len(nodes), seen_s)),
        },
    )


def nodes_from_scontrol(
    blocks: Sequence[Mapping[str, Any]], cluster: str, zone: str
) -> list[SlurmNode]:
    """Return the nodes of `scontrol show node`."""
    nodes = [block for block in blocks if "NodeName" in block]
    reasons = [_reason(block.get("Reason", "")) for block in nodes]
    since = _times([when for _, when in reasons], zone)
    boots = _times([block.get("BootTime", "") for block in nodes], zone)
    found = []
    for block, (reason, _), changed, boot in zip(nodes, reasons, since, boots, strict=True):
        tres = parse_tres(block.get("CfgTRES", ""))
        gpus, kind = _gpus(block.get("Gres", ""), tres.gpus, tres.gpu_kind)
        state = parse_node_state(block.get("State", ""))
        memory = block.get("RealMemory", "")
        found.append(
            SlurmNode(
                block.get("ClusterName") or cluster,
                block["NodeName"],
                state,
                boot if state == "up" else changed,
                reason=reason or None,
                gpus=gpus,
                gpu_kind=kind,
                partitions=tuple(part for part in block.get("Partitions", "").split(",") if part),
                cpus=float(block["CPUTot"]) if block.get("CPUTot", "").isdigit() else tres.cpus,
                memory_bytes=float(memory) * MIB if memory.isdigit() else tres.memory_bytes,
                boot_s=boot,
            )
        )
    return found


def nodes_from_json(nodes: Sequence[Object], cluster: str) -> list[SlurmNode]:
    """Return the nodes of `scontrol --json`, of slurmrestd or of an older `sinfo --json`."""
    found = []
    for node in nodes:
        if not parse_text(node.get("name")):
            continue
        tres = parse_tres(parse_text(node.get("tres")) or "")
        gpus, kind = _gpus(parse_text(node.get("gres")) or "", tres.gpus, tres.gpu_kind)
        flags = get_list(node, "state_flags")  # the older generation has them apart
        state = parse_node_state(
            "+".join((parse_state_words(node.get("state")), *(str(flag) for flag in flags)))
        )
        boot = parse_time(node.get("boot_time"))
        memory = parse_number(node.get("real_memory"))
        found.append(
            SlurmNode(
                parse_text(node.get("cluster_name")) or cluster,
                str(node["name"]),
                state,
                boot if state == "up" else parse_time(node.get("reason_changed_at")),
                reason=parse_text(node.get("reason")),
                gpus=gpus,
                gpu_kind=kind,
                partitions=tuple(str(part) for part in get_list(node, "partitions")),
                cpus=parse_number(node.get("cpus")),
                memory_bytes=None if memory is None else memory * MIB,
                boot_s=boot,
            )
        )
    return found


def nodes_from_sinfo_json(groups: Sequence[Object], cluster: str) -> list[SlurmNode]:
    """Return the nodes of a newer `sinfo --json`, which tells alike ones together."""
    found: dict[str, SlurmNode] = {}
    for group in groups:
        gpus, kind = _gpus(parse_text(get_object(group, "gres").get("total")) or "", 0.0, None)
        reason = get_object(group, "reason")
        state = parse_node_state(parse_state_words(get_object(group, "node").get("state")))
        partition = parse_text(get_object(group, "partition").get("name"))
        memory = parse_number(get_object(group, "memory").get("maximum"))
        for name in (str(name) for name in get_list(get_object(group, "nodes"), "nodes")):
            before = found.get(name)
            parts = (before.partitions or ()) if before else ()
            found[name] = SlurmNode(
                parse_text(group.get("cluster")) or cluster,
                name,
                state,
                None if state == "up" else parse_time(reason.get("time")),
                reason=parse_text(reason.get("description")),
                gpus=gpus,
                gpu_kind=kind,
                partitions=tuple(dict.fromkeys((*parts, *([partition] if partition else [])))),
                cpus=parse_number(get_object(group, "cpus").get("maximum")),
                memory_bytes=None if memory is None else memory * MIB,
            )
    return list(found.values())


def read_sinfo(stream: BinaryIO, cluster: str) -> list[SlurmNode]:
    """Return the nodes of `sinfo -N` with `|` between its fields, with a header or without."""
    found: dict[str, SlurmNode] = {}
    for row in _sinfo_rows(stream.read().decode(errors="replace").splitlines()):
        gpus, kind = _gpus(row.get("GRES", ""), 0.0, None)
        reason = row.get("REASON", "").strip()
        cpus = (row.get("CPUS") or row.get("CPUS(A/I/O/T)", "")).strip().rpartition("/")[2]
        memory = row.get("MEMORY", "").strip()
        for name in expand_hostlist(row["NODELIST"].strip()):
            parts = found[name].partitions or () if name in found else ()
            partition = row.get("PARTITION", "").strip().rstrip("*")
            found[name] = SlurmNode(
                cluster,
                name,
                parse_node_state(row.get("STATE", "").strip()),
                reason=None if reason in {"", "none"} else reason,
                gpus=gpus,
                gpu_kind=kind,
                partitions=tuple(dict.fromkeys((*parts, *([partition] if partition else [])))),
                cpus=float(cpus) if cpus.isdigit() else None,
                memory_bytes=float(memory) * MIB if memory.isdigit() else None,
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
            elif "GRES" not in told and parse_gres_gpus(field)[0] is not None:
                told["GRES"] = field
            elif "STATE" not in told and parse_node_state(field) != "unknown":
                told["STATE"] = field
            elif re.fullmatch(r"[A-Za-z][\w\-]*\*?", field):
                told["PARTITION"] = field
        yield told


def read_events(stream: BinaryIO, where: str, cluster: str, zone: str) -> list[SlurmNode]:
    """Return the stretches in which nodes were not up, of `sacctmgr -P show event`."""
    table = DelimitedTable(stream, where)
    wanted = ("Cluster", "NodeName", "TimeStart", "TimeEnd", "State", "Reason", "TRES")
    rows = [row for block in table.iter_tables(wanted) for row in block.to_pylist()]
    rows = [row for row in rows if row.get("NodeName")]  # the others are of the whole cluster
    starts = _times([row.get("TimeStart", "") for row in rows], zone)
    ends = _times([row.get("TimeEnd", "") for row in rows], zone)
    found = []
    for row, start, end in zip(rows, starts, ends, strict=True):
        tres = parse_tres(row.get("TRES", ""))
        found.append(
            SlurmNode(
                row.get("Cluster") or cluster,
                row["NodeName"],
                parse_node_state(row.get("State", "")),
                start,
                end,
                row.get("Reason") or None,
                tres.gpus,
                tres.gpu_kind,
                cpus=tres.cpus,
                memory_bytes=tres.memory_bytes,
            )
        )
    return found


def merge_node_history(
    nodes: Iterable[SlurmNode], events: Sequence[SlurmNode], seen_s: float
) -> list[SlurmNode]:
    """Put together what nodes are now and when they were not up: one row for each stretch.

    A node was up between its events. How it stands now holds where accounting has not heard yet.
    """
    by_node: dict[tuple[str, str], list[SlurmNode]] = {}
    for event in events:
        if event.since_s is not None:
            by_node.setdefault((event.cluster, event.node), []).append(event)
    rows: list[SlurmNode] = []
    for now in nodes:
        past = sorted(
            by_node.pop((now.cluster, now.node), []), key=lambda event: event.since_s or 0.0
        )
        rows += _one_node(now, past, seen_s) if past else [now]
    # Nodes that are there no more still were down once.
    rows += [event for past in by_node.values() for event in past]
    return rows


def _one_node(now: SlurmNode, past: Sequence[SlurmNode], seen_s: float) -> list[SlurmNode]:
    up = now._replace(state="up", reason=None, until_s=None)
    rows: list[SlurmNode] = []
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
    count, named = parse_gres_gpus(gres)
    return (counted if count is None else count), named or kind


def _reason(told: str) -> tuple[str, str]:
    """Part a reason from who gave it and when."""
    found = _WHO.search(told)
    reason = told[: found.start()] if found else told
    return ("" if reason in {"(null)", "none"} else reason.strip()), found[1] if found else ""


def _times(texts: Sequence[str], zone: str) -> list[float | None]:
    moments = LocalTimes(pa.array(texts, pa.string()), zone).earliest
    return [None if np.isnan(value) else float(value) for value in moments.tolist()]
