"""Work that a slice of a GPU would do nearly as fast."""

from collections.abc import Iterator
from typing import Final

import numpy as np

from meshwright.fleet.patterns.data.fleet_data import FleetData
from meshwright.fleet.patterns.data.group_math import Flags, Floats
from meshwright.fleet.patterns.evidence_text import format_gib, format_percent, make_job_detections
from meshwright.fleet.patterns.fleet_pattern import (
    IDLE_PATTERNS,
    FleetDetection,
    FleetPattern,
    register_fleet_pattern,
)

SLICES_PER_GPU: Final = 7
"""The smallest slice of a GPU has a seventh of its SMs, and an eighth of its memory and traffic."""
_MEMORY_PARTS: Final = 8
_AS_LONG: Final = 1.5
_LARGE: Final = 39 * 2**30


def _remedy(slice_gib: int) -> str:
    mig = f"1g.{slice_gib}gb"
    return (
        f"ask for a slice or a smaller card: --gres=gpu:{mig}:1 (Slurm), nvidia.com/mig-{mig}: 1 "
        "(Kubernetes); or several such jobs on one GPU with MPS"
    )


@register_fleet_pattern(
    FleetPattern(
        "mig-candidate",
        "The GPU is too powerful for the work",
        "activity",
        "a seventh of the SMs and an eighth of the memory and its traffic would do, in 1.5 times "
        "as long or less (20 % active or less, where no counters tell), on GPUs of 40 GiB or more, "
        "with 12 cores or fewer and 32 GiB of host memory or less for each",
        "estimated: its GPU-hours less those of the smallest slice of seven, which is held longer",
        _remedy(10),
        min_gpu_hours=4.0,
        explained_by=(*IDLE_PATTERNS, "low-sm-activity"),
    )
)
def find_mig_candidates(fleet: FleetData) -> Iterator[FleetDetection]:
    """Little work, little memory, few cores."""
    jobs, active, sms = fleet.jobs, fleet.mean_by_job("activity"), fleet.mean_by_job("sm_active")
    memory, total = fleet.max_by_job("peak_memory_used"), fleet.max_by_job("peak_memory_total")
    longer = _as_long_on_a_slice(fleet)
    fits = np.where(np.isnan(longer), active <= 0.2, longer <= _AS_LONG)
    yield from make_job_detections(
        fits & (active > 0.01) & (memory <= total / _MEMORY_PARTS) & (total >= _LARGE)
        & _asks_for_little(fleet) & ~jobs.interactive & (jobs.gpus >= 1) & fleet.fully_sampled_jobs,
        jobs.gpu_hours * (1 - np.where(np.isnan(longer), 1.0, longer) / SLICES_PER_GPU),
        lambda row: (
            f"job {jobs.format_label(row)}: {format_percent(active[row])} active on average"
            + ("" if np.isnan(sms[row]) else f", {format_percent(sms[row])} of the SMs")
            + f", at most {format_gib(memory[row])} of {format_gib(total[row])} used",
        ),
        lambda row: _remedy(int(np.ceil(total[row] / _MEMORY_PARTS / 2**30))),
    )  # fmt: skip


def _as_long_on_a_slice(fleet: FleetData) -> Floats:
    """How many times as long each job would take; nan where no counters tell.

    While kernels run, they take longer by as much as they fill more than the slice has.
    """
    active = fleet.mean_by_job("activity")
    most = np.fmax(
        SLICES_PER_GPU * fleet.mean_by_job("sm_active"),
        _MEMORY_PARTS * fleet.mean_by_job("dram_active"),
    )
    found: Floats = 1 - active + np.maximum(active, most)
    return found


def _asks_for_little(fleet: FleetData) -> Flags:
    jobs = fleet.jobs
    gpus = np.maximum(jobs.gpus, 1e-9)
    found: Flags = (np.nan_to_num(jobs.cpus) <= 12 * gpus) & (
        np.nan_to_num(jobs.memory_requested_bytes) <= 32 * 2**30 * gpus
    )
    return found
