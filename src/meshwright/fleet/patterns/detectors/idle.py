"""GPUs that somebody holds and nobody uses."""

from collections.abc import Iterator

import numpy as np

from meshwright.fleet.patterns.data.fleet_data import FleetData
from meshwright.fleet.patterns.data.group_math import group_sums
from meshwright.fleet.patterns.data.utilization import IDLE_THRESHOLD
from meshwright.fleet.patterns.evidence_text import (
    format_duration,
    format_gib,
    format_gpus,
    format_hours,
    format_percent,
    make_job_detections,
)
from meshwright.fleet.patterns.fleet_pattern import (
    FleetDetection,
    FleetPattern,
    register_fleet_pattern,
)

MIN_IDLE_S = 3600.0
"""A job may stand still this long: to read its data, to compile, to evaluate."""
INTERACTIVE_ALLOWANCE_HOURS = 8.0
"""GPU-hours that a session at a terminal may take before anybody counts."""
MAX_UNUSED_BYTES = 1.5 * 2**30
"""Memory that a GPU without a process has in use at most, with its driver and its watchers."""
_MEASURED = "measured: the GPU-hours in which nothing ran"


@register_fleet_pattern(
    FleetPattern(
        "never-used",
        "GPUs allocated and never touched",
        "idle",
        "every GPU of a job is sampled, none ever works and none has more than 1.5 GiB of its "
        "memory in use, for an hour or more (interactive: beyond 8 GPU-hours)",
        "measured: all GPU-hours of the job",
        "drop --gres=gpu (Slurm) or the nvidia.com/gpu limit (Kubernetes) from this job; if it "
        'should use GPUs, check torch.cuda.is_available() first and that .to("cuda") is called',
    )
)
def find_never_used(fleet: FleetData) -> Iterator[FleetDetection]:
    """Neither work nor memory on any GPU."""
    jobs = fleet.jobs
    memory = fleet.max_by_job("peak_memory_used")
    untouched = (fleet.max_by_job("peak_activity") <= IDLE_THRESHOLD) & (
        np.nan_to_num(memory) <= MAX_UNUSED_BYTES
    )
    long = (fleet.min_by_job("seen_s") >= MIN_IDLE_S) & (
        ~jobs.interactive | (jobs.gpu_hours > INTERACTIVE_ALLOWANCE_HOURS)
    )
    yield from make_job_detections(
        fleet.fully_sampled_jobs & untouched & long,
        fleet.sum_by_job("idle_s") / 3600,
        lambda row: (
            f"job {jobs.format_label(row)}: {format_gpus(jobs.gpus[row])} for "
            f"{format_duration(jobs.run_s[row])}, "
            f"at most {format_percent(np.nan_to_num(fleet.max_by_job('peak_activity'))[row])} "
            f"active",
            f"GPU memory never above {format_gib(np.nan_to_num(memory)[row])}: no process ever "
            f"used one",
        ),
    )


@register_fleet_pattern(
    FleetPattern(
        "finished-but-held",
        "Work is over, GPUs are still held",
        "idle",
        "all GPUs of a job stop for good at about the same time and are held for another hour or "
        "more, which is most of its idle time",
        _MEASURED + " after the last work",
        "end the script when training ends: sbatch without a trailing sleep or wait; call "
        "torch.distributed.destroy_process_group() and sys.exit(); a pod with restartPolicy: Never",
    )
)
def find_finished_jobs(fleet: FleetData) -> Iterator[FleetDetection]:
    """Idle at the end."""
    jobs, tail = fleet.jobs, fleet.min_by_job("tail_idle_s")
    worked = fleet.max_by_job("peak_activity") > 0.1
    mostly = fleet.sum_by_job("tail_idle_s") >= 0.6 * fleet.sum_by_job("long_idle_s")
    yield from make_job_detections(
        fleet.fully_sampled_jobs & ~jobs.interactive & worked & (tail >= MIN_IDLE_S) & mostly,
        fleet.sum_by_job("tail_idle_s") / 3600,
        lambda row: (
            f"job {jobs.format_label(row)}: {format_gpus(jobs.gpus[row])} idle for the last "
            f"{format_duration(tail[row])} of {format_duration(jobs.run_s[row])}",
        ),
    )


