"""GPUs that are used, and not well: little of the chip, little of its memory, unevenly."""

from collections.abc import Iterator

import numpy as np

from meshwright.observe.fleet.measures.robust import group_medians
from meshwright.observe.fleet.patterns.arrays import Floats, most_of
from meshwright.observe.fleet.patterns.fleet import Fleet
from meshwright.observe.fleet.patterns.registry import IDLE, Hit, Pattern, pattern
from meshwright.observe.fleet.patterns.say import gib, hours, lasted, many_gpus, of_jobs, share

USUAL_TENSOR = 0.3
"""Tensor activity of a sound training job, where the fleet has none to compare with."""
_CAUSES = (*IDLE, "cpu-starved", "storage-bound", "metadata-storm", "data-wait", "pcie-bound",
           "some-gpus-unused", "exposed-communication", "startup-heavy")  # fmt: skip


def usual_tensor(fleet: Fleet) -> float:
    """The median tensor activity of GPU-hours that do use tensor cores."""
    tensor = fleet.uses["tensor_active"][fleet.loaded]
    tensor = tensor[tensor >= 0.1]
    return float(np.median(tensor)) if tensor.size >= 20 else USUAL_TENSOR


def _unwon(fleet: Fleet) -> Floats:
    """GPU-hours that jobs as busy with tensors as others would not have needed."""
    return fleet.jobs.hours * np.maximum(
        0, 1 - fleet.of_jobs("tensor_active") / usual_tensor(fleet)
    )


@pattern(
    Pattern(
        "launch-bound",
        "Small kernels: busy by its counter, most of the chip empty",
        "activity",
        "70 % active or more, but a warp on 30 % of the SMs or less and tensor activity of 10 % "
        "or less",
        "estimated: GPU-hours that the usual tensor activity of the fleet would have saved",
        'torch.compile(model, mode="reduce-overhead") or CUDA graphs, and a larger batch; mw '
        "analyze on one profiled step shows which kernels",
        least_hours=4.0,
        yields_to=("hung-job", "pcie-bound"),
    )
)
def launch_bound(fleet: Fleet) -> Iterator[Hit]:
    """High utilisation, few SMs."""
    jobs, active = fleet.jobs, fleet.of_jobs("activity")
    sms, tensor = fleet.of_jobs("sm_active"), fleet.of_jobs("tensor_active")
    yield from of_jobs(
        (active >= 0.7) & (sms <= 0.3) & (tensor <= 0.1),
        _unwon(fleet),
        lambda row: (
            f"job {jobs.label(row)}: GPU utilisation of {share(active[row])}, but only "
            f"{share(sms[row])} of the SMs hold work, tensor cores {share(tensor[row])}",
        ),
    )


@pattern(
    Pattern(
        "low-tensor-activity",
        "Busy GPUs that hardly use their tensor cores",
        "activity",
        "70 % active or more with work on more than 30 % of the SMs, tensor activity of 8 % or "
        "less, and neither memory (over 50 %) nor fp64 (over 5 %) busy instead",
        "estimated: GPU-hours that the usual tensor activity of the fleet would have saved",
        'torch.autocast("cuda", dtype=torch.bfloat16), torch.set_float32_matmul_precision("high"), '
        "and widths that are multiples of 64",
        least_hours=4.0,
        yields_to=("hung-job", "launch-bound", "pcie-bound"),
    )
)
def low_tensor(fleet: Fleet) -> Iterator[Hit]:
    """High utilisation, no tensor cores."""
    jobs, active = fleet.jobs, fleet.of_jobs("activity")
    sms, tensor = fleet.of_jobs("sm_active"), fleet.of_jobs("tensor_active")
    dram, fp64 = fleet.of_jobs("dram_active"), fleet.of_jobs("fp64_active")
    otherwise = (np.nan_to_num(dram) > 0.5) | (np.nan_to_num(fp64) > 0.05)
    fp32 = fleet.of_jobs("fp32_active")
    yield from of_jobs(
        (active >= 0.7) & ~(sms <= 0.3) & (tensor <= 0.08) & ~otherwise,
        _unwon(fleet),
        lambda row: (
            f"job {jobs.label(row)}: GPU utilisation of {share(active[row])}, tensor cores busy "
            f"{share(tensor[row])} of the time",
            *([f"fp32 units busy {share(fp32[row])}: products run in full fp32"]
              if fp32[row] > 0.15 else []),
        ),
    )  # fmt: skip


