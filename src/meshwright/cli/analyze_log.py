"""What `mw analyze` says of logs that NCCL_DEBUG=INFO printed."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from meshwright.cli.answer import Answer, Note, Text, View, facts, table
from meshwright.cli.kept_parts import read_kept
from meshwright.observe.analyze.hang.clues import ranks_text
from meshwright.observe.analyze.nccl_report import NcclReport, nccl_report
from meshwright.timeline.readers.nccl_log import read_nccl_log
from meshwright.timeline.readers.nccl_records import NcclLog

_MOST_GROUPS = 6
_MOST_CALLS = 8
_MOST_FINDINGS = 6
_RECORD = "NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,NET,GRAPH,ENV,COLL"


def nccl_logs(files: Sequence[Path]) -> Answer:
    """Answer with what NCCL chose, and what that proves to be wrong."""
    logs, damaged = read_kept(files, read_nccl_log, NcclLog)
    found = nccl_report(logs)
    return Answer(
        "analyze.nccl/1",
        _data(found, damaged),
        (*_screen(found), *(Note(line) for line in (*found.notes, *damaged))),
        quiet=tuple(one.name for one in found.findings),
        code=1 if damaged else 0,
    )


def _screen(found: NcclReport) -> list[View]:
    files = f"{found.files} files, " if found.files > 1 else ""
    nodes = f"{len(found.hosts)} node{'s' if len(found.hosts) != 1 else ''}"
    head = {
        "nccl log": f"{files}{found.num_processes} processes on {nodes}",
        "version": ", ".join(found.versions) or "not printed",
        "network": ", ".join(found.networks),
        "cards": ", ".join(found.devices),
        "settings": ", ".join(found.settings),
        "warnings": f"{found.warnings:,}" if found.warnings else "none",
    }
    views: list[View] = [facts(head)]
    if found.groups:
        views.append(_groups(found))
    if found.routes:
        views.append(_routes(found))
    if found.called:
        views.append(_called(found))
    views.append(_findings(found))
    lacks = [
        name
        for name, there in (("connections", found.routes), ("calls", found.called))
        if not there
    ]
    if lacks:
        views.append(Text(f"next: record {' and '.join(lacks)} too, with {_RECORD}"))
    return views


def _groups(found: NcclReport) -> View:
    rows = []
    for one in found.groups[:_MOST_GROUPS]:
        seen = "all" if len(one.seen) == one.num_ranks else ranks_text(one.seen)
        ready = "all" if len(one.ready) == one.num_ranks else ranks_text(one.ready) or "none"
        rows.append(
            (
                one.id, one.num_ranks, one.num_nodes, seen, ready, one.channels or "",
                one.rings or "", one.trees or "",
                f"{one.slowest_s:.2f}" if one.slowest_s is not None else "",
            )
        )  # fmt: skip
    return table(
        "communicator, ranks, nodes, with lines, completed, channels, rings, trees, made in s",
        rows,
        f"communicators (of {len(found.groups)})",
        right="ranks, nodes, channels, rings, trees, made in s",
    )


def _routes(found: NcclReport) -> View:
    rows = [
        (
            one.transport,
            one.gpu_direct,
            f"{one.connections:,}",
            f"{one.pairs:,}",
            ", ".join(one.how),
        )
        for one in found.routes
    ]
    return table(
        "transport, GPU-direct, connections, pairs of ranks, as printed",
        rows,
        "what carries data (P2P: NVLink or PCIe, which the log does not tell)",
        right="connections, pairs of ranks",
    )


def _called(found: NcclReport) -> View:
    rows = [
        (
            one.operation,
            f"{one.bytes:,}" if one.bytes >= 0 else "",
            one.dtype,
            one.num_ranks,
            f"{one.calls:,}",
        )
        for one in found.called[:_MOST_CALLS]
    ]
    return table(
        "operation, bytes, type, ranks, calls",
        rows,
        f"calls, of all ranks with lines (of {len(found.called)} kinds and sizes)",
        right="bytes, ranks, calls",
    )


def _findings(found: NcclReport) -> View:
    if not found.findings:
        return Text("findings: these logs prove nothing wrong")
    rows = [
        (
            place,
            one.title,
            one.evidence[0] if one.evidence else "",
            one.remedy.split("; ", maxsplit=1)[0],
        )
        for place, one in enumerate(found.findings[:_MOST_FINDINGS], start=1)
    ]
    more = len(found.findings) - _MOST_FINDINGS
    title = "findings" + (f" (the first {_MOST_FINDINGS}; {more} more in --json)" * (more > 0))
    return table(
        "no, finding, evidence, remedy", rows, title, right="no", wide="finding, evidence, remedy"
    )


def _data(found: NcclReport, damaged: Sequence[str]) -> dict[str, Any]:
    plain: dict[str, Any] = {
        "files": found.files,
        "versions": list(found.versions),
        "networks": list(found.networks),
        "cards": list(found.devices),
        "settings": list(found.settings),
        "hosts": list(found.hosts),
        "processes": found.num_processes,
        "communicators": [one._asdict() for one in found.groups],
        "routes": [one._asdict() for one in found.routes],
        "calls": [
            {**one._asdict(), "bytes": one.bytes if one.bytes >= 0 else None}
            for one in found.called
        ],
        "warnings": found.warnings,
        "findings": msgspec.to_builtins(found.findings),
        "notes": list(found.notes),
        "damaged": list(damaged),
    }
    return plain