@register_fleet_pattern(
    FleetPattern(
        "idle-allocation",
        "GPUs held idle",
        "idle",
        "every GPU of a batch job is idle for an hour on end or more, and that is a tenth of its "
        "time or more (idle: at most 1 % active)",
        _MEASURED + ", in stretches of half an hour or more",
        "split the job: sbatch --dependency=afterok:JOB runs preparation and evaluation without "
        "--gres=gpu; let servers scale down to zero replicas while no requests come",
        explained_by=("never-used", "finished-but-held"),
    )
)
def find_idle_allocations(fleet: FleetData) -> Iterator[FleetDetection]:
    """Idle for long stretches."""
    jobs, longest = fleet.jobs, fleet.min_by_job("longest_idle_s")
    cost = fleet.sum_by_job("long_idle_s") / 3600
    much = cost >= 0.1 * jobs.gpu_hours
    yield from make_job_detections(
        fleet.fully_sampled_jobs & ~jobs.interactive & (longest >= MIN_IDLE_S) & much,
        cost,
        lambda row: (
            f"job {jobs.format_label(row)}: {format_gpus(jobs.gpus[row])} idle for "
            f"{format_duration(longest[row])} "
            f"on end; {format_hours(cost[row])} of {format_hours(jobs.gpu_hours[row])} GPU-hours "
            f"idle",
            f"up to {format_gib(np.nan_to_num(fleet.max_by_job('peak_memory_used'))[row])} of GPU "
            f"memory held",
        ),
    )


@register_fleet_pattern(
    FleetPattern(
        "idle-notebook",
        "An interactive session keeps GPUs it does not use",
        "idle",
        "a shell or notebook beyond 8 GPU-hours is idle for half of its time or more, in stretches "
        "of half an hour or more",
        _MEASURED + " beyond the allowance of 8",
        "end idle sessions: JupyterHub's idle culler with --timeout=7200, salloc --time=2:00:00; "
        "use a MIG slice (--gres=gpu:1g.10gb:1) to write code, sbatch to run it",
        explained_by=("never-used",),
    )
)
def find_idle_notebooks(fleet: FleetData) -> Iterator[FleetDetection]:
    """A session that is mostly idle."""
    jobs = fleet.jobs
    idle = fleet.sum_by_job("long_idle_s") / 3600
    yield from make_job_detections(
        fleet.fully_sampled_jobs
        & jobs.interactive
        & (jobs.gpu_hours > INTERACTIVE_ALLOWANCE_HOURS)
        & (idle >= 0.5 * jobs.gpu_hours),
        np.minimum(idle, jobs.gpu_hours - INTERACTIVE_ALLOWANCE_HOURS),
        lambda row: (
            f"session {jobs.format_label(row)}: idle for {format_hours(idle[row])} of "
            f"{format_hours(jobs.gpu_hours[row])} "
            f"GPU-hours, {format_duration(fleet.min_by_job('longest_idle_s')[row])} on end",
        ),
    )


@register_fleet_pattern(
    FleetPattern(
        "some-gpus-unused",
        "One busy GPU of many",
        "idle",
        "of a job's GPUs some work (5 % or more of the time) and others never do, half an hour or "
        "more",
        "measured: the GPU-hours of those that never work",
        "ask for as many GPUs as the script uses, or start one process for each",
    )
)
def find_partly_unused(fleet: FleetData) -> Iterator[FleetDetection]:
    """Never used, beside others that are."""
    jobs, uses = fleet.jobs, fleet.utilization
    idle = fleet.sampled_uses & (uses["peak_activity"] <= IDLE_THRESHOLD) & (uses["seen_s"] >= 1800)
    works = fleet.sampled_uses & (uses["activity"] >= 0.05)
    unused = np.bincount(uses.job[idle], minlength=jobs.num_jobs)
    used = np.bincount(uses.job[works], minlength=jobs.num_jobs)
    cost = group_sums(np.where(idle, uses.gpu_hours, np.nan), uses.job, jobs.num_jobs)
    yield from make_job_detections(
        (unused > 0) & (used > 0),
        cost,
        lambda row: (
            f"job {jobs.format_label(row)}: {used[row]} of {format_gpus(jobs.gpus[row])} work, "
            f"{unused[row]} never did in {format_duration(jobs.run_s[row])}",
        ),
        lambda row: (
            f"--gres=gpu:{max(1, round(used[row]))} instead of {jobs.gpus[row]:g} in all; or use "
            f"them: torchrun --nproc-per-node={jobs.gpus[row]:g} with DistributedDataParallel"
        ),
    )


