"""The same thing going wrong again and again: crashes, requeues, limits, mistakes."""

from collections.abc import Iterator

import numpy as np

from meshwright.fleet.columns import group_codes
from meshwright.fleet.patterns.data.fleet_data import FleetData
from meshwright.fleet.patterns.data.group_math import Ints, split_groups
from meshwright.fleet.patterns.data.lost_work import estimate_lost_work
from meshwright.fleet.patterns.evidence_text import format_duration, format_gib, format_percent
from meshwright.fleet.patterns.fleet_pattern import (
    FleetDetection,
    FleetPattern,
    defer_evidence,
    register_fleet_pattern,
)

MIN_REPEATS = 5
"""So often it is no accident."""
_ALL = "measured: all GPU-hours of those attempts"


def _hours(fleet: FleetData, rows: Ints) -> float:
    return float(fleet.jobs.gpu_hours[rows].sum())


@register_fleet_pattern(
    FleetPattern(
        "crash-loop",
        "The same script crashes again and again",
        "repeats",
        "five or more runs of one user's script in a row fail within half an hour each, no more "
        "than six hours apart",
        _ALL,
        "stop resubmitting (scancel --name=NAME; backoffLimit: 2 on Kubernetes) and run it once on "
        "one GPU to read the first error",
        min_gpu_hours=0.2,
    )
)
def find_crash_loops(fleet: FleetData) -> Iterator[FleetDetection]:
    """Short failures in a row."""
    jobs = fleet.jobs
    over = jobs.is_finished & (jobs.gpus > 0) & (jobs.run_s > 0)
    group = np.where(over, fleet.script_codes, -1)
    bad = jobs.state.equals("failed", "out_of_memory") & (jobs.run_s <= 1800)
    for rows in split_groups(group, fleet.jobs_by_start, MIN_REPEATS):
        near = np.append(True, np.diff(jobs.start_s[rows]) <= 6 * 3600)
        # A success, or a long pause, ends a series.
        series = np.cumsum(~bad[rows] | ~near)
        count = np.bincount(series[bad[rows]], minlength=int(series.max()) + 1)
        own = rows[bad[rows] & (count[series] >= MIN_REPEATS)]
        if own.size:
            yield FleetDetection(
                _hours(fleet, own),
                defer_evidence(
                    lambda own: (
                        f"{own.size} runs named {jobs.name.at(int(own[0]))} failed after "
                        f"{format_duration(float(np.median(jobs.run_s[own])))} each, with exit "
                        f"code "
                        f"{jobs.exit_code[own[-1]]}",
                    ),
                    own,
                ),
                jobs=own,
            )


@register_fleet_pattern(
    FleetPattern(
        "requeue-storm",
        "A job is requeued over and over",
        "repeats",
        "four or more attempts of one job, none but the last ended well, half of them within two "
        "hours",
        "measured: GPU-hours of attempts that ended before they were done, since their last "
        "checkpoint",
        "sbatch --no-requeue, or resume from a checkpoint at each start (--requeue with a "
        "checkpoint every 15 minutes and --signal=B:USR1@120)",
        min_gpu_hours=0.2,
    )
)
def find_requeue_storms(fleet: FleetData) -> Iterator[FleetDetection]:
    """Many attempts."""
    jobs = fleet.jobs
    ran = (jobs.run_s > 0) & (jobs.gpus > 0)
    group = np.where(ran, group_codes(jobs.cluster.codes, jobs.job.codes), -1)
    unsaved, done = (
        np.minimum(estimate_lost_work(fleet).hours, jobs.gpu_hours),
        jobs.state.equals("completed"),
    )
    for rows in split_groups(group, np.argsort(jobs.attempt, kind="stable"), 4):
        early = rows[:-1]
        if done[early].any() or (float(np.median(jobs.run_s[early])) > 7200):
            continue
        cost = float(unsaved[early].sum())
        yield FleetDetection(
            cost,
            defer_evidence(
                lambda rows, early: (
                    f"job {jobs.format_label(int(rows[0]))}: {rows.size} attempts, half of them "
                    f"over "
                    f"within {format_duration(float(np.median(jobs.run_s[early])))} "
                    f"({', '.join(sorted({jobs.state.at(int(row)) for row in early}))})",
                ),
                rows,
                early,
            ),
            jobs=rows,
        )


EXIT_CODE_MEANINGS = {
    2: "wrong arguments: test the command line on a login node with --help first",
    126: "the script cannot be executed: chmod +x, and a first line #!/bin/bash",
    127: "the command is not found: load the module or activate the environment inside the script, "
    "with full paths",
    134: "aborted: read the assertion in the log",
    139: "a segmentation fault: rebuild extensions for the torch and CUDA in use",
}


