"""Work that waits for something other than the GPU: data, cores, storage, links, its own start."""

from collections.abc import Iterator

import numpy as np

from meshwright.fleet.patterns.data.fleet_data import FleetData
from meshwright.fleet.patterns.data.group_math import Floats, group_max, group_means
from meshwright.fleet.patterns.evidence_text import format_gpus, format_percent, make_job_detections
from meshwright.fleet.patterns.fleet_pattern import (
    IDLE_PATTERNS,
    FleetDetection,
    FleetPattern,
    register_fleet_pattern,
)
from meshwright.fleet.statistics.robust import robust_z_scores

BUSY_THRESHOLD = 0.9
"""As active as a job is that waits for nothing."""
_WAITED = "estimated: GPU-hours that the same work would save at 90 % activity"


def measure_gpu_wait(fleet: FleetData) -> Floats:
    """GPU-hours that each job's GPUs were not active, of what 90 % would be."""
    active = np.clip(fleet.mean_by_job("activity"), 0, BUSY_THRESHOLD)
    return fleet.jobs.gpu_hours * (1 - active / BUSY_THRESHOLD)


def _alone(fleet: FleetData, name: str) -> Floats:
    """A figure of the nodes of jobs that have all GPUs of them; nan for other jobs."""
    hosts = fleet.host_usage
    whole = hosts.num_gpus >= fleet.node_gpus[hosts.node] - 1e-6
    shared = np.bincount(hosts.job[~whole], minlength=fleet.jobs.num_jobs) > 0
    mean = group_means(hosts[name], hosts.job, fleet.jobs.num_jobs, hosts.num_gpus)
    return np.where(shared, np.nan, mean)


def _any(fleet: FleetData, name: str) -> Floats:
    """A figure of the nodes of jobs, whoever else is there."""
    hosts = fleet.host_usage
    return group_means(hosts[name], hosts.job, fleet.jobs.num_jobs, hosts.num_gpus)


def _half_idle(fleet: FleetData) -> "np.ndarray[tuple[int], np.dtype[np.bool_]]":
    """Jobs that are active, and far from all of the time."""
    active = fleet.mean_by_job("activity")
    return (active > 0.02) & (active <= 0.7) & ~fleet.jobs.interactive & (fleet.jobs.run_s >= 1800)


@register_fleet_pattern(
    FleetPattern(
        "cpu-starved",
        "Too few cores feed the GPUs",
        "input",
        "70 % active or less while the job's own cores are 85 % busy or more (core-seconds of "
        "accounting; those of the node where it has all of it) and do not wait for storage",
        _WAITED,
        "more cores for each GPU (--cpus-per-gpu=16) and as many DataLoader(num_workers=…); or "
        "decode on the GPU (DALI, torchvision.io.decode_jpeg on cuda)",
        explained_by=IDLE_PATTERNS,
    )
)
def find_cpu_bound(fleet: FleetData) -> Iterator[FleetDetection]:
    """Cores saturated, GPUs waiting."""
    jobs = fleet.jobs
    with np.errstate(divide="ignore", invalid="ignore"):
        own = jobs.cpu_s / (jobs.cpus * jobs.run_s)
    busy = np.where(np.isnan(own), _alone(fleet, "cpu_util"), own)
    waits = np.nan_to_num(_any(fleet, "io_wait"))
    active = fleet.mean_by_job("activity")
    yield from make_job_detections(
        _half_idle(fleet) & (busy >= 0.85) & (waits < 0.1),
        measure_gpu_wait(fleet),
        lambda row: (
            f"job {jobs.format_label(row)}: its {jobs.cpus[row]:g} cores are "
            f"{format_percent(busy[row])} busy, its "
            f"GPUs {format_percent(active[row])} active",
            f"{jobs.cpus[row] / max(jobs.gpus[row], 1):.3g} cores for each GPU",
        ),
        lambda row: (
            f"--cpus-per-gpu={_more_cores(jobs.cpus[row] / max(jobs.gpus[row], 1), active[row])} "
            f"with as many DataLoader(num_workers=…), or decode on the GPU (DALI)"
        ),
    )


def _more_cores(cores: float, active: float) -> int:
    """Cores that would keep the GPU at 90 %, if all of its waiting is for them."""
    wanted = cores * BUSY_THRESHOLD / max(active, 0.05)
    return int(max(2, np.ceil(min(wanted, 64))))


