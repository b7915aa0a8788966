"""The same thing going wrong again and again: crashes, requeues, limits, mistakes."""

from collections.abc import Iterator

import numpy as np

from meshwright.observe.fleet.patterns.arrays import Ints, groups_of, together
from meshwright.observe.fleet.patterns.fleet import Fleet
from meshwright.observe.fleet.patterns.lost import lost_work
from meshwright.observe.fleet.patterns.registry import Hit, Pattern, bound, pattern
from meshwright.observe.fleet.patterns.say import gib, lasted, share

FEWEST = 5
"""So often it is no accident."""
_ALL = "measured: all GPU-hours of those attempts"


def _hours(fleet: Fleet, rows: Ints) -> float:
    return float(fleet.jobs.hours[rows].sum())


@pattern(
    Pattern(
        "crash-loop",
        "The same script crashes again and again",
        "repeats",
        "five or more runs of one user's script in a row fail within half an hour each, no more "
        "than six hours apart",
        _ALL,
        "stop resubmitting (scancel --name=NAME; backoffLimit: 2 on Kubernetes) and run it once on "
        "one GPU to read the first error",
        least_hours=0.2,
    )
)
def crash_loop(fleet: Fleet) -> Iterator[Hit]:
    """Short failures in a row."""
    jobs = fleet.jobs
    over = jobs.ended & (jobs.gpus > 0) & (jobs.run_s > 0)
    group = np.where(over, fleet.scripts, -1)
    bad = jobs.state.equals("failed", "out_of_memory") & (jobs.run_s <= 1800)
    for rows in groups_of(group, fleet.by_start, FEWEST):
        near = np.append(True, np.diff(jobs.start_s[rows]) <= 6 * 3600)
        # A success, or a long pause, ends a series.
        series = np.cumsum(~bad[rows] | ~near)
        count = np.bincount(series[bad[rows]], minlength=int(series.max()) + 1)
        own = rows[bad[rows] & (count[series] >= FEWEST)]
        if own.size:
            yield Hit(
                _hours(fleet, own),
                bound(
                    lambda own: (
                        f"{own.size} runs named {jobs.name.at(int(own[0]))} failed after "
                        f"{lasted(float(np.median(jobs.run_s[own])))} each, with exit code "
                        f"{jobs.exit_code[own[-1]]}",
                    ),
                    own,
                ),
                jobs=own,
            )


@pattern(
    Pattern(
        "requeue-storm",
        "A job is requeued over and over",
        "repeats",
        "four or more attempts of one job, none but the last ended well, half of them within two "
        "hours",
        "measured: GPU-hours of attempts that ended before they were done, since their last "
        "checkpoint",
        "sbatch --no-requeue, or resume from a checkpoint at each start (--requeue with a "
        "checkpoint every 15 minutes and --signal=B:USR1@120)",
        least_hours=0.2,
    )
)
def requeue_storm(fleet: Fleet) -> Iterator[Hit]:
    """Many attempts."""
    jobs = fleet.jobs
    ran = (jobs.run_s > 0) & (jobs.gpus > 0)
    group = np.where(ran, together(jobs.cluster.codes, jobs.job.codes), -1)
    unsaved, done = np.minimum(lost_work(fleet).hours, jobs.hours), jobs.state.equals("completed")
    for rows in groups_of(group, np.argsort(jobs.attempt, kind="stable"), 4):
        early = rows[:-1]
        if done[early].any() or (float(np.median(jobs.run_s[early])) > 7200):
            continue
        cost = float(unsaved[early].sum())
        yield Hit(
            cost,
            bound(
                lambda rows, early: (
                    f"job {jobs.label(int(rows[0]))}: {rows.size} attempts, half of them over "
                    f"within {lasted(float(np.median(jobs.run_s[early])))} "
                    f"({', '.join(sorted({jobs.state.at(int(row)) for row in early}))})",
                ),
                rows,
                early,
            ),
            jobs=rows,
        )


MEANINGS = {
    2: "wrong arguments: test the command line on a login node with --help first",
    126: "the script cannot be executed: chmod +x, and a first line #!/bin/bash",
    127: "the command is not found: load the module or activate the environment inside the script, "
    "with full paths",
    134: "aborted: read the assertion in the log",
    139: "a segmentation fault: rebuild extensions for the torch and CUDA in use",
}


