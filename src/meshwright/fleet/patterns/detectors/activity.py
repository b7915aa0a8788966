"""GPUs that are used, and not well: little of the chip, little of its memory, unevenly."""

from collections.abc import Iterator

import numpy as np

from meshwright.fleet.patterns.data.fleet_data import FleetData
from meshwright.fleet.patterns.data.group_math import Floats, group_max
from meshwright.fleet.patterns.evidence_text import (
    format_duration,
    format_gib,
    format_gpus,
    format_hours,
    format_percent,
    make_job_detections,
)
from meshwright.fleet.patterns.fleet_pattern import (
    IDLE_PATTERNS,
    FleetDetection,
    FleetPattern,
    register_fleet_pattern,
)
from meshwright.fleet.statistics.robust import group_medians

DEFAULT_TENSOR_ACTIVITY = 0.3
"""Tensor activity of a sound training job, where the fleet has none to compare with."""
_CAUSES = (
    *IDLE_PATTERNS,
    "cpu-starved",
    "storage-bound",
    "metadata-storm",
    "data-wait",
    "pcie-bound",
    "some-gpus-unused",
    "exposed-communication",
    "startup-heavy",
)


def median_tensor_activity(fleet: FleetData) -> float:
    """The median tensor activity of GPU-hours that do use tensor cores."""
    tensor = fleet.utilization["tensor_active"][fleet.loaded_uses]
    tensor = tensor[tensor >= 0.1]
    return float(np.median(tensor)) if tensor.size >= 20 else DEFAULT_TENSOR_ACTIVITY


def _unwon(fleet: FleetData) -> Floats:
    """GPU-hours that jobs as busy with tensors as others would not have needed."""
    return fleet.jobs.gpu_hours * np.maximum(
        0, 1 - fleet.mean_by_job("tensor_active") / median_tensor_activity(fleet)
    )


@register_fleet_pattern(
    FleetPattern(
        "low-sm-activity",
        "Small kernels: busy by its counter, most of the chip empty",
        "activity",
        "70 % active or more, but a warp on 30 % of the SMs or less and tensor activity of 10 % "
        "or less",
        "estimated: GPU-hours that the usual tensor activity of the fleet would have saved",
        'torch.compile(model, mode="reduce-overhead") or CUDA graphs, and a larger batch; mw '
        "analyze on one profiled step shows which kernels",
        min_gpu_hours=4.0,
        explained_by=("hung-job", "pcie-bound"),
    )
)
def find_low_sm_activity(fleet: FleetData) -> Iterator[FleetDetection]:
    """High utilization, few SMs."""
    jobs, active = fleet.jobs, fleet.mean_by_job("activity")
    sms, tensor = fleet.mean_by_job("sm_active"), fleet.mean_by_job("tensor_active")
    yield from make_job_detections(
        (active >= 0.7) & (sms <= 0.3) & (tensor <= 0.1),
        _unwon(fleet),
        lambda row: (
            f"job {jobs.format_label(row)}: GPU utilization of {format_percent(active[row])}, but "
            f"only {format_percent(sms[row])} of the SMs hold work, tensor cores "
            f"{format_percent(tensor[row])}",
        ),
    )


@register_fleet_pattern(
    FleetPattern(
        "low-tensor-activity",
        "Busy GPUs that hardly use their tensor cores",
        "activity",
        "70 % active or more with work on more than 30 % of the SMs, tensor activity of 8 % or "
        "less, and neither memory (over 50 %) nor fp64 (over 5 %) busy instead",
        "estimated: GPU-hours that the usual tensor activity of the fleet would have saved",
        'torch.autocast("cuda", dtype=torch.bfloat16), torch.set_float32_matmul_precision("high"), '
        "and widths that are multiples of 64",
        min_gpu_hours=4.0,
        explained_by=("hung-job", "low-sm-activity", "pcie-bound"),
    )
)
def find_low_tensor_activity(fleet: FleetData) -> Iterator[FleetDetection]:
    """High utilization, no tensor cores."""
    jobs, active = fleet.jobs, fleet.mean_by_job("activity")
    sms, tensor = fleet.mean_by_job("sm_active"), fleet.mean_by_job("tensor_active")
    dram, fp64 = fleet.mean_by_job("dram_active"), fleet.mean_by_job("fp64_active")
    otherwise = (np.nan_to_num(dram) > 0.5) | (np.nan_to_num(fp64) > 0.05)
    fp32 = fleet.mean_by_job("fp32_active")
    yield from make_job_detections(
        (active >= 0.7) & ~(sms <= 0.3) & (tensor <= 0.08) & ~otherwise,
        _unwon(fleet),
        lambda row: (
            f"job {jobs.format_label(row)}: GPU utilization of {format_percent(active[row])}, "
            f"tensor cores busy "
            f"{format_percent(tensor[row])} of the time",
            *([f"fp32 units busy {format_percent(fp32[row])}: products run in full fp32"]
              if fp32[row] > 0.15 else []),
        ),
    )  # fmt: skip


