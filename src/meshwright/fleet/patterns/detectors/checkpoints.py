"""Checkpoints that come too often, too seldom, too slowly, or never."""

from collections.abc import Iterator

import numpy as np

from meshwright.fleet.patterns.data.fleet_data import FleetData
from meshwright.fleet.patterns.data.group_math import Floats
from meshwright.fleet.patterns.data.lost_work import estimate_failure_rate, estimate_lost_work
from meshwright.fleet.patterns.evidence_text import (
    format_duration,
    format_gpus,
    format_percent,
    make_job_detections,
)
from meshwright.fleet.patterns.fleet_pattern import (
    FleetDetection,
    FleetPattern,
    defer_evidence,
    register_fleet_pattern,
)
from meshwright.fleet.statistics.robust import group_medians
from meshwright.predict.long_run.long_run import optimal_checkpoint_interval_s, predict_time_shares
from meshwright.predict.long_run.reliability import RELIABILITY

_RATE = "failures of hardware here, leaning on published rates where hours are few"
RESTART_S = (
    RELIABILITY.detect_s + RELIABILITY.diagnose_s + RELIABILITY.replace_s + RELIABILITY.start_s
)


def _useful(interval_s: float, pause_s: float, failures_per_s: float) -> float:
    return predict_time_shares(
        interval_s,
        pause_s=pause_s,
        delay_s=0.0,
        restart_s=RESTART_S,
        failures_per_s=failures_per_s,
    ).goodput


def _rhythm(fleet: FleetData) -> tuple[Floats, Floats]:
    """Each job's usual time between checkpoints, and that of one; nan where it tells of none."""
    jobs, progress = fleet.jobs, fleet.progress
    saves = np.flatnonzero(progress.phase.equals("checkpoint") & (progress.job >= 0))
    saves = saves[np.lexsort((progress.start_s[saves], progress.job[saves]))]
    job = progress.job[saves]
    same = np.append(False, job[1:] == job[:-1])
    ended = np.append(np.nan, progress.end_s[saves][:-1])
    apart = np.where(same, progress.start_s[saves] - ended, np.nan)
    interval = group_medians(apart, job, jobs.num_jobs)
    pause = group_medians(progress.end_s[saves] - progress.start_s[saves], job, jobs.num_jobs)
    return interval, pause


@register_fleet_pattern(
    FleetPattern(
        "bad-checkpoint-interval",
        "Checkpoints come too often or too seldom",
        "checkpoints",
        "the interval that a job's own metrics show wastes 2 % of its time more than the best one "
        f"(Daly), by its pause and the rate of {_RATE}",
        "estimated: GPU-hours times the difference of both wastes",
        "save at the best interval",
        explained_by=("slow-checkpoints",),
    )
)
def find_bad_intervals(fleet: FleetData) -> Iterator[FleetDetection]:
    """Far from Daly's optimum."""
    jobs = fleet.jobs
    interval, pause = _rhythm(fleet)
    rate = estimate_failure_rate(fleet) / 3600
    able = np.flatnonzero((interval > 0) & (pause > 0) & (jobs.gpus > 0) & (jobs.run_s >= 3600))
    for row in able.tolist():
        often = rate * jobs.gpus[row]
        best = optimal_checkpoint_interval_s(pause[row], often)
        lost = _useful(best, pause[row], often) - _useful(interval[row], pause[row], often)
        if lost < 0.02:
            continue
        yield FleetDetection(
            float(jobs.gpu_hours[row] * lost),
            defer_evidence(
                lambda row, best, lost, often: (
                    f"job {jobs.format_label(row)}: a checkpoint of "
                    f"{format_duration(float(pause[row]))} every "
                    f"{format_duration(float(interval[row]))} wastes {format_percent(lost)} more "
                    f"than one every "
                    f"{format_duration(best)}",
                    f"{format_gpus(float(jobs.gpus[row]))} fail every {format_duration(1 / often)} "
                    f"here",
                ),
                row,
                best,
                lost,
                often,
            ),
            jobs=np.array([row]),
            remedy=f"save every {best / 60:.0f} minutes instead of {interval[row] / 60:.0f}",
        )


@register_fleet_pattern(
    FleetPattern(
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
def find_slow_checkpoints(fleet: FleetData) -> Iterator[FleetDetection]:
    """Long pauses."""
    jobs = fleet.jobs
    spent = fleet.progress.sum_phase_seconds("checkpoint", jobs.num_jobs)
    interval, pause = _rhythm(fleet)
    part = np.divide(spent, jobs.run_s, out=np.zeros(jobs.num_jobs), where=jobs.run_s > 0)
    yield from make_job_detections(
        (part >= 0.05) & (pause >= 120) & (interval >= 1800),
        jobs.gpus * spent / 3600,
        lambda row: (
            f"job {jobs.format_label(row)}: {format_percent(part[row])} of its time in checkpoints "
            f"of "
            f"{format_duration(pause[row])} each",
        ),
    )


@register_fleet_pattern(
    FleetPattern(
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
def find_missing_checkpoints(fleet: FleetData) -> Iterator[FleetDetection]:
    """All or nothing."""
    jobs = fleet.jobs
    lost = estimate_lost_work(fleet)
    saved = fleet.progress.sum_phase_seconds("checkpoint", jobs.num_jobs) > 0
    worked = fleet.progress.sum_phase_seconds("productive", jobs.num_jobs) >= 6 * 3600
    failed = jobs.state.equals("failed", "node_fail", "timeout", "preempted", "out_of_memory")
    rate = estimate_failure_rate(fleet)
    risk = 1 - np.exp(-rate * jobs.gpus * jobs.run_s / 3600)
    cost = np.where(failed, np.minimum(lost.hours, jobs.gpu_hours), jobs.gpu_hours * risk / 2)
    yield from make_job_detections(
        lost.known & ~saved & worked & (failed | (jobs.run_s >= 86400)),
        cost,
        lambda row: (
            f"job {jobs.format_label(row)}: {format_duration(jobs.run_s[row])} on "
            f"{format_gpus(jobs.gpus[row])} "
            f"without a checkpoint" + (f", then {jobs.state.at(row)}" if failed[row] else ""),
        ),
    )
