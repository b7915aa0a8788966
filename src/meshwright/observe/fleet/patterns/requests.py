"""Requests far above what is used: what they block, others cannot have."""

from collections.abc import Iterator

import numpy as np

from meshwright.observe.fleet.patterns.arrays import Floats, by_group, groups_of, most_of
from meshwright.observe.fleet.patterns.fleet import Fleet
from meshwright.observe.fleet.patterns.registry import Hit, Pattern, bound, pattern
from meshwright.observe.fleet.patterns.say import gib, lasted, of_jobs, share

FEWEST_JOBS = 5
SPARE = 1.5
"""A limit that much above the longest run so far is asked for instead."""


def _blocked(fleet: Fleet, asked: Floats, used: Floats, each: Floats) -> Floats:
    """GPU-hours of other GPUs on its nodes that a job's request leaves without their part.

    A node of G GPUs and M bytes has M/G for each GPU. What a job asks for beyond the part of its
    own GPUs, and does not use, is taken from the others, as far as there are any.
    """
    jobs = fleet.jobs
    own = each * jobs.gpus
    spare = asked - np.fmax(np.fmax(used, own), 0)
    beside = (
        by_group(_of_nodes(fleet), jobs.on_job, jobs.number)
        * np.bincount(jobs.on_job, minlength=jobs.number)
        - jobs.gpus
    )
    blocked = np.fmin(np.maximum(spare, 0) / each, np.maximum(beside, 0))
    return blocked * jobs.hours / np.maximum(jobs.gpus, 1e-9)


def _of_nodes(fleet: Fleet) -> Floats:
    """GPUs of each node that each job ran on."""
    known = np.append(fleet.node_gpus, np.nan)
    found: Floats = known[fleet.jobs.on_node]
    return found


def _per_gpu(fleet: Fleet, of_node: Floats) -> Floats:
    """What nodes of each job have for each GPU: of its own nodes, else of the fleet."""
    ratio = of_node / np.where(fleet.node_gpus > 0, fleet.node_gpus, np.nan)
    known = ratio[np.isfinite(ratio)]
    usual = float(np.median(known)) if known.size else np.nan
    jobs = fleet.jobs
    own = by_group(
        np.where(jobs.on_node >= 0, ratio[jobs.on_node] if ratio.size else np.nan, np.nan),
        jobs.on_job, jobs.number,
    )  # fmt: skip
    return np.where(np.isfinite(own), own, usual)


@pattern(
    Pattern(
        "host-memory-over-requested",
        "Far more host memory asked for than used",
        "requests",
        "a job that ended asked for more host memory than the part of a node that belongs to its "
        "GPUs, and its peak is below 30 % of that",
        "estimated: GPU-hours of neighbours on the node that the unused memory could have served",
        "ask for the peak and a fifth more",
    )
)
def memory_over(fleet: Fleet) -> Iterator[Hit]:
    """Memory that blocks GPUs."""
    jobs = fleet.jobs
    each = _per_gpu(fleet, fleet.node_memory)
    peak, asked = jobs.memory_peak, jobs.memory_asked
    over = (jobs.gpus > 0) & (asked > 1.05 * each * jobs.gpus) & (peak <= 0.3 * asked)
    yield from of_jobs(
        over & jobs.ended & (jobs.run_s >= 600),
        _blocked(fleet, asked, 1.2 * peak, each),
        lambda row: (
            f"job {jobs.label(row)}: asked for {gib(asked[row])}, peak {gib(peak[row])}; "
            f"{gib(each[row])} of a node belong to each GPU",
        ),
        lambda row: f"--mem={max(1, int(np.ceil(1.2 * peak[row] / 2**30)))}G in all",
    )


@pattern(
    Pattern(
        "cores-over-requested",
        "Far more cores asked for than used",
        "requests",
        "a job that ended asked for more cores than the part of a node that belongs to its GPUs, "
        "and used less than 25 % of them",
        "estimated: GPU-hours of neighbours on the node that the unused cores could have served",
        "ask for what is used and a fifth more",
    )
)
def cores_over(fleet: Fleet) -> Iterator[Hit]:
    """Cores that block GPUs."""
    jobs = fleet.jobs
    each = _per_gpu(fleet, fleet.node_cpus)
    used = jobs.cpu_s / np.maximum(jobs.run_s, 1)
    over = (jobs.gpus > 0) & (jobs.cpus > 1.05 * each * jobs.gpus) & (used <= 0.25 * jobs.cpus)
    yield from of_jobs(
        over & jobs.ended & (jobs.run_s >= 600),
        _blocked(fleet, jobs.cpus, 1.2 * used, each),
        lambda row: (
            f"job {jobs.label(row)}: asked for {jobs.cpus[row]:g} cores, used {used[row]:.3g} on "
            f"average ({share(used[row] / jobs.cpus[row])})",
        ),
        lambda row: f"--cpus-per-task={max(1, int(np.ceil(1.2 * used[row])))}",
    )


@pattern(
    Pattern(
        "time-limit-far-over",
        "Time limits many times what jobs take",
        "requests",
        "five or more jobs of a user under one name ended by themselves, and one and a half times "
        "the longest run of any of that name is less than half of their limit of two hours or more",
        "not in GPU-hours: backfill cannot place them early, so they and others wait longer",
        "ask for the longest run and a half more",
    )
)
def limit_over(fleet: Fleet) -> Iterator[Hit]:
    """Limits that keep the scheduler from backfilling."""
    jobs = fleet.jobs
    limited = (jobs.gpus > 0) & (jobs.limit_s >= 7200)
    group = np.where(limited, fleet.scripts, -1)
    number = int(group.max(initial=-1)) + 1
    # One that still runs, failed late or met its limit says as well how long they may take.
    longest = most_of(np.where(limited, jobs.run_s, 0.0), group, number)
    fine = limited & jobs.ended & jobs.state.equals("completed")
    for rows in groups_of(np.where(fine, group, -1), np.arange(jobs.number), FEWEST_JOBS):
        limit = float(np.median(jobs.limit_s[rows]))
        enough = SPARE * float(longest[group[rows[0]]])
        if enough >= limit / 2:
            continue
        wanted = int(np.ceil(max(enough, 600.0) / 600) * 10)
        yield Hit(
            None,
            bound(
                lambda rows, limit: (
                    f"{rows.size} jobs named {jobs.name.at(int(rows[0]))} took "
                    f"{lasted(float(np.median(jobs.run_s[rows])))} (longest "
                    f"{lasted(float(jobs.run_s[rows].max()))}) of a limit of {lasted(limit)}",
                ),
                rows,
                limit,
            ),
            jobs=rows,
            remedy=f"--time={wanted // 60}:{wanted % 60:02d}:00",
        )
