"""Work that waits for something other than the GPU: data, cores, storage, links, its own start."""

from collections.abc import Iterator

import numpy as np

from meshwright.observe.fleet.measures.robust import robust_scores
from meshwright.observe.fleet.patterns.arrays import Floats, by_group, most_of
from meshwright.observe.fleet.patterns.fleet import Fleet
from meshwright.observe.fleet.patterns.registry import IDLE, Hit, Pattern, pattern
from meshwright.observe.fleet.patterns.say import many_gpus, of_jobs, share

BUSY = 0.9
"""As active as a job is that waits for nothing."""
_WAITED = "estimated: GPU-hours that the same work would save at 90 % activity"


def waited(fleet: Fleet) -> Floats:
    """GPU-hours that each job's GPUs were not active, of what 90 % would be."""
    active = np.clip(fleet.of_jobs("activity"), 0, BUSY)
    return fleet.jobs.hours * (1 - active / BUSY)


def _alone(fleet: Fleet, name: str) -> Floats:
    """A figure of the nodes of jobs that have all GPUs of them; nan for other jobs."""
    hosts = fleet.hosts
    whole = hosts.gpus >= fleet.node_gpus[hosts.node] - 1e-6
    shared = np.bincount(hosts.job[~whole], minlength=fleet.jobs.number) > 0
    mean = by_group(hosts[name], hosts.job, fleet.jobs.number, hosts.gpus)
    return np.where(shared, np.nan, mean)


def _any(fleet: Fleet, name: str) -> Floats:
    """A figure of the nodes of jobs, whoever else is there."""
    hosts = fleet.hosts
    return by_group(hosts[name], hosts.job, fleet.jobs.number, hosts.gpus)


def _half_idle(fleet: Fleet) -> "np.ndarray[tuple[int], np.dtype[np.bool_]]":
    """Jobs that are active, and far from all of the time."""
    active = fleet.of_jobs("activity")
    return (active > 0.02) & (active <= 0.7) & ~fleet.jobs.interactive & (fleet.jobs.run_s >= 1800)


@pattern(
    Pattern(
        "cpu-starved",
        "Too few cores feed the GPUs",
        "input",
        "70 % active or less while the job's own cores are 85 % busy or more (core-seconds of "
        "accounting; those of the node where it has all of it) and do not wait for storage",
        _WAITED,
        "more cores for each GPU (--cpus-per-gpu=16) and as many DataLoader(num_workers=…); or "
        "decode on the GPU (DALI, torchvision.io.decode_jpeg on cuda)",
        yields_to=IDLE,
    )
)
def cpu_starved(fleet: Fleet) -> Iterator[Hit]:
    """Cores saturated, GPUs waiting."""
    jobs = fleet.jobs
    with np.errstate(divide="ignore", invalid="ignore"):
        own = jobs.cpu_s / (jobs.cpus * jobs.run_s)
    busy = np.where(np.isnan(own), _alone(fleet, "cpu_util"), own)
    waits = np.nan_to_num(_any(fleet, "io_wait"))
    active = fleet.of_jobs("activity")
    yield from of_jobs(
        _half_idle(fleet) & (busy >= 0.85) & (waits < 0.1),
        waited(fleet),
        lambda row: (
            f"job {jobs.label(row)}: its {jobs.cpus[row]:g} cores are {share(busy[row])} busy, its "
            f"GPUs {share(active[row])} active",
            f"{jobs.cpus[row] / max(jobs.gpus[row], 1):.3g} cores for each GPU",
        ),
        lambda row: (
            f"--cpus-per-gpu={_more_cores(jobs.cpus[row] / max(jobs.gpus[row], 1), active[row])} "
            f"with as many DataLoader(num_workers=…), or decode on the GPU (DALI)"
        ),
    )


def _more_cores(cores: float, active: float) -> int:
    """Cores that would keep the GPU at 90 %, if all of its waiting is for them."""
    wanted = cores * BUSY / max(active, 0.05)
    return int(max(2, np.ceil(min(wanted, 64))))