@register_fleet_pattern(
    FleetPattern(
        "repeated-error",
        "The same mistake in script after script",
        "repeats",
        "five or more failures of a user in two scripts or more with the same exit code (other "
        "than 1) and signal, which is most of the user's failures",
        _ALL,
        "read what the exit code says; test with one GPU for a minute before a long job",
        min_gpu_hours=0.2,
        explained_by=("crash-loop",),
    )
)
def find_repeated_errors(fleet: FleetData) -> Iterator[FleetDetection]:
    """One exit code, many jobs."""
    jobs = fleet.jobs
    bad = jobs.state.equals("failed") & (jobs.gpus > 0) & (jobs.run_s > 0)
    telling = bad & ((jobs.exit_code > 1) | ((jobs.signal > 0) & (jobs.signal != 15)))
    codes = group_codes(jobs.user.codes, np.maximum(jobs.exit_code, 0), jobs.signal)
    failures = np.bincount(jobs.user.codes[bad] + 1, minlength=len(jobs.user.values) + 1)
    for rows in split_groups(np.where(telling, codes, -1), fleet.jobs_by_start, MIN_REPEATS):
        names = np.unique(jobs.name.codes[rows]).size
        if names < 2 or rows.size < 0.5 * failures[jobs.user.codes[rows[0]] + 1]:
            continue
        code, signal = int(jobs.exit_code[rows[0]]), int(jobs.signal[rows[0]])
        yield FleetDetection(
            _hours(fleet, rows),
            defer_evidence(
                lambda rows, code, signal, names: (
                    f"{rows.size} jobs in {names} scripts failed with exit code {code}"
                    + (f", signal {signal}" if signal else ""),
                ),
                rows,
                code,
                signal,
                names,
            ),
            jobs=rows,
            remedy=EXIT_CODE_MEANINGS.get(code if not signal else 128 + signal, ""),
        )


@register_fleet_pattern(
    FleetPattern(
        "out-of-memory-again",
        "Jobs run out of host memory again and again",
        "repeats",
        "three or more runs of a user's script end out of host memory, half of all or more",
        _ALL,
        "ask for more host memory, or fewer DataLoader workers, each of which holds a copy",
        min_gpu_hours=0.2,
        explained_by=("crash-loop",),
    )
)
def find_repeated_oom(fleet: FleetData) -> Iterator[FleetDetection]:
    """The same limit, met again."""
    jobs = fleet.jobs
    over = jobs.is_finished & (jobs.gpus > 0) & (jobs.run_s > 0)
    group = np.where(over, fleet.script_codes, -1)
    bad = jobs.state.equals("out_of_memory")
    for rows in split_groups(group, fleet.jobs_by_start, 3):
        own = rows[bad[rows]]
        if own.size < 3 or own.size < 0.5 * rows.size:
            continue
        asked = float(np.nan_to_num(jobs.memory_requested_bytes[own]).max())
        wanted = int(np.ceil(1.5 * asked / 2**30))
        yield FleetDetection(
            _hours(fleet, own),
            defer_evidence(
                lambda own, rows, asked: (
                    f"{own.size} of {rows.size} runs named {jobs.name.at(int(own[0]))} ended out "
                    f"of memory, with {format_gib(asked)} asked for",
                ),
                own,
                rows,
                asked,
            ),
            jobs=own,
            remedy=f"--mem={wanted}G, or half the DataLoader workers" if wanted else "",
        )


@register_fleet_pattern(
    FleetPattern(
        "always-hits-time-limit",
        "Jobs end at their time limit, unfinished",
        "repeats",
        "three or more runs of a user's script end at their limit, 60 % of all its runs or more, "
        "and lose 5 % of their time or more (all of it, where they tell of no checkpoint)",
        "measured: GPU-hours since the last checkpoint; at most all, where none is told",
        "save before the limit: sbatch --signal=B:USR1@300 and a handler that writes a checkpoint, "
        "then resubmit with --dependency=singleton; or a longer --time",
    )
)
def find_repeated_timeouts(fleet: FleetData) -> Iterator[FleetDetection]:
    """Timeouts as a habit."""
    jobs = fleet.jobs
    over = jobs.is_finished & (jobs.gpus > 0) & (jobs.run_s > 0) & ~jobs.interactive
    group = np.where(over, fleet.script_codes, -1)
    late, unsaved = (
        jobs.state.equals("timeout"),
        np.minimum(estimate_lost_work(fleet).hours, jobs.gpu_hours),
    )
    for rows in split_groups(group, fleet.jobs_by_start, 3):
        own = rows[late[rows]]
        cost = float(unsaved[own].sum())
        if own.size < 3 or own.size < 0.6 * rows.size or cost < 0.05 * _hours(fleet, own):
            continue
        yield FleetDetection(
            cost,
            defer_evidence(
                lambda own, rows, cost: (
                    f"{own.size} of {rows.size} runs named {jobs.name.at(int(own[0]))} ended at "
                    f"their limit of {format_duration(float(np.median(jobs.time_limit_s[own])))}; "
                    f"{format_percent(cost / max(_hours(fleet, own), 1e-9))} of their time is not "
                    f"kept",
                ),
                own,
                rows,
                cost,
            ),
            jobs=own,
        )


@register_fleet_pattern(
    FleetPattern(
        "short-job-swarm",
        "Many jobs so short that starting them costs more than they do",
        "repeats",
        "fifty or more jobs of a user's script take two minutes or less each",
        "estimated: half of their GPU-hours, as their start",
        "run them in one job: a loop over tasks, sbatch --array with ten tasks to an element, or a "
        "task farm (srun --multi-prog, GNU parallel)",
        min_gpu_hours=0.2,
        explained_by=("crash-loop",),
    )
)
def find_short_job_swarms(fleet: FleetData) -> Iterator[FleetDetection]:
    """Many and short."""
    jobs = fleet.jobs
    short = jobs.state.equals("completed") & (jobs.gpus > 0) & (jobs.run_s > 0)
    short &= jobs.run_s <= 120
    group = np.where(short, fleet.script_codes, -1)
    for rows in split_groups(group, fleet.jobs_by_start, 50):
        yield FleetDetection(
            _hours(fleet, rows) / 2,
            defer_evidence(
                lambda rows: (
                    f"{rows.size} jobs named {jobs.name.at(int(rows[0]))} took "
                    f"{format_duration(float(np.median(jobs.run_s[rows])))} each",
                ),
                rows,
            ),
            jobs=rows,
        )
