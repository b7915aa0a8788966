"""Checkpoints that come too often, too seldom, too slowly, or never."""

from collections.abc import Iterator

import numpy as np

from meshwright.observe.fleet.measures.robust import group_medians
from meshwright.observe.fleet.patterns.arrays import Floats
from meshwright.observe.fleet.patterns.fleet import Fleet
from meshwright.observe.fleet.patterns.lost import failures_per_gpu_hour, lost_work
from meshwright.observe.fleet.patterns.registry import Hit, Pattern, bound, pattern
from meshwright.observe.fleet.patterns.say import lasted, many_gpus, of_jobs, share
from meshwright.predict.long_run import best_interval_s, time_shares
from meshwright.predict.reliability import RELIABILITY

_RATE = "failures of hardware here, leaning on published rates where hours are few"
RESTART_S = (
    RELIABILITY.detect_s + RELIABILITY.diagnose_s + RELIABILITY.replace_s + RELIABILITY.start_s
)


def _useful(interval_s: float, pause_s: float, failures_per_s: float) -> float:
    return time_shares(
        interval_s,
        pause_s=pause_s,
        delay_s=0.0,
        restart_s=RESTART_S,
        failures_per_s=failures_per_s,
    ).useful


def _rhythm(fleet: Fleet) -> tuple[Floats, Floats]:
    """Each job's usual time between checkpoints, and that of one; nan where it tells of none."""
    jobs, progress = fleet.jobs, fleet.progress
    saves = np.flatnonzero(progress.phase.equals("checkpoint") & (progress.job >= 0))
    saves = saves[np.lexsort((progress.start_s[saves], progress.job[saves]))]
    job = progress.job[saves]
    same = np.append(False, job[1:] == job[:-1])
    ended = np.append(np.nan, progress.end_s[saves][:-1])
    apart = np.where(same, progress.start_s[saves] - ended, np.nan)
    interval = group_medians(apart, job, jobs.number)
    pause = group_medians(progress.end_s[saves] - progress.start_s[saves], job, jobs.number)
    return interval, pause


@pattern(
    Pattern(
        "bad-checkpoint-interval",
        "Checkpoints come too often or too seldom",
        "checkpoints",
        "the interval that a job's own metrics show wastes 2 % of its time more than the best one "
        f"(Daly), by its pause and the rate of {_RATE}",
        "estimated: GPU-hours times the difference of both wastes",
        "save at the best interval",
        yields_to=("slow-checkpoints",),
    )
)
def bad_interval(fleet: Fleet) -> Iterator[Hit]:
    """Far from Daly's optimum."""
    jobs = fleet.jobs
    interval, pause = _rhythm(fleet)
    rate = failures_per_gpu_hour(fleet) / 3600
    able = np.flatnonzero((interval > 0) & (pause > 0) & (jobs.gpus > 0) & (jobs.run_s >= 3600))
    for row in able.tolist():
        often = rate * jobs.gpus[row]
        best = best_interval_s(pause[row], often)
        lost = _useful(best, pause[row], often) - _useful(interval[row], pause[row], often)
        if lost < 0.02:
            continue
        yield Hit(
            float(jobs.hours[row] * lost),
            bound(
                lambda row, best, lost, often: (
                    f"job {jobs.label(row)}: a checkpoint of {lasted(float(pause[row]))} every "
                    f"{lasted(float(interval[row]))} wastes {share(lost)} more than one every "
                    f"{lasted(best)}",
                    f"{many_gpus(float(jobs.gpus[row]))} fail every {lasted(1 / often)} here",
                ),
                row,
                best,
                lost,
                often,
            ),
            jobs=np.array([row]),
            remedy=f"save every {best / 60:.0f} minutes instead of {interval[row] / 60:.0f}",
        )


@pattern(
    Pattern(
        "slow-checkpoints",
        "Training stands still while checkpoints are written",
        "checkpoints",
        "5 % of a job's time or more, by its own metrics, goes into checkpoints of two minutes or "
        "more, though they are half an hour apart or more",
        "measured by the job: GPU-hours in that phase",
        "write behind training: torch.distributed.checkpoint.async_save, or --async-save "
        "(Megatron); shards from every rank to local disk first",
    )
)
def slow_checkpoints(fleet: Fleet) -> Iterator[Hit]:
    """Long pauses."""
    jobs = fleet.jobs
    spent = fleet.progress.seconds("checkpoint", jobs.number)
    interval, pause = _rhythm(fleet)
    part = np.divide(spent, jobs.run_s, out=np.zeros(jobs.number), where=jobs.run_s > 0)
    yield from of_jobs(
        (part >= 0.05) & (pause >= 120) & (interval >= 1800),
        jobs.gpus * spent / 3600,
        lambda row: (
            f"job {jobs.label(row)}: {share(part[row])} of its time in checkpoints of "
            f"{lasted(pause[row])} each",
        ),
    )


@pattern(
    Pattern(
        "never-checkpointed",
        "A long job keeps no checkpoint",
        "checkpoints",
        "a job that tells of its phases trained for six hours or more and saved nothing; told "
        "where it failed, or where it has run for a day",
        f"measured where it failed: all its GPU-hours; else estimated: half of them times the "
        f"chance that it fails, by {_RATE}",
        "save every hour: torch.distributed.checkpoint.async_save, --save-interval (Megatron), "
        "save_steps (Hugging Face), and resume from the newest at each start",
    )
)
def never_checkpointed(fleet: Fleet) -> Iterator[Hit]:
    """All or nothing."""
    jobs = fleet.jobs
    lost = lost_work(fleet)
    saved = fleet.progress.seconds("checkpoint", jobs.number) > 0
    worked = fleet.progress.seconds("productive", jobs.number) >= 6 * 3600
    failed = jobs.state.equals("failed", "node_fail", "timeout", "preempted", "out_of_memory")
    rate = failures_per_gpu_hour(fleet)
    risk = 1 - np.exp(-rate * jobs.gpus * jobs.run_s / 3600)
    cost = np.where(failed, np.minimum(lost.hours, jobs.hours), jobs.hours * risk / 2)
    yield from of_jobs(
        lost.known & ~saved & worked & (failed | (jobs.run_s >= 86400)),
        cost,
        lambda row: (
            f"job {jobs.label(row)}: {lasted(jobs.run_s[row])} on {many_gpus(jobs.gpus[row])} "
            f"without a checkpoint" + (f", then {jobs.state.at(row)}" if failed[row] else ""),
        ),
    )