@pattern(
    Pattern(
        "metadata-storm",
        "Small files: a storm of opens on shared storage",
        "input",
        "1,000 opens, stats and the like a second for each node or more, an outlier among all "
        "jobs (a robust score of 6 in their logarithm), 80 % active or less",
        _WAITED + "; every other user of the file system waits too",
        "pack small files: webdataset tar shards, MosaicML streaming or one HDF5 or Parquet file; "
        "copy the set to local disk first (sbcast, $SLURM_TMPDIR)",
        statistical="peer group: robust score (median and MAD) of the logarithm over all jobs",
        yields_to=IDLE,
    )
)
def metadata_storm(fleet: Fleet) -> Iterator[Hit]:
    """Far more opens than anybody else."""
    jobs, rate = fleet.jobs, _any(fleet, "metadata")
    alone = _alone(fleet, "metadata")
    with np.errstate(divide="ignore", invalid="ignore"):
        level = np.log10(np.maximum(rate, 1.0))
    odd = robust_scores(level, np.zeros(jobs.number, dtype=np.int64), 0.2)
    active = fleet.of_jobs("activity")
    mine = ~np.isnan(alone) | (odd >= 6) & _lone_suspect(fleet, rate)
    yield from of_jobs(
        (rate >= 1000) & (odd >= 6) & (active <= 0.8) & (active > 0.02) & mine,
        waited(fleet),
        lambda row: (
            f"job {jobs.label(row)}: {rate[row]:,.0f} metadata operations a second on each node, "
            f"GPUs {share(active[row])} active",
        ),
    )


def _lone_suspect(fleet: Fleet, rate: Floats) -> "np.ndarray[tuple[int], np.dtype[np.bool_]]":
    """Jobs on shared nodes whose figures stay high wherever they are: on two nodes or more."""
    nodes = np.bincount(fleet.hosts.job, minlength=fleet.jobs.number)
    return (nodes >= 2) & (rate > 0)


@pattern(
    Pattern(
        "storage-bound",
        "GPUs wait for shared storage",
        "input",
        "70 % active or less while 10 % or more of the cores of its nodes, which it has to itself, "
        "wait for storage",
        _WAITED,
        "copy the data set to local NVMe at the start (sbcast, $SLURM_TMPDIR), read larger blocks, "
        "stripe large files (lfs setstripe -c 8 -S 4M), prefetch_factor=8",
        yields_to=(*IDLE, "metadata-storm"),
    )
)
def storage_bound(fleet: Fleet) -> Iterator[Hit]:
    """Cores wait for storage, GPUs for cores."""
    jobs, waits = fleet.jobs, _alone(fleet, "io_wait")
    read, active = _alone(fleet, "read"), fleet.of_jobs("activity")
    yield from of_jobs(
        _half_idle(fleet) & (waits >= 0.1),
        waited(fleet),
        lambda row: (
            f"job {jobs.label(row)}: {share(waits[row])} of the cores wait for storage, GPUs "
            f"{share(active[row])} active",
            f"{np.nan_to_num(read[row]) / 1e6:,.0f} MB/s read by each node",
        ),
    )


@pattern(
    Pattern(
        "pcie-bound",
        "Copies from the host hold the GPUs up",
        "input",
        "data comes in over PCIe at a third of what the link can do or more, all of the time, "
        "while tensor activity is 20 % or less",
        "estimated: GPU-hours times the share of the link's speed in use",
        "keep it on the GPU: no CPU offload of optimizer or parameters (zero3 offload none), uint8 "
        'images converted on the GPU, pin_memory=True with .to("cuda", non_blocking=True)',
        least_hours=2.0,
        yields_to=IDLE,
    )
)
def pcie_bound(fleet: Fleet) -> Iterator[Hit]:
    """A saturated link to the host."""
    jobs, uses = fleet.jobs, fleet.uses
    link = _links(fleet)
    full = by_group(uses["pcie_rx"] / link, uses.job, jobs.number, uses.hours)
    rate, tensor = fleet.of_jobs("pcie_rx"), np.nan_to_num(fleet.of_jobs("tensor_active"))
    yield from of_jobs(
        (full >= 1 / 3) & (tensor <= 0.2) & (fleet.of_jobs("activity") > 0.1),
        jobs.hours * np.minimum(full, 1.0),
        lambda row: (
            f"job {jobs.label(row)}: {rate[row] / 1e9:.3g} GB/s from the host to each GPU all of "
            f"the time, {share(full[row])} of the link; tensor cores {share(tensor[row])}",
        ),
    )


def _links(fleet: Fleet) -> Floats:
    """What the PCIe link of each use can do: by the catalog, else the most that was seen."""
    from meshwright.spec import catalog

    known = catalog.gpus()
    kinds = fleet.kinds
    rates = np.full(len(kinds.values), np.nan)
    for at, kind in enumerate(kinds.values):
        own = [gpu for name, gpu in known.items() if _same(kind, name)]
        speeds = [float(gpu.pcie_bytes_per_s) for gpu in own if gpu.pcie_bytes_per_s]
        if speeds:
            rates[at] = min(speeds)
    seen = most_of(fleet.uses["peak_pcie_rx"], kinds.codes, len(kinds.values))
    rates = np.where(np.isnan(rates), np.fmax(seen, 12e9), rates)
    return rates[kinds.codes] if rates.size else np.zeros(0)


