"""What `mw analyze` says of logs that NCCL_DEBUG=INFO printed."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from meshwright.cli.flags.trace_input import read_undamaged
from meshwright.cli.result import CommandResult, NoteView, TextView, View, make_fields, make_table
from meshwright.observe.analyze.nccl_log.nccl_report import (
    NcclReport,
    analyze_nccl_logs,
)
from meshwright.spec.units import format_ranks
from meshwright.timeline.readers.nccl_log.nccl_log_reader import read_nccl_log
from meshwright.timeline.readers.nccl_log.nccl_log_records import NcclLog

_MOST_GROUPS = 6
_MOST_CALLS = 8
_MOST_FINDINGS = 6
_RECORD = "NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,NET,GRAPH,ENV,COLL"


def summarize_nccl_logs(files: Sequence[Path]) -> CommandResult:
    """Answer with what NCCL chose, and what that proves to be wrong."""
    logs, damaged = read_undamaged(files, read_nccl_log, NcclLog)
    found = analyze_nccl_logs(logs)
    return CommandResult(
        "analyze.nccl/2",
        _data(found, damaged),
        (*_screen(found), *(NoteView(line) for line in (*found.notes, *damaged))),
        quiet_lines=tuple(one.name for one in found.findings),
        exit_code=1 if damaged else 0,
    )


def _screen(found: NcclReport) -> list[View]:
    files = f"{found.num_files} files, " if found.num_files > 1 else ""
    nodes = f"{len(found.hosts)} node{'s' if len(found.hosts) != 1 else ''}"
    head = {
        "nccl log": f"{files}{found.num_processes} processes on {nodes}",
        "version": ", ".join(found.versions) or "not printed",
        "network": ", ".join(found.networks),
        "NICs": ", ".join(found.devices),
        "settings": ", ".join(found.env_settings),
        "warnings": f"{found.num_warnings:,}" if found.num_warnings else "none",
    }
    views: list[View] = [make_fields(head)]
    if found.communicators:
        views.append(_groups(found))
    if found.routes:
        views.append(_routes(found))
    if found.calls:
        views.append(_called(found))
    views.append(_findings(found))
    lacks = [
        name for name, there in (("connections", found.routes), ("calls", found.calls)) if not there
    ]
    if lacks:
        views.append(TextView(f"next: record {' and '.join(lacks)} too, with {_RECORD}"))
    return views


def _groups(found: NcclReport) -> View:
    rows = []
    for one in found.communicators[:_MOST_GROUPS]:
        seen = "all" if len(one.ranks_seen) == one.num_ranks else format_ranks(one.ranks_seen)
        ready = (
            "all"
            if len(one.ranks_initialized) == one.num_ranks
            else format_ranks(one.ranks_initialized) or "none"
        )
        rows.append(
            (
                one.id, one.num_ranks, one.num_nodes, seen, ready, one.num_channels or "",
                one.num_rings or "", one.num_trees or "",
                f"{one.max_init_s:.2f}" if one.max_init_s is not None else "",
            )
        )  # fmt: skip
    return make_table(
        "communicator, ranks, nodes, with lines, completed, channels, rings, trees, made in s",
        rows,
        f"communicators (of {len(found.communicators)})",
        right="ranks, nodes, channels, rings, trees, made in s",
    )


def _routes(found: NcclReport) -> View:
    rows = [
        (
            one.transport,
            one.gpu_direct,
            f"{one.num_connections:,}",
            f"{one.num_rank_pairs:,}",
            ", ".join(one.log_texts),
        )
        for one in found.routes
    ]
    return make_table(
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
            f"{one.num_calls:,}",
        )
        for one in found.calls[:_MOST_CALLS]
    ]
    return make_table(
        "operation, bytes, type, ranks, calls",
        rows,
        f"calls, of all ranks with lines (of {len(found.calls)} kinds and sizes)",
        right="bytes, ranks, calls",
    )


def _findings(found: NcclReport) -> View:
    if not found.findings:
        return TextView("findings: these logs prove nothing wrong")
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
    return make_table(
        "no, finding, evidence, remedy", rows, title, right="no", wide="finding, evidence, remedy"
    )


def _data(found: NcclReport, damaged: Sequence[str]) -> dict[str, Any]:
    plain: dict[str, Any] = {
        "files": found.num_files,
        "versions": list(found.versions),
        "networks": list(found.networks),
        "nics": list(found.devices),
        "settings": list(found.env_settings),
        "hosts": list(found.hosts),
        "processes": found.num_processes,
        "communicators": [one._asdict() for one in found.communicators],
        "routes": [one._asdict() for one in found.routes],
        "calls": [
            {**one._asdict(), "bytes": one.bytes if one.bytes >= 0 else None} for one in found.calls
        ],
        "warnings": found.num_warnings,
        "findings": msgspec.to_builtins(found.findings),
        "notes": list(found.notes),
        "damaged": list(damaged),
    }
    return plain
