"""What `mw analyze` says of execution traces: what ran, on which shapes; they have no times."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from meshwright.cli.flags.trace_input import read_undamaged
from meshwright.cli.result import CommandResult, NoteView, TextView, View, make_fields, make_table
from meshwright.observe.analyze.compute_efficiency.operator_counts import (
    ExecutionTraceCounts,
    count_operators,
)
from meshwright.observe.analyze.device_time.kernel_names import shorten_name
from meshwright.timeline.readers.execution_trace.execution_trace_reader import (
    ExecutionGraph,
    read_execution_trace,
)

_MOST = 10
_MAX_GEMMS = 8
_WITHOUT = "it says what ran in which order and on which shapes, not when"


def read_execution_traces(files: Sequence[Path]) -> tuple[list[ExecutionGraph], list[str]]:
    """The traces, and what is wrong with those that break off."""
    return read_undamaged(files, read_execution_trace, ExecutionGraph)


def analyze_operators(graphs: Sequence[ExecutionGraph], damaged: Sequence[str]) -> CommandResult:
    """Answer with operators by count, GEMMs by FLOPs, and collectives."""
    found = count_operators(graphs)
    return CommandResult(
        "analyze.operators/2",
        _data(found, damaged),
        (*_screen(found), *(NoteView(line) for line in (*found.notes, *damaged))),
        quiet_lines=tuple(f"{one.name}\t{one.calls}" for one in found.operators),
        exit_code=1 if damaged else 0,
    )


def _screen(found: ExecutionTraceCounts) -> list[View]:
    hosts = [one for one in found.operators if one.on_host]
    kernels = [one for one in found.operators if not one.on_host]
    number = f"{found.num_traces} traces, " if found.num_traces > 1 else ""
    durations = (
        "none of the starts: durations of nodes, which lie one inside another"
        if found.has_durations
        else f"none: {_WITHOUT}"
    )
    head = {
        "execution trace": f"{number}{found.num_nodes:,} nodes, {', '.join(found.schemas)}",
        "times": durations,
        "operators": f"{sum(one.calls for one in hosts):,} calls of {len(hosts):,} operators",
        "kernels": f"{sum(one.calls for one in kernels):,}" if kernels else "",
        "gemms": _format_gemms(found),
    }
    views: list[View] = [make_fields(head)]
    for title, those in (("operators by calls", hosts), ("kernels by runs", kernels)):
        if not those:
            continue
        timed = ["ms in all"] if found.has_durations else []
        rows = [
            (
                one.name if one.on_host else shorten_name(one.name, 48),
                f"{one.calls:,}",
                *([f"{(one.duration_us or 0) / 1e3:,.2f}"] if timed else []),
                f"{one.shapes[0][0]} ({one.shapes[0][1]:,})" if one.shapes else "",
                len(one.shapes) or "",
            )
            for one in (those[:_MOST] if title.startswith("op") else those[: _MOST // 2])
        ]
        columns = ", ".join(["name", "calls", *timed, "commonest shapes (calls)", "different"])
        views.append(
            make_table(
                columns, rows, f"{title} (of {len(those)})",
                right=", ".join(["calls", *timed, "different"]), wide="commonest shapes (calls)",
            )
        )  # fmt: skip
    if found.gemms:
        views.append(_tabulate_gemms(found))
    if found.collectives:
        views.append(_collectives(found))
    else:
        views.append(TextView("collectives: none"))
    views.append(
        TextView("next: record the same run with torch.profiler, mw analyze TRACE tells its times")
    )
    return views


def _format_gemms(found: ExecutionTraceCounts) -> str:
    missing = sum(found.uncounted_gemms.values())
    said = f"{found.flops / 1e12:,.4g} TFLOP in {sum(one.calls for one in found.gemms):,} calls"
    parts = [said if found.gemms else "none whose shapes tell their FLOPs", *found.assumptions]
    if missing:
        parts.append(f"{missing:,} calls more do not say enough")
    return "; ".join(parts)


def _tabulate_gemms(found: ExecutionTraceCounts) -> View:
    rows = [
        (
            one.name, one.dtype, one.shape, f"{one.calls:,}", f"{one.flops / 1e9:,.2f}",
            f"{100 * one.flops / found.flops:.1f} %" if found.flops else "",
        )
        for one in found.gemms[:_MAX_GEMMS]
    ]  # fmt: skip
    return make_table(
        "GEMM, type, shapes, calls, GFLOP, of all",
        rows,
        f"GEMMs by FLOPs (of {len(found.gemms)})",
        right="calls, GFLOP, of all",
        wide="shapes",
    )


def _collectives(found: ExecutionTraceCounts) -> View:
    rows = [
        (
            one.collective,
            one.group,
            one.group_size if one.group_size > 0 else "",
            one.dtype,
            f"{one.calls:,}",
            f"{one.bytes:,}"
            + (f" ({one.num_unsized_calls:,} calls say none)" if one.num_unsized_calls else ""),
        )
        for one in found.collectives[:_MOST]
    ]
    return make_table(
        "collective, group, ranks, type, calls, bytes in all",
        rows,
        f"collectives (of {len(found.collectives)} kinds)",
        right="ranks, calls, bytes in all",
    )


def _data(found: ExecutionTraceCounts, damaged: Sequence[str]) -> dict[str, Any]:
    return {
        "traces": found.num_traces,
        "schemas": list(found.schemas),
        "nodes": found.num_nodes,
        "has_times": False,
        "has_durations": found.has_durations,
        "flops": found.flops,
        "operators": [
            {
                **one._asdict(),
                "shapes": [{"shapes": text, "calls": calls} for text, calls in one.shapes],
            }
            for one in found.operators
        ],
        "gemms": [one._asdict() for one in found.gemms],
        "uncounted_gemms": dict(found.uncounted_gemms),
        "assumptions": list(found.assumptions),
        "collectives": [
            {**one._asdict(), "group_size": one.group_size if one.group_size > 0 else None}
            for one in found.collectives
        ],
        "notes": list(found.notes),
        "damaged": list(damaged),
    }
