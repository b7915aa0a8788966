"""GPUs that somebody holds and nobody uses."""

from collections.abc import Iterator

import numpy as np

from meshwright.observe.fleet.patterns.arrays import sums_of
from meshwright.observe.fleet.patterns.fleet import Fleet
from meshwright.observe.fleet.patterns.registry import Hit, Pattern, pattern
from meshwright.observe.fleet.patterns.say import gib, hours, lasted, many_gpus, of_jobs, share
from meshwright.observe.fleet.patterns.uses import QUIET

IDLE_S = 3600.0
"""A job may stand still this long: to read its data, to compile, to evaluate."""
ALLOWANCE = 8.0
"""GPU-hours that a session at a terminal may take before anybody counts."""
UNTOUCHED_BYTES = 1.5 * 2**30
"""Memory that a GPU without a process has in use at most, with its driver and its watchers."""
_MEASURED = "measured: the GPU-hours in which nothing ran"


@pattern(
    Pattern(
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
def never_used(fleet: Fleet) -> Iterator[Hit]:
    """Neither work nor memory on any GPU."""
    jobs = fleet.jobs
    memory = fleet.most("peak_memory_used")
    untouched = (fleet.most("peak_activity") <= QUIET) & (np.nan_to_num(memory) <= UNTOUCHED_BYTES)
    long = (fleet.least("seen_s") >= IDLE_S) & (~jobs.interactive | (jobs.hours > ALLOWANCE))
    yield from of_jobs(
        fleet.whole & untouched & long,
        fleet.total("idle_s") / 3600,
        lambda row: (
            f"job {jobs.label(row)}: {many_gpus(jobs.gpus[row])} for {lasted(jobs.run_s[row])}, "
            f"at most {share(np.nan_to_num(fleet.most('peak_activity'))[row])} active",
            f"GPU memory never above {gib(np.nan_to_num(memory)[row])}: no process ever used one",
        ),
    )


@pattern(
    Pattern(
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
def finished_but_held(fleet: Fleet) -> Iterator[Hit]:
    """Idle at the end."""
    jobs, tail = fleet.jobs, fleet.least("tail_idle_s")
    worked = fleet.most("peak_activity") > 0.1
    mostly = fleet.total("tail_idle_s") >= 0.6 * fleet.total("long_idle_s")
    yield from of_jobs(
        fleet.whole & ~jobs.interactive & worked & (tail >= IDLE_S) & mostly,
        fleet.total("tail_idle_s") / 3600,
        lambda row: (
            f"job {jobs.label(row)}: {many_gpus(jobs.gpus[row])} idle for the last "
            f"{lasted(tail[row])} of {lasted(jobs.run_s[row])}",
        ),
    )


@pattern(
    Pattern(
        "gpus-held-idle",
        "GPUs held idle",
        "idle",
        "every GPU of a batch job is idle for an hour on end or more, and that is a tenth of its "
        "time or more (idle: at most 1 % active)",
        _MEASURED + ", in stretches of half an hour or more",
        "split the job: sbatch --dependency=afterok:JOB runs preparation and evaluation without "
        "--gres=gpu; let servers scale down to zero replicas while no requests come",
        yields_to=("never-used", "finished-but-held"),
    )
)
def held_idle(fleet: Fleet) -> Iterator[Hit]:
    """Idle for long stretches."""
    jobs, longest = fleet.jobs, fleet.least("longest_idle_s")
    cost = fleet.total("long_idle_s") / 3600
    much = cost >= 0.1 * jobs.hours
    yield from of_jobs(
        fleet.whole & ~jobs.interactive & (longest >= IDLE_S) & much,
        cost,
        lambda row: (
            f"job {jobs.label(row)}: {many_gpus(jobs.gpus[row])} idle for {lasted(longest[row])} "
            f"on end; {hours(cost[row])} of {hours(jobs.hours[row])} GPU-hours idle",
            f"up to {gib(np.nan_to_num(fleet.most('peak_memory_used'))[row])} of GPU memory held",
        ),
    )


@pattern(
    Pattern(
        "notebook-hoarding",
        "An interactive session keeps GPUs it does not use",
        "idle",
        "a shell or notebook beyond 8 GPU-hours is idle for half of its time or more, in stretches "
        "of half an hour or more",
        _MEASURED + " beyond the allowance of 8",
        "end idle sessions: JupyterHub's idle culler with --timeout=7200, salloc --time=2:00:00; "
        "use a MIG slice (--gres=gpu:1g.10gb:1) to write code, sbatch to run it",
        yields_to=("never-used",),
    )
)
def hoarding(fleet: Fleet) -> Iterator[Hit]:
    """A session that is mostly idle."""
    jobs = fleet.jobs
    idle = fleet.total("long_idle_s") / 3600
    yield from of_jobs(
        fleet.whole & jobs.interactive & (jobs.hours > ALLOWANCE) & (idle >= 0.5 * jobs.hours),
        np.minimum(idle, jobs.hours - ALLOWANCE),
        lambda row: (
            f"session {jobs.label(row)}: idle for {hours(idle[row])} of {hours(jobs.hours[row])} "
            f"GPU-hours, {lasted(fleet.least('longest_idle_s')[row])} on end",
        ),
    )


@pattern(
    Pattern(
        "some-gpus-unused",
        "One busy GPU of many",
        "idle",
        "of a job's GPUs some work (5 % or more of the time) and others never do, half an hour or "
        "more",
        "measured: the GPU-hours of those that never work",
        "ask for as many GPUs as the script uses, or start one process for each",
    )
)
def some_unused(fleet: Fleet) -> Iterator[Hit]:
    """Never used, beside others that are."""
    jobs, uses = fleet.jobs, fleet.uses
    idle = fleet.seen & (uses["peak_activity"] <= QUIET) & (uses["seen_s"] >= 1800)
    works = fleet.seen & (uses["activity"] >= 0.05)
    unused = np.bincount(uses.job[idle], minlength=jobs.number)
    used = np.bincount(uses.job[works], minlength=jobs.number)
    cost = sums_of(np.where(idle, uses.hours, np.nan), uses.job, jobs.number)
    yield from of_jobs(
        (unused > 0) & (used > 0),
        cost,
        lambda row: (
            f"job {jobs.label(row)}: {used[row]} of {many_gpus(jobs.gpus[row])} work, "
            f"{unused[row]} never did in {lasted(jobs.run_s[row])}",
        ),
        lambda row: (
            f"--gres=gpu:{max(1, round(used[row]))} instead of {jobs.gpus[row]:g} in all; or use "
            f"them: torchrun --nproc-per-node={jobs.gpus[row]:g} with DistributedDataParallel"
        ),
    )


@pattern(
    Pattern(
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
def hung(fleet: Fleet) -> Iterator[Hit]:
    """All GPUs spin at the end."""
    jobs, stuck = fleet.jobs, fleet.least("stuck_s")
    yield from of_jobs(
        fleet.whole & (stuck >= 1800),
        fleet.total("stuck_s") / 3600,
        lambda row: (
            f"job {jobs.label(row)}: {many_gpus(jobs.gpus[row])} with utilisation of 100 % but "
            f"neither tensor nor memory activity for the last {lasted(stuck[row])}",
        ),
    )


@pattern(
    Pattern(
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
def stray(fleet: Fleet) -> Iterator[Hit]:
    """Processes that outlived their job; one hit for each node."""
    found = fleet.stray
    for node in np.unique(found.node).tolist():
        own = np.flatnonzero(found.node == node)
        cost = float((found.end_s - found.start_s)[own].sum()) / 3600

        def tell(node: int = node, own: "np.ndarray[tuple[int], np.dtype[np.int64]]" = own) -> (
            tuple[str, ...]
        ):  # fmt: skip
            worst = own[int(np.argmax((found.end_s - found.start_s)[own]))]
            line = (
                f"{fleet.places.names[node]}, GPU {found.gpu[worst]}: "
                f"{gib(found.memory[worst])} held by nobody for "
                f"{lasted(found.end_s[worst] - found.start_s[worst])}"
            )
            return (line, *_left_by(fleet, node, int(found.gpu[worst]), found.start_s[worst]))

        yield Hit(cost, tell, nodes=(fleet.places.names[node],))


def _left_by(fleet: Fleet, node: int, gpu: int, start_s: float) -> tuple[str, ...]:
    """The job that held the GPU last."""
    uses = fleet.uses
    before = (uses.node == node) & (uses.gpu == gpu) & (uses.end_s <= start_s + 900)
    if not before.any():
        return ()
    rows = np.flatnonzero(before)
    job = int(uses.job[rows[int(np.argmax(uses.end_s[rows]))]])
    return (f"the last job there: {fleet.jobs.label(job)} of {fleet.jobs.user.at(job)}",)