@register_fleet_pattern(
    FleetPattern(
        "hung-job",
        "A hung job: busy by its counter, without any work",
        "idle",
        "at its end every GPU of a job has been 95 % active or more for half an hour with no "
        "tensor and no memory activity: the kernel of a collective that waits for ever",
        "measured: the GPU-hours from there to its end",
        "set TORCH_NCCL_ASYNC_ERROR_HANDLING=1 and init_process_group(timeout=timedelta(minutes="
        "10)) so that it ends by itself; mw hang names the rank from TORCH_FR_BUFFER_SIZE=2000 "
        "dumps",
    )
)
def find_hung_jobs(fleet: FleetData) -> Iterator[FleetDetection]:
    """All GPUs spin at the end."""
    jobs, stuck = fleet.jobs, fleet.min_by_job("stuck_s")
    yield from make_job_detections(
        fleet.fully_sampled_jobs & (stuck >= 1800),
        fleet.sum_by_job("stuck_s") / 3600,
        lambda row: (
            f"job {jobs.format_label(row)}: {format_gpus(jobs.gpus[row])} with utilization of 100 "
            f"% but "
            f"neither tensor nor memory activity for the last {format_duration(stuck[row])}",
        ),
    )


@register_fleet_pattern(
    FleetPattern(
        "stray-processes",
        "Memory is taken on a GPU that no job holds",
        "idle",
        "more than 1 GiB of a GPU's memory is in use for half an hour while no job holds it, on "
        "nodes where all holders are known",
        "measured: GPU-hours until it was free again; the next job there may run out of memory",
        "kill what is left in the epilog: fuser -k -9 /dev/nvidia* after the last job of a node, "
        "or ProctrackType=proctrack/cgroup and ConstrainDevices=yes in cgroup.conf",
        owner="operators",
    )
)
def find_stray_processes(fleet: FleetData) -> Iterator[FleetDetection]:
    """Processes that outlived their job; one hit for each node."""
    found = fleet.unallocated_use
    for node in np.unique(found.node).tolist():
        own = np.flatnonzero(found.node == node)
        cost = float((found.end_s - found.start_s)[own].sum()) / 3600

        def tell(node: int = node, own: "np.ndarray[tuple[int], np.dtype[np.int64]]" = own) -> (
            tuple[str, ...]
        ):  # fmt: skip
            worst = own[int(np.argmax((found.end_s - found.start_s)[own]))]
            line = (
                f"{fleet.node_index.names[node]}, GPU {found.gpu[worst]}: "
                f"{format_gib(found.memory_bytes[worst])} held by nobody for "
                f"{format_duration(found.end_s[worst] - found.start_s[worst])}"
            )
            return (line, *_left_by(fleet, node, int(found.gpu[worst]), found.start_s[worst]))

        yield FleetDetection(cost, tell, nodes=(fleet.node_index.names[node],))


def _left_by(fleet: FleetData, node: int, gpu: int, start_s: float) -> tuple[str, ...]:
    """The job that held the GPU last."""
    uses = fleet.utilization
    before = (uses.node == node) & (uses.gpu == gpu) & (uses.end_s <= start_s + 900)
    if not before.any():
        return ()
    rows = np.flatnonzero(before)
    job = int(uses.job[rows[int(np.argmax(uses.end_s[rows]))]])
    return (f"the last job there: {fleet.jobs.format_label(job)} of {fleet.jobs.user.at(job)}",)
