"""Work that a slice of a GPU would do nearly as fast."""

from collections.abc import Iterator
from typing import Final

import numpy as np

from meshwright.observe.fleet.patterns.arrays import Flags, Floats
from meshwright.observe.fleet.patterns.fleet import Fleet
from meshwright.observe.fleet.patterns.registry import IDLE, Hit, Pattern, pattern
from meshwright.observe.fleet.patterns.say import gib, of_jobs, share

SLICES: Final = 7
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


@pattern(
    Pattern(
        "gpu-too-powerful",
        "The GPU is too powerful for the work",
        "activity",
        "a seventh of the SMs and an eighth of the memory and its traffic would do, in 1.5 times "
        "as long or less (20 % active or less, where no counters tell), on GPUs of 40 GiB or more, "
        "with 12 cores or fewer and 32 GiB of host memory or less for each",
        "estimated: its GPU-hours less those of the smallest slice of seven, which is held longer",
        _remedy(10),
        least_hours=4.0,
        yields_to=(*IDLE, "launch-bound"),
    )
)
def too_powerful(fleet: Fleet) -> Iterator[Hit]:
    """Little work, little memory, few cores."""
    jobs, active, sms = fleet.jobs, fleet.of_jobs("activity"), fleet.of_jobs("sm_active")
    memory, total = fleet.most("peak_memory_used"), fleet.most("peak_memory_total")
    longer = _as_long_on_a_slice(fleet)
    fits = np.where(np.isnan(longer), active <= 0.2, longer <= _AS_LONG)
    yield from of_jobs(
        fits & (active > 0.01) & (memory <= total / _MEMORY_PARTS) & (total >= _LARGE)
        & _asks_for_little(fleet) & ~jobs.interactive & (jobs.gpus >= 1) & fleet.whole,
        jobs.hours * (1 - np.where(np.isnan(longer), 1.0, longer) / SLICES),
        lambda row: (
            f"job {jobs.label(row)}: {share(active[row])} active on average"
            + ("" if np.isnan(sms[row]) else f", {share(sms[row])} of the SMs")
            + f", at most {gib(memory[row])} of {gib(total[row])} used",
        ),
        lambda row: _remedy(int(np.ceil(total[row] / _MEMORY_PARTS / 2**30))),
    )  # fmt: skip


def _as_long_on_a_slice(fleet: Fleet) -> Floats:
    """How many times as long each job would take; nan where no counters tell.

    While kernels run, they take longer by as much as they fill more than the slice has.
    """
    active = fleet.of_jobs("activity")
    most = np.fmax(
        SLICES * fleet.of_jobs("sm_active"), _MEMORY_PARTS * fleet.of_jobs("dram_active")
    )
    found: Floats = 1 - active + np.maximum(active, most)
    return found


def _asks_for_little(fleet: Fleet) -> Flags:
    jobs = fleet.jobs
    gpus = np.maximum(jobs.gpus, 1e-9)
    found: Flags = (np.nan_to_num(jobs.cpus) <= 12 * gpus) & (
        np.nan_to_num(jobs.memory_asked) <= 32 * 2**30 * gpus
    )
    return found