@pattern(
    Pattern(
        "recurring-mistake",
        "The same mistake in script after script",
        "repeats",
        "five or more failures of a user in two scripts or more with the same exit code (other "
        "than 1) and signal, which is most of the user's failures",
        _ALL,
        "read what the exit code says; test with one GPU for a minute before a long job",
        least_hours=0.2,
        yields_to=("crash-loop",),
    )
)
def mistake(fleet: Fleet) -> Iterator[Hit]:
    """One exit code, many jobs."""
    jobs = fleet.jobs
    bad = jobs.state.equals("failed") & (jobs.gpus > 0) & (jobs.run_s > 0)
    telling = bad & ((jobs.exit_code > 1) | ((jobs.signal > 0) & (jobs.signal != 15)))
    codes = together(jobs.user.codes, np.maximum(jobs.exit_code, 0), jobs.signal)
    failures = np.bincount(jobs.user.codes[bad] + 1, minlength=len(jobs.user.values) + 1)
    for rows in groups_of(np.where(telling, codes, -1), fleet.by_start, FEWEST):
        names = np.unique(jobs.name.codes[rows]).size
        if names < 2 or rows.size < 0.5 * failures[jobs.user.codes[rows[0]] + 1]:
            continue
        code, signal = int(jobs.exit_code[rows[0]]), int(jobs.signal[rows[0]])
        yield Hit(
            _hours(fleet, rows),
            bound(
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
            remedy=MEANINGS.get(code if not signal else 128 + signal, ""),
        )


@pattern(
    Pattern(
        "out-of-memory-again",
        "Jobs run out of host memory again and again",
        "repeats",
        "three or more runs of a user's script end out of host memory, half of all or more",
        _ALL,
        "ask for more host memory, or fewer DataLoader workers, each of which holds a copy",
        least_hours=0.2,
        yields_to=("crash-loop",),
    )
)
def out_of_memory(fleet: Fleet) -> Iterator[Hit]:
    """The same limit, met again."""
    jobs = fleet.jobs
    over = jobs.ended & (jobs.gpus > 0) & (jobs.run_s > 0)
    group = np.where(over, fleet.scripts, -1)
    bad = jobs.state.equals("out_of_memory")
    for rows in groups_of(group, fleet.by_start, 3):
        own = rows[bad[rows]]
        if own.size < 3 or own.size < 0.5 * rows.size:
            continue
        asked = float(np.nan_to_num(jobs.memory_asked[own]).max())
        wanted = int(np.ceil(1.5 * asked / 2**30))
        yield Hit(
            _hours(fleet, own),
            bound(
                lambda own, rows, asked: (
                    f"{own.size} of {rows.size} runs named {jobs.name.at(int(own[0]))} ended out "
                    f"of memory, with {gib(asked)} asked for",
                ),
                own,
                rows,
                asked,
            ),
            jobs=own,
            remedy=f"--mem={wanted}G, or half the DataLoader workers" if wanted else "",
        )


@pattern(
    Pattern(
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
def hits_limit(fleet: Fleet) -> Iterator[Hit]:
    """Timeouts as a habit."""
    jobs = fleet.jobs
    over = jobs.ended & (jobs.gpus > 0) & (jobs.run_s > 0) & ~jobs.interactive
    group = np.where(over, fleet.scripts, -1)
    late, unsaved = jobs.state.equals("timeout"), np.minimum(lost_work(fleet).hours, jobs.hours)
    for rows in groups_of(group, fleet.by_start, 3):
        own = rows[late[rows]]
        cost = float(unsaved[own].sum())
        if own.size < 3 or own.size < 0.6 * rows.size or cost < 0.05 * _hours(fleet, own):
            continue
        yield Hit(
            cost,
            bound(
                lambda own, rows, cost: (
                    f"{own.size} of {rows.size} runs named {jobs.name.at(int(own[0]))} ended at "
                    f"their limit of {lasted(float(np.median(jobs.limit_s[own])))}; "
                    f"{share(cost / max(_hours(fleet, own), 1e-9))} of their time is not kept",
                ),
                own,
                rows,
                cost,
            ),
            jobs=own,
        )


@pattern(
    Pattern(
        "swarm-of-short-jobs",
        "Many jobs so short that starting them costs more than they do",
        "repeats",
        "fifty or more jobs of a user's script take two minutes or less each",
        "estimated: half of their GPU-hours, as their start",
        "run them in one job: a loop over tasks, sbatch --array with ten tasks to an element, or a "
        "task farm (srun --multi-prog, GNU parallel)",
        least_hours=0.2,
        yields_to=("crash-loop",),
    )
)
def swarm(fleet: Fleet) -> Iterator[Hit]:
    """Many and short."""
    jobs = fleet.jobs
    short = jobs.state.equals("completed") & (jobs.gpus > 0) & (jobs.run_s > 0)
    short &= jobs.run_s <= 120
    group = np.where(short, fleet.scripts, -1)
    for rows in groups_of(group, fleet.by_start, 50):
        yield Hit(
            _hours(fleet, rows) / 2,
            bound(
                lambda rows: (
                    f"{rows.size} jobs named {jobs.name.at(int(rows[0]))} took "
                    f"{lasted(float(np.median(jobs.run_s[rows])))} each",
                ),
                rows,
            ),
            jobs=rows,
        )
