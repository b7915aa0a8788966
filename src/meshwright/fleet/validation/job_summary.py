"""What a set of jobs comes to: counts, times, GPU-hours, and shares by how they ended."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from meshwright.fleet.columns import Floats, group_rows


class JobSet(NamedTuple):
    """Columns of jobs, one place for each job; what is not known is NaN."""

    gpus: Floats
    run_s: Floats
    wait_s: Floats
    state: npt.NDArray[np.str_]

    @property
    def gpu_s(self) -> Floats:
        """GPU-seconds of each job."""
        return self.gpus * self.run_s

    def select(self, chosen: npt.NDArray[np.bool_]) -> "JobSet":
        """Return some of the jobs."""
        gpus, run, wait, state = self
        return JobSet(gpus[chosen], run[chosen], wait[chosen], state[chosen])


def merge_attempts(table: pa.Table) -> JobSet:
    """Put the attempts of each job together.

    It ran as long as its attempts did, waited until the first of them began, had as many GPUs as
    the largest had, and ended as the last one did.
    """
    if not table.num_rows:
        nothing = np.zeros(0)
        return JobSet(nothing, nothing, nothing, nothing.astype(str))
    job = group_rows(table["cluster"], table["job"])
    order = np.lexsort((_floats(table, "attempt"), job))
    job = job[order]
    first = np.flatnonzero(np.append(True, job[1:] != job[:-1]))
    last = np.append(first[1:], len(job)) - 1
    start, end = _floats(table, "start_s")[order], _floats(table, "end_s")[order]
    submit = _floats(table, "submit_s")[order]
    run = end - start
    known = np.add.reduceat((~np.isnan(run)).astype(float), first) > 0
    whole = np.add.reduceat(np.nan_to_num(run), first)
    state = np.asarray(table["state"].to_pylist(), dtype=object)[order][last]
    return JobSet(
        np.fmax.reduceat(_floats(table, "gpus")[order], first),
        np.where(known, whole, np.nan),
        np.fmin.reduceat(start, first) - np.fmin.reduceat(submit, first),
        np.array([name or "unknown" for name in state], dtype=str),
    )


def summarize_jobs(jobs: JobSet) -> dict[str, float]:
    """Return the statistics that studies of clusters print, by their usual names.

    Rates are shares of jobs, `…_gpu_time` is GPU-seconds and `…_rate_gpu_time` shares of them. What
    neither completed nor was cancelled counts as failed, as those studies count it.
    """
    on_gpus = jobs.gpus > 0
    gpu, cpu = jobs.select(on_gpus), jobs.select(~on_gpus)
    found: dict[str, float] = {
        "job_num": len(jobs.gpus),
        "cpu_job_num": len(cpu.gpus),
        "gpu_job_num": len(gpu.gpus),
    }
    if len(jobs.gpus):
        found |= _rates(jobs.state, "")
    for part, name in ((gpu, "gpu"), (cpu, "cpu")):
        if len(part.gpus):
            found |= _times(part, name) | _rates(part.state, f"_{name}")
    if len(gpu.gpus):
        found |= {
            "avg_gpu_num": float(np.nanmean(gpu.gpus)),
            "med_gpu_num": float(np.nanmedian(gpu.gpus)),
            "max_gpu": float(np.nanmax(gpu.gpus)),
        }
        found |= _gpu_time(gpu)
    return found


def compute_gpu_time_share(jobs: JobSet, at_least: float, below: float = np.inf) -> float:
    """Return the share of GPU time that jobs of a size take."""
    of_size = (jobs.gpus >= at_least) & (jobs.gpus < below)
    whole = float(np.nansum(jobs.gpu_s))
    return float(np.nansum(jobs.gpu_s[of_size])) / whole if whole else float("nan")


def _times(jobs: JobSet, name: str) -> dict[str, float]:
    found = {}
    for values, word in ((jobs.run_s, "run"), (jobs.wait_s, "que")):
        known = values[~np.isnan(values)]
        if len(known):
            found[f"avg_{word}_time_{name}"] = float(known.mean())
            found[f"med_{word}_time_{name}"] = float(np.median(known))
            found[f"max_{word}_time_{name}"] = float(known.max())
    return found


def _rates(state: npt.NDArray[np.str_], suffix: str) -> dict[str, float]:
    complete = float((state == "completed").mean())
    cancel = float((state == "cancelled").mean())
    return {
        f"complete_rate{suffix}": complete,
        f"cancel_rate{suffix}": cancel,
        f"fail_rate{suffix}": 1 - complete - cancel,
    }


def _gpu_time(jobs: JobSet) -> dict[str, float]:
    whole = float(np.nansum(jobs.gpu_s))
    complete = float(np.nansum(jobs.gpu_s[jobs.state == "completed"]))
    cancel = float(np.nansum(jobs.gpu_s[jobs.state == "cancelled"]))
    sums = {"complete": complete, "cancel": cancel, "fail": whole - complete - cancel}
    found = {f"{name}_gpu_time": value for name, value in sums.items()}
    found["gpu_hours"] = whole / 3600
    if whole:
        found |= {f"{name}_rate_gpu_time": value / whole for name, value in sums.items()}
    return found


def _floats(table: pa.Table, name: str) -> Floats:
    column = table[name].combine_chunks()
    return np.asarray(column.cast(pa.float64()).to_numpy(zero_copy_only=False))