@register_fleet_pattern(
    FleetPattern(
        "low-gpu-memory",
        "Most of the GPUs' memory and half of their time are left over",
        "activity",
        "two or more GPUs, none with more than 20 % of its memory in use, active for half of the "
        "time or less",
        "estimated: GPU-hours that as few GPUs as would be 90 % active save",
        "a larger batch for each GPU (--per-device-batch-size doubled until memory is 80 % full) "
        "on fewer GPUs",
        min_gpu_hours=4.0,
        explained_by=_CAUSES,
    )
)
def find_underused_memory(fleet: FleetData) -> Iterator[FleetDetection]:
    """Room in memory and time on every GPU."""
    jobs, active = fleet.jobs, fleet.mean_by_job("activity")
    full = fleet.max_by_job("peak_memory_used") / fleet.max_by_job("peak_memory_total")
    yield from make_job_detections(
        fleet.fully_sampled_jobs & (jobs.gpus >= 2) & (full <= 0.2) & (active <= 0.5)
        & (active > 0.01)
        & ~jobs.interactive,
        jobs.gpu_hours * (1 - active / 0.9),
        lambda row: (
            f"job {jobs.format_label(row)}: at most {format_percent(full[row])} of the memory of "
            f"any of "
            f"{format_gpus(jobs.gpus[row])} in use, {format_percent(active[row])} active",
        ),
        lambda row: (
            f"--gres=gpu:{max(1, int(np.ceil(jobs.gpus[row] * active[row] / 0.9)))} instead of "
            f"{jobs.gpus[row]:g} in all, with a batch as much larger on each"
        ),
    )  # fmt: skip


@register_fleet_pattern(
    FleetPattern(
        "low-utilization",
        "Low utilization without another cause",
        "activity",
        "25 % active or less on average over half an hour or more (15 % where 85 % of the memory "
        "is in use, as of a server that waits for requests), not idle, 10 GPU-hours or more, and "
        "no other pattern says why",
        "estimated: GPU-hours that the same work would save at 90 %",
        "profile 20 steps with mw watch to see what the GPUs wait for; DataLoader(num_workers=8, "
        "pin_memory=True, persistent_workers=True) is the usual first change",
        min_gpu_hours=5.0,
        explained_by=(*_CAUSES, "mig-candidate", "low-gpu-memory"),
    )
)
def find_low_utilization(fleet: FleetData) -> Iterator[FleetDetection]:
    """Neither idle nor busy."""
    jobs, active = fleet.jobs, fleet.mean_by_job("activity")
    known = fleet.fully_sampled_jobs | ~np.isnan(jobs.gpu_util)
    active = np.where(fleet.fully_sampled_jobs, active, jobs.gpu_util)
    full = fleet.max_by_job("peak_memory_used") >= 0.85 * fleet.max_by_job("peak_memory_total")
    bound = np.where(full, 0.15, 0.25)
    yield from make_job_detections(
        known & (active > 0.01) & (active <= bound) & (jobs.gpu_hours >= 10)
        & (jobs.run_s >= 1800) & ~jobs.interactive,
        jobs.gpu_hours * (1 - active / 0.9),
        lambda row: (
            f"job {jobs.format_label(row)}: {format_percent(active[row])} active on average over "
            f"{format_hours(jobs.gpu_hours[row])} GPU-hours",
        ),
    )  # fmt: skip


@register_fleet_pattern(
    FleetPattern(
        "uneven-memory",
        "One GPU of a job holds far more memory than the others",
        "activity",
        "of four or more GPUs of a job one has twice the median of the others in use, and more "
        "than half of its memory",
        "not in GPU-hours: it bounds the batch of all GPUs by the memory of one",
        'torch.cuda.set_device(local_rank) before anything else, torch.load(map_location="cpu"), '
        "and no gathering of outputs onto rank 0",
    )
)
def find_uneven_memory(fleet: FleetData) -> Iterator[FleetDetection]:
    """One full GPU among half-empty ones."""
    jobs, uses = fleet.jobs, fleet.utilization
    peak = np.where(fleet.sampled_uses, uses["peak_memory_used"], np.nan)
    median = group_medians(peak, uses.job, jobs.num_jobs)
    most, total = fleet.max_by_job("peak_memory_used"), fleet.max_by_job("peak_memory_total")
    second = _second_most(peak, uses.job, jobs.num_jobs)
    lone = (most >= 2 * median) & (most >= 0.5 * total) & (second <= 1.5 * median)
    yield from make_job_detections(
        (fleet.num_sampled_gpus >= 4) & lone & (median >= 2**30) & ~jobs.interactive,
        np.full(jobs.num_jobs, np.nan),
        lambda row: (
            f"job {jobs.format_label(row)}: one GPU has {format_gib(most[row])} in use, the median "
            f"of "
            f"{fleet.num_sampled_gpus[row]:.0f} is {format_gib(median[row])}",
        ),
    )