@pattern(
    Pattern(
        "memory-far-under-request",
        "Most of the GPUs' memory and half of their time are left over",
        "activity",
        "two or more GPUs, none with more than 20 % of its memory in use, active for half of the "
        "time or less",
        "estimated: GPU-hours that as few GPUs as would be 90 % active save",
        "a larger batch for each GPU (--per-device-batch-size doubled until memory is 80 % full) "
        "on fewer GPUs",
        least_hours=4.0,
        yields_to=_CAUSES,
    )
)
def memory_under(fleet: Fleet) -> Iterator[Hit]:
    """Room in memory and time on every GPU."""
    jobs, active = fleet.jobs, fleet.of_jobs("activity")
    full = fleet.most("peak_memory_used") / fleet.most("peak_memory_total")
    yield from of_jobs(
        fleet.whole & (jobs.gpus >= 2) & (full <= 0.2) & (active <= 0.5) & (active > 0.01)
        & ~jobs.interactive,
        jobs.hours * (1 - active / 0.9),
        lambda row: (
            f"job {jobs.label(row)}: at most {share(full[row])} of the memory of any of "
            f"{many_gpus(jobs.gpus[row])} in use, {share(active[row])} active",
        ),
        lambda row: (
            f"--gres=gpu:{max(1, int(np.ceil(jobs.gpus[row] * active[row] / 0.9)))} instead of "
            f"{jobs.gpus[row]:g} in all, with a batch as much larger on each"
        ),
    )  # fmt: skip


@pattern(
    Pattern(
        "low-utilisation",
        "Low utilisation without another cause",
        "activity",
        "25 % active or less on average over half an hour or more (15 % where 85 % of the memory "
        "is in use, as of a server that waits for requests), not idle, 10 GPU-hours or more, and "
        "no other pattern says why",
        "estimated: GPU-hours that the same work would save at 90 %",
        "profile 20 steps with mw watch to see what the GPUs wait for; DataLoader(num_workers=8, "
        "pin_memory=True, persistent_workers=True) is the usual first change",
        least_hours=5.0,
        yields_to=(*_CAUSES, "gpu-too-powerful", "memory-far-under-request"),
    )
)
def low_utilisation(fleet: Fleet) -> Iterator[Hit]:
    """Neither idle nor busy."""
    jobs, active = fleet.jobs, fleet.of_jobs("activity")
    known = fleet.whole | ~np.isnan(jobs.gpu_util)
    active = np.where(fleet.whole, active, jobs.gpu_util)
    full = fleet.most("peak_memory_used") >= 0.85 * fleet.most("peak_memory_total")
    bound = np.where(full, 0.15, 0.25)
    yield from of_jobs(
        known & (active > 0.01) & (active <= bound) & (jobs.hours >= 10)
        & (jobs.run_s >= 1800) & ~jobs.interactive,
        jobs.hours * (1 - active / 0.9),
        lambda row: (
            f"job {jobs.label(row)}: {share(active[row])} active on average over "
            f"{hours(jobs.hours[row])} GPU-hours",
        ),
    )  # fmt: skip


