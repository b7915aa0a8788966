"""An overview as plain data, for `--json` and for the charts of the report."""

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import msgspec

from meshwright.observe.analyze.device_time.annotated_regions import AnnotatedRegion
from meshwright.observe.analyze.device_time.breakdown import RankBreakdown
from meshwright.observe.analyze.rank_summary import RankSummary
from meshwright.observe.overview import KernelTotals, RankComparison, RunOverview


def regions_to_data(ranks: Sequence[RankSummary]) -> list[dict[str, Any]]:
    """One row for each path of annotations: the longest first, each with those inside it."""
    rows: dict[tuple[str, ...], list[tuple[RankSummary, AnnotatedRegion]]] = defaultdict(list)
    for one in ranks:
        for region in one.regions.regions:
            rows[region.path].append((one, region))
    device = sum(one.per_step_ms(one.regions.device_ns) for one in ranks)
    found: list[dict[str, Any]] = []
    for path, own in rows.items():

        def mean(name: str, own: list[tuple[RankSummary, AnnotatedRegion]] = own) -> float:
            total = sum(one.per_step_ms(getattr(region, name)) for one, region in own)
            return total / len(ranks)

        most = max(own, key=lambda item: item[1].total_ns)[1]
        found.append({
            "path": list(path),
            "ms_per_step": mean("total_ns"),
            "own_ms_per_step": mean("self_ns"),
            "communication_ms_per_step": mean("communication_ns"),
            "host_ms_per_step": mean("host_ns"),
            "share": mean("total_ns") * len(ranks) / device if device else 0.0,
            "calls_per_step": 1e6 * mean("num_calls"),
            "kernels_per_step": 1e6 * mean("num_kernels"),
            "kernels": [
                {"name": name, "launches": count, "ms": ns / 1e6}
                for name, count, ns in most.kernels
            ],
        })  # fmt: skip
    longest = {tuple(row["path"]): -row["ms_per_step"] for row in found}
    return sorted(found, key=lambda row: _place(tuple(row["path"]), longest))


def _place(path: tuple[str, ...], rank: dict[tuple[str, ...], float]) -> list[tuple[float, str]]:
    """Where a path stands: behind the region around it, the longest of those first."""
    ends = range(1, len(path) + 1)
    return [(rank.get(path[:end], 0.0), path[end - 1]) for end in ends]


def overview_to_data(found: RunOverview) -> dict[str, Any]:
    """All figures of an overview; times in ms, shares from 0 to 1."""
    return {
        "path": found.path,
        "ranks": [_rank(one) for one in found.ranks],
        "regions": regions_to_data(found.ranks),
        "kernels": [_kernel(kernel) for kernel in found.kernels],
        "rank_comparison": (
            None if found.rank_comparison is None else _rank_comparison(found.rank_comparison)
        ),
        "critical_path": next((_path(one) for one in found.ranks if one.critical_path), None),
        "findings": msgspec.to_builtins(found.findings),
        "damaged": list(found.damaged),
    }


def _parts(parts: RankBreakdown) -> dict[str, Any]:
    """A breakdown; the overlap beside it is the part of its communication that is not exposed."""
    talking, exposed = parts.communication_ns, parts.exposed_communication_ns
    return {
        "device_spans": parts.num_spans,
        "excluded_spans": parts.num_excluded_spans,
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
        "whole_steps": _parts(one.complete_steps_breakdown),
        "idle": {
            "host_bound_ms": idle.host_bound_ns / 1e6,
            "data_wait_ms": idle.data_wait_ns / 1e6,
            "synchronization_ms": idle.synchronization_ns / 1e6,
            "kernel_gap_ms": idle.kernel_gap_ns / 1e6,
            "other_ms": idle.other_ns / 1e6,
        },
        "num_counted_steps": one.num_steps,
        "steps": [
            {
                "number": step.number,
                "ms": step.duration_ns / 1e6,
                "busy_ms": step.device_busy_ns / 1e6,
            }
            for step in one.steps.steps
        ],
        "step_variation": one.steps.variation,
        "mfu": one.mfu.mfu,
        "mfu_counted_share": one.mfu.counted_share,
        "mfu_assumed": list(one.mfu.assumptions),
        "launches": one.launches.num_launches,
        "graph_launches": one.launches.num_graph_launches,
        "recompiled_regions": list(one.recompiled_regions),
        "host_stalls": [
            {
                "name": stall.name,
                "stack": list(stall.stack),
                "calls": stall.num_calls,
                "ms": stall.total_ns / 1e6,
                "idle_ms": stall.device_idle_ns / 1e6,
            }
            for stall in one.host_stalls
        ],
        "notes": list(one.notes),
    }


def _kernel(kernel: KernelTotals) -> dict[str, Any]:
    return {**kernel._asdict(), "kind": kernel.kind.value}


def _rank_comparison(found: RankComparison) -> dict[str, Any]:
    late = found.stragglers
    return {
        "clocks_shared": found.clocks.is_shared,
        "clock_offsets_ns": {
            str(clock.rank): 0 if found.clocks.is_shared else clock.offset_ns
            for clock in found.clocks.clocks
        },
        "straggler": late.single_straggler,
        "straggler_ranks": list(late.straggler_ranks),
        "pattern": late.pattern,
        "span_ms": late.span_ns / 1e6,
        "arrivals": [
            {
                "rank": one.rank,
                "collectives": one.num_collectives,
                "num_times_last": one.num_times_last,
                "wait_ms": one.wait_ns / 1e6,
                "caused_ms": one.caused_wait_ns / 1e6,
                "avoidable_wait_ms": one.avoidable_wait_ns / 1e6,
                "avoidable_wait_with_group_ms": one.avoidable_wait_with_group_ns / 1e6,
                "kernel_slowdown": one.kernel_slowdown,
                "cause": one.cause,
            }
            for one in late.ranks
        ],
        "slow_links": [
            {"ranks": list(one.ranks), "slowdown": one.slowdown} for one in late.slow_links
        ],
        "num_mismatches": found.num_mismatches,
        "only_collectives": found.only_collectives,
        "collectives": [
            {
                "group": one.row.group,
                "ranks": one.row.num_ranks,
                "op": one.row.op,
                "dtype": one.row.dtype,
                "bytes": _known(one.row.bytes),
                "calls": one.row.num_calls,
                "transfer_ms": one.row.transfer_median_ns / 1e6,
                "transfer_total_ms": one.row.transfer_total_ns / 1e6,
                "wait_total_ms": one.row.wait_total_ns / 1e6,
                "bus_bytes_per_s": _known(one.row.bus_bytes_per_s),
                "expected_bus_bytes_per_s": one.expected.bus_bytes_per_s if one.expected else None,
                "expected_is_assumed": one.expected.is_fabric_assumed if one.expected else None,
                "achieved_share": one.expected.achieved_share if one.expected else None,
            }
            for one in found.collectives
        ],
    }


def _path(one: RankSummary) -> dict[str, Any]:
    path = one.critical_path
    if path is None:
        return {}
    return {
        "rank": one.rank,
        "step": path.step,
        "ms": path.total_ns / 1e6,
        "by_cause_ms": {cause: ns / 1e6 for cause, ns in path.ns_by_cause.items()},
        "what_if": [{"change": change, "speedup_share": share} for change, share in path.gains],
    }


def _known(value: float) -> float | None:
    """A figure, or None where it is not known: JSON has no word for that."""
    return None if value < 0 or math.isnan(value) else value