def _second_most(values: Floats, groups: "np.ndarray[tuple[int], np.dtype[np.int64]]",
                 number: int) -> Floats:  # fmt: skip
    """The second largest of each group."""
    most = group_max(values, groups, number)
    rest = np.where(values >= most[groups], np.nan, values)
    return group_max(rest, groups, number)


@register_fleet_pattern(
    FleetPattern(
        "uneven-work",
        "The GPUs of a job have unequal work",
        "activity",
        "of four or more GPUs of a job that all work, tensor activity of the mean is below 80 % of "
        "the highest",
        "estimated: GPU-hours that equal shares would save",
        "balance pipeline stages (--decoder-first-pipeline-num-layers, mw plan), pack sequences to "
        "equal tokens, and raise the load-balancing loss of experts",
        min_gpu_hours=4.0,
        explained_by=("some-gpus-unused", "straggler-gpu", *IDLE_PATTERNS),
    )
)
def find_uneven_activity(fleet: FleetData) -> Iterator[FleetDetection]:
    """Different tensor activity on GPUs that all work."""
    jobs = fleet.jobs
    mean, most = fleet.mean_by_job("tensor_active"), fleet.max_by_job("tensor_active")
    works = fleet.min_by_job("activity") >= 0.05
    part = np.divide(mean, most, out=np.ones(jobs.num_jobs), where=most > 0)
    yield from make_job_detections(
        fleet.fully_sampled_jobs
        & (fleet.num_sampled_gpus >= 4)
        & works
        & (most >= 0.1)
        & (part <= 0.8),
        jobs.gpu_hours * (1 - part),
        lambda row: (
            f"job {jobs.format_label(row)}: tensor activity "
            f"from {format_percent(fleet.min_by_job('tensor_active')[row])} to "
            f"{format_percent(most[row])} over "
            f"{format_gpus(fleet.num_sampled_gpus[row])}, {format_percent(mean[row])} on average",
        ),
    )


@register_fleet_pattern(
    FleetPattern(
        "lasting-slowdown",
        "A job has become slower and stayed so",
        "activity",
        "the work of most GPUs of a job drops by 12 % or more at one moment and stays there for "
        "two hours or more (CUSUM beyond what its noise would make), mostly "
        "within an hour",
        "estimated: GPU-hours since then times the part of the speed that is lost",
        "mw diff of a capture from before and one from after (mw watch takes both); look at what "
        "else began then: clocks, a neighbour on the storage, a longer sequence length",
        statistic="change point: largest cumulative deviation from the mean, in units of its "
        "noise estimated from neighbouring samples",
        explained_by=(*IDLE_PATTERNS, "power-throttled", "thermal-throttled"),
    )
)
def find_slowdowns(fleet: FleetData) -> Iterator[FleetDetection]:
    """A lasting drop at one moment on most GPUs."""
    jobs, uses = fleet.jobs, fleet.utilization
    later = uses.end_s - uses["changed_s"]
    with np.errstate(divide="ignore", invalid="ignore"):
        lost = 1 - uses["after"] / uses["before"]
        at_once = 1 - uses["just_after"] / uses["just_before"]
    dropped = (
        fleet.sampled_uses & (uses["change_score"] >= 6) & (lost >= 0.12) & (at_once >= 0.6 * lost)
        & (later >= 7200) & (uses["changed_s"] - uses.start_s >= 3600)
        & (lost < 0.8)
    )  # fmt: skip
    number = np.bincount(uses.job[dropped], minlength=jobs.num_jobs)
    moment = group_medians(np.where(dropped, uses["changed_s"], np.nan), uses.job, jobs.num_jobs)
    near = dropped & (np.abs(uses["changed_s"] - moment[uses.job]) <= 1800)
    agree = np.bincount(uses.job[near], minlength=jobs.num_jobs)
    cost = np.bincount(
        uses.job[near],
        (later / 3600 * lost)[near],
        minlength=jobs.num_jobs,
    ).astype(np.float64)
    before = group_medians(np.where(near, uses["before"], np.nan), uses.job, jobs.num_jobs)
    after = group_medians(np.where(near, uses["after"], np.nan), uses.job, jobs.num_jobs)
    yield from make_job_detections(
        (number > 0) & (agree > fleet.num_sampled_gpus / 2) & ~jobs.interactive,
        cost,
        lambda row: (
            f"job {jobs.format_label(row)}: since "
            f"{format_duration(moment[row] - jobs.start_s[row])} after its "
            f"start work is {format_percent(1 - after[row] / before[row])} less, on {agree[row]} "
            f"of "
            f"{format_gpus(fleet.num_sampled_gpus[row])} at once",
        ),
    )
