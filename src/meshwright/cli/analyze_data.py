"""An overview as plain data, for `--json` and for the charts of the report."""

import math
from typing import Any

import msgspec

from meshwright.cli.analyze_regions import regions_data
from meshwright.observe.analyze.breakdown import RankBreakdown
from meshwright.observe.analyze.summary import RankSummary
from meshwright.observe.runs import Compared, KernelSum, Overview


def overview_data(found: Overview) -> dict[str, Any]:
    """All figures of an overview; times in ms, shares from 0 to 1."""
    return {
        "path": found.path,
        "ranks": [_rank(one) for one in found.ranks],
        "regions": regions_data(found.ranks),
        "kernels": [_kernel(kernel) for kernel in found.kernels],
        "compared": _compared(found.compared) if found.compared is not None else None,
        "critical_path": next((_path(one) for one in found.ranks if one.path), None),
        "findings": msgspec.to_builtins(found.findings),
        "damaged": list(found.damaged),
    }


def _parts(parts: RankBreakdown) -> dict[str, Any]:
    """A breakdown; the overlap beside it is the part of its communication that is not exposed."""
    talking, exposed = parts.communication_ns, parts.exposed_communication_ns
    return {
        "device_spans": parts.num_spans,
        "left_out": parts.num_left_out,
        "window_ms": parts.window_ns / 1e6,
        "compute_ms": parts.compute_ns / 1e6,
        "exposed_communication_ms": exposed / 1e6,
        "exposed_memory_copy_ms": parts.exposed_memory_copy_ns / 1e6,
        "idle_ms": parts.idle_ns / 1e6,
        "communication": [
            {
                "collective": part.collective,
                "library": part.library,
                "ms": part.total_ns / 1e6,
                "exposed_ms": part.exposed_ns / 1e6,
                "calls": part.num_spans,
            }
            for part in parts.communication
        ],
        "overlap": (talking - exposed) / talking if talking else None,
    }


def _rank(one: RankSummary) -> dict[str, Any]:
    idle = one.idle
    return {
        "rank": one.rank,
        "profiler": one.profiler,
        "device": one.device,
        "spans": one.num_spans,
        **_parts(one.breakdown),
        "whole_steps": _parts(one.whole_steps),
        "idle": {
            "host_bound_ms": idle.host_bound_ns / 1e6,
            "data_wait_ms": idle.data_wait_ns / 1e6,
            "synchronisation_ms": idle.synchronisation_ns / 1e6,
            "kernel_gap_ms": idle.kernel_gap_ns / 1e6,
            "other_ms": idle.other_ns / 1e6,
        },
        "counted_steps": one.num_steps,
        "steps": [
            {"number": step.number, "ms": step.duration_ns / 1e6, "busy_ms": step.busy_ns / 1e6}
            for step in one.steps.steps
        ],
        "step_variation": one.steps.variation,
        "mfu": one.mfu.mfu,
        "mfu_counted_share": one.mfu.counted_share,
        "mfu_assumed": list(one.mfu.assumed),
        "launches": one.launches.num_launches,
        "graph_launches": one.launches.num_graph_launches,
        "recompiled": list(one.recompiled),
        "stalls": [
            {
                "name": stall.name,
                "stack": list(stall.stack),
                "calls": stall.num_calls,
                "ms": stall.total_ns / 1e6,
                "idle_ms": stall.idle_ns / 1e6,
            }
            for stall in one.stalls
        ],
        "notes": list(one.notes),
    }


def _kernel(kernel: KernelSum) -> dict[str, Any]:
    return {**kernel._asdict(), "kind": kernel.kind.value}


def _compared(found: Compared) -> dict[str, Any]:
    late = found.stragglers
    return {
        "clocks_shared": found.clocks.shared,
        "clock_offsets_ns": {
            str(clock.rank): 0 if found.clocks.shared else clock.offset_ns
            for clock in found.clocks.clocks
        },
        "straggler": late.straggler,
        "late_ranks": list(late.late),
        "pattern": late.pattern,
        "span_ms": late.span_ns / 1e6,
        "arrivals": [
            {
                "rank": one.rank,
                "collectives": one.collectives,
                "times_last": one.times_last,
                "wait_ms": one.wait_ns / 1e6,
                "caused_ms": one.caused_ns / 1e6,
                "lead_ms": one.lead_ns / 1e6,
                "late_ms": one.late_ns / 1e6,
                "kernel_slowdown": one.kernel_slowdown,
                "cause": one.cause,
            }
            for one in late.ranks
        ],
        "slow_links": [{"ranks": list(one.ranks), "slowdown": one.slowdown} for one in late.links],
        "mismatches": found.num_mismatches,
        "only_collectives": found.only_collectives,
        "collectives": [
            {
                "group": one.row.group,
                "ranks": one.row.ranks,
                "op": one.row.op,
                "dtype": one.row.dtype,
                "bytes": _known(one.row.bytes),
                "calls": one.row.calls,
                "transfer_ms": one.row.transfer_median_ns / 1e6,
                "transfer_total_ms": one.row.transfer_total_ns / 1e6,
                "wait_total_ms": one.row.wait_total_ns / 1e6,
                "bus_bytes_per_s": _known(one.row.bus_bytes_per_s),
                "expected_bus_bytes_per_s": one.expected.bus_bytes_per_s if one.expected else None,
                "expected_assumed": one.expected.assumed if one.expected else None,
                "reached": one.expected.reached if one.expected else None,
            }
            for one in found.collectives
        ],
    }


def _path(one: RankSummary) -> dict[str, Any]:
    path = one.path
    if path is None:
        return {}
    return {
        "rank": one.rank,
        "step": path.step,
        "ms": path.total_ns / 1e6,
        "by_cause_ms": {cause: ns / 1e6 for cause, ns in path.ns_by_cause.items()},
        "what_if": [{"change": change, "saves": share} for change, share in path.gains],
    }


def _known(value: float) -> float | None:
    """A figure, or None where it is not known: JSON has no word for that."""
    return None if value < 0 or math.isnan(value) else value