def _same(kind: str, name: str) -> bool:
    """Whether a cluster's word for a GPU is a catalog's: "NVIDIA H100 80GB HBM3" and "h100-sxm"."""
    word = name.partition("-")[0]
    return bool(word) and word in kind.lower().replace("-", " ").split()


@pattern(
    Pattern(
        "nvlink-unused",
        "GPUs of one node talk over PCIe though they have NVLink",
        "input",
        "two or more GPUs of a node, no NVLink traffic and over 2 GB/s of PCIe, while other jobs "
        "on the same kind of GPU do use NVLink",
        "estimated: GPU-hours times the share of the link's speed in use",
        "unset NCCL_P2P_DISABLE, NCCL_P2P_LEVEL and NCCL_SHM_DISABLE; give all GPUs of the node to "
        "one container (--gpus all), and check nvidia-smi topo -m for NV# between them",
        yields_to=("pcie-bound", "some-gpus-unused"),
    )
)
def nvlink_unused(fleet: Fleet) -> Iterator[Hit]:
    """PCIe busy, NVLink silent."""
    jobs, uses, kinds = fleet.jobs, fleet.uses, fleet.kinds
    usual = most_of(np.where(fleet.seen, uses["nvlink_tx"], np.nan), kinds.codes,
                    len(kinds.values))  # fmt: skip
    has = usual[kinds.codes] >= 1e8 if usual.size else np.zeros(0, dtype=np.bool_)
    able = np.bincount(uses.job[has & fleet.seen], minlength=jobs.number) > 0
    silent, rate = fleet.most("nvlink_tx") <= 1e6, fleet.of_jobs("pcie_rx")
    nodes = np.bincount(jobs.on_job, minlength=jobs.number)
    full = by_group(uses["pcie_rx"] / _links(fleet), uses.job, jobs.number, uses.hours)
    yield from of_jobs(
        fleet.whole & able & silent & (rate >= 2e9) & (jobs.gpus >= 2 * np.maximum(nodes, 1)),
        jobs.hours * np.minimum(full, 1.0),
        lambda row: (
            f"job {jobs.label(row)}: no traffic on NVLink, {rate[row] / 1e9:.3g} GB/s over PCIe "
            f"into each of {many_gpus(jobs.gpus[row])}",
        ),
    )


def _phase(
    name: str, title: str, phase: str, least: float, *, detected: str, remedy: str,
    free: float = 0.0, yields_to: tuple[str, ...] = (),
) -> None:  # fmt: skip
    """A pattern of jobs that tell by themselves what they wait for."""
    known = Pattern(
        name,
        title,
        "input",
        detected,
        "measured by the job: GPU-hours in that phase"
        + (f" beyond {free:.0%} of its time" if free else ""),
        remedy,
        yields_to=yields_to,
    )

    @pattern(known)
    def detector(fleet: Fleet) -> Iterator[Hit]:
        jobs = fleet.jobs
        spent = fleet.progress.seconds(phase, jobs.number)
        told = np.bincount(
            fleet.progress.job[fleet.progress.job >= 0],
            (fleet.progress.end_s - fleet.progress.start_s)[fleet.progress.job >= 0],
            minlength=jobs.number,
        )
        part = np.divide(spent, told, out=np.zeros(jobs.number), where=told > 0)
        yield from of_jobs(
            (part >= least) & (told >= 0.3 * jobs.run_s) & (told >= 1800),
            jobs.gpus * np.maximum(spent - free * told, 0) / 3600,
            lambda row: (
                f"job {jobs.label(row)}: {share(part[row])} of its time "
                f"in {phase.replace('_', ' ')} by its own metrics, on {many_gpus(jobs.gpus[row])}",
            ),
        )


_phase(
    "data-wait",
    "Steps wait for the data loader",
    "data_wait",
    0.1,
    detected="a job's own metrics show 10 % of its time or more in waiting for data, and neither "
    "cores nor storage say why",
    remedy="DataLoader(num_workers=8, prefetch_factor=4, pin_memory=True, persistent_workers=True)",
    yields_to=("cpu-starved", "storage-bound", "metadata-storm"),
)
_phase(
    "exposed-communication",
    "GPUs wait for communication that nothing hides",
    "communication",
    0.25,
    detected="a job's own metrics show 25 % of its time or more in exposed communication",
    remedy="overlap it: --overlap-grad-reduce --overlap-param-gather (Megatron), FSDP2 with "
    "reshard_after_forward=False where memory allows; mw plan finds a layout that sends less",
)
_phase(
    "startup-heavy",
    "Much of the job is its start",
    "startup",
    0.15,
    detected="a job's own metrics show 15 % of its time or more in start-up",
    remedy="fewer and longer jobs; a container image that is on the nodes already, compile caches "
    "kept (TORCHINDUCTOR_CACHE_DIR on shared storage), weights read by one rank and broadcast",
    free=0.02,
)