@register_fleet_pattern(
    FleetPattern(
        "metadata-storm",
        "Small files: a storm of opens on shared storage",
        "input",
        "1,000 opens, stats and the like a second for each node or more, an outlier among all "
        "jobs (a robust score of 6 in their logarithm), 80 % active or less",
        _WAITED + "; every other user of the file system waits too",
        "pack small files: webdataset tar shards, MosaicML streaming or one HDF5 or Parquet file; "
        "copy the set to local disk first (sbcast, $SLURM_TMPDIR)",
        statistic="peer group: robust score (median and MAD) of the logarithm over all jobs",
        explained_by=IDLE_PATTERNS,
    )
)
def find_metadata_storms(fleet: FleetData) -> Iterator[FleetDetection]:
    """Far more opens than anybody else."""
    jobs, rate = fleet.jobs, _any(fleet, "metadata_ops")
    alone = _alone(fleet, "metadata_ops")
    with np.errstate(divide="ignore", invalid="ignore"):
        level = np.log10(np.maximum(rate, 1.0))
    odd = robust_z_scores(level, np.zeros(jobs.num_jobs, dtype=np.int64), 0.2)
    active = fleet.mean_by_job("activity")
    mine = ~np.isnan(alone) | (odd >= 6) & _lone_suspect(fleet, rate)
    yield from make_job_detections(
        (rate >= 1000) & (odd >= 6) & (active <= 0.8) & (active > 0.02) & mine,
        measure_gpu_wait(fleet),
        lambda row: (
            f"job {jobs.format_label(row)}: {rate[row]:,.0f} metadata operations a second on each "
            f"node, "
            f"GPUs {format_percent(active[row])} active",
        ),
    )


def _lone_suspect(fleet: FleetData, rate: Floats) -> "np.ndarray[tuple[int], np.dtype[np.bool_]]":
    """Jobs on shared nodes whose figures stay high wherever they are: on two nodes or more."""
    nodes = np.bincount(fleet.host_usage.job, minlength=fleet.jobs.num_jobs)
    return (nodes >= 2) & (rate > 0)


@register_fleet_pattern(
    FleetPattern(
        "storage-bound",
        "GPUs wait for shared storage",
        "input",
        "70 % active or less while 10 % or more of the cores of its nodes, which it has to itself, "
        "wait for storage",
        _WAITED,
        "copy the data set to local NVMe at the start (sbcast, $SLURM_TMPDIR), read larger blocks, "
        "stripe large files (lfs setstripe -c 8 -S 4M), prefetch_factor=8",
        explained_by=(*IDLE_PATTERNS, "metadata-storm"),
    )
)
def find_storage_bound(fleet: FleetData) -> Iterator[FleetDetection]:
    """Cores wait for storage, GPUs for cores."""
    jobs, waits = fleet.jobs, _alone(fleet, "io_wait")
    read, active = _alone(fleet, "storage_read"), fleet.mean_by_job("activity")
    yield from make_job_detections(
        _half_idle(fleet) & (waits >= 0.1),
        measure_gpu_wait(fleet),
        lambda row: (
            f"job {jobs.format_label(row)}: {format_percent(waits[row])} of the cores wait for "
            f"storage, GPUs "
            f"{format_percent(active[row])} active",
            f"{np.nan_to_num(read[row]) / 1e6:,.0f} MB/s read by each node",
        ),
    )


@register_fleet_pattern(
    FleetPattern(
        "pcie-bound",
        "Copies from the host hold the GPUs up",
        "input",
        "data comes in over PCIe at a third of what the link can do or more, all of the time, "
        "while tensor activity is 20 % or less",
        "estimated: GPU-hours times the share of the link's speed in use",
        "keep it on the GPU: no CPU offload of optimizer or parameters (zero3 offload none), uint8 "
        'images converted on the GPU, pin_memory=True with .to("cuda", non_blocking=True)',
        min_gpu_hours=2.0,
        explained_by=IDLE_PATTERNS,
    )
)
def find_pcie_bound(fleet: FleetData) -> Iterator[FleetDetection]:
    """A saturated link to the host."""
    jobs, uses = fleet.jobs, fleet.utilization
    link = _links(fleet)
    full = group_means(uses["pcie_rx"] / link, uses.job, jobs.num_jobs, uses.gpu_hours)
    rate, tensor = fleet.mean_by_job("pcie_rx"), np.nan_to_num(fleet.mean_by_job("tensor_active"))
    yield from make_job_detections(
        (full >= 1 / 3) & (tensor <= 0.2) & (fleet.mean_by_job("activity") > 0.1),
        jobs.gpu_hours * np.minimum(full, 1.0),
        lambda row: (
            f"job {jobs.format_label(row)}: {rate[row] / 1e9:.3g} GB/s from the host to each GPU "
            f"all of "
            f"the time, {format_percent(full[row])} of the link; tensor cores "
            f"{format_percent(tensor[row])}",
        ),
    )


