"""False alarms of the statistical patterns: how often they are told of runs without a fault."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from meshwright.observe.findings import find_inefficiencies
from meshwright.observe.findings.job.step_variation import MIN_STEP_TIME_CHANGE
from meshwright.observe.findings.pattern import MIN_GPU_SHARE
from meshwright.observe.statistics.change_points import find_change_point, find_outliers
from validation.findings.clean_jobs import clean_job
from validation.findings.scores import names_of

Floats = npt.NDArray[np.float64]
Noise = Callable[[np.random.Generator, int], Floats]
STEPS = (8, 16, 50, 200)


def _autocorrelated(random: np.random.Generator, steps: int) -> Floats:
    noise = random.normal(0, 0.03, steps)
    for at in range(1, steps):
        noise[at] += 0.5 * noise[at - 1]
    return 1 + noise


NOISES: dict[str, Noise] = {
    "normal, 1 %": lambda random, steps: random.normal(1, 0.01, steps),
    "normal, 5 %": lambda random, steps: random.normal(1, 0.05, steps),
    "log-normal, 5 %": lambda random, steps: np.exp(random.normal(0, 0.05, steps)),
    "log-normal, 20 %": lambda random, steps: np.exp(random.normal(0, 0.20, steps)),
    # Student's t with three degrees of freedom: its variance is finite, its fourth moment is not.
    "heavy tail (t, 3), 2 %": lambda random, steps: 1 + 0.02 * random.standard_t(3, steps),
    "drift of 2 % in all, 1 %": lambda random, steps: (
        np.linspace(1, 1.02, steps) + random.normal(0, 0.01, steps)
    ),
    "autocorrelated (0.5), 3 %": _autocorrelated,
}
"""Step times without a fault, about 1. A drift of 2 % is below what is told of a change."""


class Alarms(NamedTuple):
    """Of series without a fault, the parts that are told to hold something."""

    noise: str
    steps: int
    outliers: float
    changes: float


def step_alarms(runs: int = 1000, numbers: Iterable[int] = STEPS) -> Iterator[Alarms]:
    """How often step times without a fault are told as outliers, and as changed for good.

    As with every finding, what costs below the least share of the time is not told.
    """
    random = np.random.default_rng(7)
    for name, noise in NOISES.items():
        for steps in numbers:
            series = [1e8 * noise(random, steps) for _ in range(runs)]
            far, changed = (sum(map(told, series)) / runs for told in (has_outliers, _has_changed))
            yield Alarms(name, steps, far, changed)


def has_outliers(times: Floats) -> bool:
    """Whether the detector would tell of outliers."""
    excess = (times[find_outliers(times)] - np.median(times)).sum()
    return bool(excess >= MIN_GPU_SHARE * times.sum())


def _has_changed(times: Floats) -> bool:
    """Whether the detector would tell of a change: only a lasting rise counts."""
    found = find_change_point(times)
    if found is None:
        return False
    before, after = np.median(times[: found[0]]), np.median(times[found[0] :])
    cost = (after - before) * (times.size - found[0])
    return bool(
        after >= (1 + MIN_STEP_TIME_CHANGE) * before and cost >= MIN_GPU_SHARE * times.sum()
    )


KERNEL_NOISES: dict[str, Callable[[np.random.Generator], float]] = {
    "normal, 1 %": lambda random: random.normal(1, 0.01),
    "normal, 5 %": lambda random: random.normal(1, 0.05),
    "log-normal, 10 %": lambda random: float(np.exp(random.normal(0, 0.10))),
    "heavy tail (t, 3), 5 %": lambda random: max(0.2, 1 + 0.05 * random.standard_t(3)),
    "normal, 20 %": lambda random: max(0.2, random.normal(1, 0.20)),
}
"""How much longer than usual a kernel takes."""


def job_alarms(seeds: Iterable[int], ranks: int, noise: str) -> Counter[str]:
    """What clean jobs are told to have, and how often."""
    told: Counter[str] = Counter()
    for seed in seeds:
        job = clean_job(ranks=ranks, steps=10, seed=seed, vary=KERNEL_NOISES[noise])
        told.update(names_of(find_inefficiencies(job)))
    return told
