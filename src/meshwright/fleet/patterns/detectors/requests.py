"""Requests far above what is used: what they block, others cannot have."""

from collections.abc import Iterator

import numpy as np

from meshwright.fleet.patterns.data.fleet_data import FleetData
from meshwright.fleet.patterns.data.group_math import Floats, group_max, group_means, split_groups
from meshwright.fleet.patterns.evidence_text import (
    format_duration,
    format_gib,
    format_percent,
    make_job_detections,
)
from meshwright.fleet.patterns.fleet_pattern import (
    FleetDetection,
    FleetPattern,
    defer_evidence,
    register_fleet_pattern,
)

MIN_JOBS = 5
LIMIT_MARGIN = 1.5
"""A limit that much above the longest run so far is asked for instead."""


def _blocked(fleet: FleetData, asked: Floats, used: Floats, each: Floats) -> Floats:
    """GPU-hours of other GPUs on its nodes that a job's request leaves without their part.

    A node of G GPUs and M bytes has M/G for each GPU. What a job asks for beyond the part of its
    own GPUs, and does not use, is taken from the others, as far as there are any.
    """
    jobs = fleet.jobs
    own = each * jobs.gpus
    spare = asked - np.fmax(np.fmax(used, own), 0)
    beside = (
        group_means(_of_nodes(fleet), jobs.placement_job, jobs.num_jobs)
        * np.bincount(jobs.placement_job, minlength=jobs.num_jobs)
        - jobs.gpus
    )
    blocked = np.fmin(np.maximum(spare, 0) / each, np.maximum(beside, 0))
    return blocked * jobs.gpu_hours / np.maximum(jobs.gpus, 1e-9)


def _of_nodes(fleet: FleetData) -> Floats:
    """GPUs of each node that each job ran on."""
    known = np.append(fleet.node_gpus, np.nan)
    found: Floats = known[fleet.jobs.placement_node]
    return found


def _per_gpu(fleet: FleetData, of_node: Floats) -> Floats:
    """What nodes of each job have for each GPU: of its own nodes, else of the fleet."""
    ratio = of_node / np.where(fleet.node_gpus > 0, fleet.node_gpus, np.nan)
    known = ratio[np.isfinite(ratio)]
    usual = float(np.median(known)) if known.size else np.nan
    jobs = fleet.jobs
    own = group_means(
        np.where(
            jobs.placement_node >= 0, ratio[jobs.placement_node] if ratio.size else np.nan, np.nan
        ),
        jobs.placement_job,
        jobs.num_jobs,
    )
    return np.where(np.isfinite(own), own, usual)


@register_fleet_pattern(
    FleetPattern(
        "host-memory-over-requested",
        "Far more host memory asked for than used",
        "requests",
        "a job that ended asked for more host memory than the part of a node that belongs to its "
        "GPUs, and its peak is below 30 % of that",
        "estimated: GPU-hours of neighbours on the node that the unused memory could have served",
        "ask for the peak and a fifth more",
    )
)
def find_excess_memory_requests(fleet: FleetData) -> Iterator[FleetDetection]:
    """Memory that blocks GPUs."""
    jobs = fleet.jobs
    each = _per_gpu(fleet, fleet.node_memory_bytes)
    peak, asked = jobs.peak_memory_bytes, jobs.memory_requested_bytes
    over = (jobs.gpus > 0) & (asked > 1.05 * each * jobs.gpus) & (peak <= 0.3 * asked)
    yield from make_job_detections(
        over & jobs.is_finished & (jobs.run_s >= 600),
        _blocked(fleet, asked, 1.2 * peak, each),
        lambda row: (
            f"job {jobs.format_label(row)}: asked for {format_gib(asked[row])}, peak "
            f"{format_gib(peak[row])}; "
            f"{format_gib(each[row])} of a node belong to each GPU",
        ),
        lambda row: f"--mem={max(1, int(np.ceil(1.2 * peak[row] / 2**30)))}G in all",
    )


@register_fleet_pattern(
    FleetPattern(
        "cores-over-requested",
        "Far more cores asked for than used",
        "requests",
        "a job that ended asked for more cores than the part of a node that belongs to its GPUs, "
        "and used less than 25 % of them",
        "estimated: GPU-hours of neighbours on the node that the unused cores could have served",
        "ask for what is used and a fifth more",
    )
)
def find_excess_core_requests(fleet: FleetData) -> Iterator[FleetDetection]:
    """Cores that block GPUs."""
    jobs = fleet.jobs
    each = _per_gpu(fleet, fleet.node_cpus)
    used = jobs.cpu_s / np.maximum(jobs.run_s, 1)
    over = (jobs.gpus > 0) & (jobs.cpus > 1.05 * each * jobs.gpus) & (used <= 0.25 * jobs.cpus)
    yield from make_job_detections(
        over & jobs.is_finished & (jobs.run_s >= 600),
        _blocked(fleet, jobs.cpus, 1.2 * used, each),
        lambda row: (
            f"job {jobs.format_label(row)}: asked for {jobs.cpus[row]:g} cores, used "
            f"{used[row]:.3g} on "
            f"average ({format_percent(used[row] / jobs.cpus[row])})",
        ),
        lambda row: f"--cpus-per-task={max(1, int(np.ceil(1.2 * used[row])))}",
    )


@register_fleet_pattern(
    FleetPattern(
        "time-limit-far-over",
        "Time limits many times what jobs take",
        "requests",
        "five or more jobs of a user under one name ended by themselves, and one and a half times "
        "the longest run of any of that name is less than half of their limit of two hours or more",
        "not in GPU-hours: backfill cannot place them early, so they and others wait longer",
        "ask for the longest run and a half more",
    )
)
def find_excess_time_limits(fleet: FleetData) -> Iterator[FleetDetection]:
    """Limits that keep the scheduler from backfilling."""
    jobs = fleet.jobs
    limited = (jobs.gpus > 0) & (jobs.time_limit_s >= 7200)
    group = np.where(limited, fleet.script_codes, -1)
    number = int(group.max(initial=-1)) + 1
    # One that still runs, failed late or met its limit says as well how long they may take.
    longest = group_max(np.where(limited, jobs.run_s, 0.0), group, number)
    fine = limited & jobs.is_finished & jobs.state.equals("completed")
    for rows in split_groups(np.where(fine, group, -1), np.arange(jobs.num_jobs), MIN_JOBS):
        limit = float(np.median(jobs.time_limit_s[rows]))
        enough = LIMIT_MARGIN * float(longest[group[rows[0]]])
        if enough >= limit / 2:
            continue
        wanted = int(np.ceil(max(enough, 600.0) / 600) * 10)
        yield FleetDetection(
            None,
            defer_evidence(
                lambda rows, limit: (
                    f"{rows.size} jobs named {jobs.name.at(int(rows[0]))} took "
                    f"{format_duration(float(np.median(jobs.run_s[rows])))} (longest "
                    f"{format_duration(float(jobs.run_s[rows].max()))}) of a limit of "
                    f"{format_duration(limit)}",
                ),
                rows,
                limit,
            ),
            jobs=rows,
            remedy=f"--time={wanted // 60}:{wanted % 60:02d}:00",
        )