def _links(fleet: FleetData) -> Floats:
    """What the PCIe link of each use can do: by the catalog, else the most that was seen."""
    from meshwright.spec import catalog

    known = catalog.list_gpus()
    kinds = fleet.gpu_kinds
    rates = np.full(len(kinds.values), np.nan)
    for at, kind in enumerate(kinds.values):
        own = [gpu for name, gpu in known.items() if _same(kind, name)]
        speeds = [float(gpu.pcie_bytes_per_s) for gpu in own if gpu.pcie_bytes_per_s]
        if speeds:
            rates[at] = min(speeds)
    seen = group_max(fleet.utilization["peak_pcie_rx"], kinds.codes, len(kinds.values))
    rates = np.where(np.isnan(rates), np.fmax(seen, 12e9), rates)
    return rates[kinds.codes] if rates.size else np.zeros(0)


def _same(kind: str, name: str) -> bool:
    """Whether a cluster's word for a GPU is a catalog's: "NVIDIA H100 80GB HBM3" and "h100-sxm"."""
    word = name.partition("-")[0]
    return bool(word) and word in kind.lower().replace("-", " ").split()


@register_fleet_pattern(
    FleetPattern(
        "nvlink-unused",
        "GPUs of one node talk over PCIe though they have NVLink",
        "input",
        "two or more GPUs of a node, no NVLink traffic and over 2 GB/s of PCIe, while other jobs "
        "on the same kind of GPU do use NVLink",
        "estimated: GPU-hours times the share of the link's speed in use",
        "unset NCCL_P2P_DISABLE, NCCL_P2P_LEVEL and NCCL_SHM_DISABLE; give all GPUs of the node to "
        "one container (--gpus all), and check nvidia-smi topo -m for NV# between them",
        explained_by=("pcie-bound", "some-gpus-unused"),
    )
)
def find_unused_nvlink(fleet: FleetData) -> Iterator[FleetDetection]:
    """PCIe busy, NVLink silent."""
    jobs, uses, kinds = fleet.jobs, fleet.utilization, fleet.gpu_kinds
    usual = group_max(np.where(fleet.sampled_uses, uses["nvlink_tx"], np.nan), kinds.codes,
                    len(kinds.values))  # fmt: skip
    has = usual[kinds.codes] >= 1e8 if usual.size else np.zeros(0, dtype=np.bool_)
    able = np.bincount(uses.job[has & fleet.sampled_uses], minlength=jobs.num_jobs) > 0
    silent, rate = fleet.max_by_job("nvlink_tx") <= 1e6, fleet.mean_by_job("pcie_rx")
    nodes = np.bincount(jobs.placement_job, minlength=jobs.num_jobs)
    full = group_means(uses["pcie_rx"] / _links(fleet), uses.job, jobs.num_jobs, uses.gpu_hours)
    yield from make_job_detections(
        fleet.fully_sampled_jobs
        & able
        & silent
        & (rate >= 2e9)
        & (jobs.gpus >= 2 * np.maximum(nodes, 1)),
        jobs.gpu_hours * np.minimum(full, 1.0),
        lambda row: (
            f"job {jobs.format_label(row)}: no traffic on NVLink, {rate[row] / 1e9:.3g} GB/s over "
            f"PCIe "
            f"into each of {format_gpus(jobs.gpus[row])}",
        ),
    )


def _phase(
    name: str, title: str, phase: str, least: float, *, detected: str, remedy: str,
    free: float = 0.0, yields_to: tuple[str, ...] = (),
) -> None:  # fmt: skip
    """A pattern of jobs that tell by themselves what they wait for."""
    known = FleetPattern(
        name,
        title,
        "input",
        detected,
        "measured by the job: GPU-hours in that phase"
        + (f" beyond {free:.0%} of its time" if free else ""),
        remedy,
        explained_by=yields_to,
    )

    @register_fleet_pattern(known)
    def detector(fleet: FleetData) -> Iterator[FleetDetection]:
        jobs = fleet.jobs
        spent = fleet.progress.sum_phase_seconds(phase, jobs.num_jobs)
        told = np.bincount(
            fleet.progress.job[fleet.progress.job >= 0],
            (fleet.progress.end_s - fleet.progress.start_s)[fleet.progress.job >= 0],
            minlength=jobs.num_jobs,
        )
        part = np.divide(spent, told, out=np.zeros(jobs.num_jobs), where=told > 0)
        yield from make_job_detections(
            (part >= least) & (told >= 0.3 * jobs.run_s) & (told >= 1800),
            jobs.gpus * np.maximum(spent - free * told, 0) / 3600,
            lambda row: (
                f"job {jobs.format_label(row)}: {format_percent(part[row])} of its time "
                f"in {phase.replace('_', ' ')} by its own metrics, on "
                f"{format_gpus(jobs.gpus[row])}",
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