@pattern(
    Pattern(
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
def uneven_memory(fleet: Fleet) -> Iterator[Hit]:
    """One full GPU among half-empty ones."""
    jobs, uses = fleet.jobs, fleet.uses
    peak = np.where(fleet.seen, uses["peak_memory_used"], np.nan)
    median = group_medians(peak, uses.job, jobs.number)
    most, total = fleet.most("peak_memory_used"), fleet.most("peak_memory_total")
    second = _second_most(peak, uses.job, jobs.number)
    lone = (most >= 2 * median) & (most >= 0.5 * total) & (second <= 1.5 * median)
    yield from of_jobs(
        (fleet.num_seen >= 4) & lone & (median >= 2**30) & ~jobs.interactive,
        np.full(jobs.number, np.nan),
        lambda row: (
            f"job {jobs.label(row)}: one GPU has {gib(most[row])} in use, the median of "
            f"{fleet.num_seen[row]:.0f} is {gib(median[row])}",
        ),
    )


def _second_most(values: Floats, groups: "np.ndarray[tuple[int], np.dtype[np.int64]]",
                 number: int) -> Floats:  # fmt: skip
    """The second largest of each group."""
    most = most_of(values, groups, number)
    rest = np.where(values >= most[groups], np.nan, values)
    return most_of(rest, groups, number)


@pattern(
    Pattern(
        "uneven-work",
        "The GPUs of a job have unequal work",
        "activity",
        "of four or more GPUs of a job that all work, tensor activity of the mean is below 80 % of "
        "the highest",
        "estimated: GPU-hours that equal shares would save",
        "balance pipeline stages (--decoder-first-pipeline-num-layers, mw plan), pack sequences to "
        "equal tokens, and raise the load-balancing loss of experts",
        least_hours=4.0,
        yields_to=("some-gpus-unused", "straggler-gpu", *IDLE),
    )
)
def uneven_work(fleet: Fleet) -> Iterator[Hit]:
    """Different tensor activity on GPUs that all work."""
    jobs = fleet.jobs
    mean, most = fleet.of_jobs("tensor_active"), fleet.most("tensor_active")
    works = fleet.least("activity") >= 0.05
    part = np.divide(mean, most, out=np.ones(jobs.number), where=most > 0)
    yield from of_jobs(
        fleet.whole & (fleet.num_seen >= 4) & works & (most >= 0.1) & (part <= 0.8),
        jobs.hours * (1 - part),
        lambda row: (
            f"job {jobs.label(row)}: tensor activity "
            f"from {share(fleet.least('tensor_active')[row])} to {share(most[row])} over "
            f"{many_gpus(fleet.num_seen[row])}, {share(mean[row])} on average",
        ),
    )


@pattern(
    Pattern(
        "slower-since",
        "A job has become slower and stayed so",
        "activity",
        "the work of most GPUs of a job drops by 12 % or more at one moment and stays there for "
        "two hours or more (CUSUM beyond what its noise would make), mostly "
        "within an hour",
        "estimated: GPU-hours since then times the part of the speed that is lost",
        "mw diff of a capture from before and one from after (mw watch takes both); look at what "
        "else began then: clocks, a neighbour on the storage, a longer sequence length",
        statistical="change point: largest cumulative deviation from the mean, in units of its "
        "noise estimated from neighbouring samples",
        yields_to=(*IDLE, "power-throttled", "thermal-throttled"),
    )
)
def slower_since(fleet: Fleet) -> Iterator[Hit]:
    """A lasting drop at one moment on most GPUs."""
    jobs, uses = fleet.jobs, fleet.uses
    later = uses.end_s - uses["changed_s"]
    with np.errstate(divide="ignore", invalid="ignore"):
        lost = 1 - uses["after"] / uses["before"]
        at_once = 1 - uses["just_after"] / uses["just_before"]
    dropped = (
        fleet.seen & (uses["change_score"] >= 6) & (lost >= 0.12) & (at_once >= 0.6 * lost)
        & (later >= 7200) & (uses["changed_s"] - uses.start_s >= 3600)
        & (lost < 0.8)
    )  # fmt: skip
    number = np.bincount(uses.job[dropped], minlength=jobs.number)
    moment = group_medians(np.where(dropped, uses["changed_s"], np.nan), uses.job, jobs.number)
    near = dropped & (np.abs(uses["changed_s"] - moment[uses.job]) <= 1800)
    agree = np.bincount(uses.job[near], minlength=jobs.number)
    cost = np.bincount(
        uses.job[near],
        (later / 3600 * lost)[near],
        minlength=jobs.number,
    ).astype(np.float64)
    before = group_medians(np.where(near, uses["before"], np.nan), uses.job, jobs.number)
    after = group_medians(np.where(near, uses["after"], np.nan), uses.job, jobs.number)
    yield from of_jobs(
        (number > 0) & (agree > fleet.num_seen / 2) & ~jobs.interactive,
        cost,
        lambda row: (
            f"job {jobs.label(row)}: since {lasted(moment[row] - jobs.start_s[row])} after its "
            f"start work is {share(1 - after[row] / before[row])} less, on {agree[row]} of "
            f"{many_gpus(fleet.num_seen[row])} at once",
        ),
    )
