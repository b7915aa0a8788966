"""Patterns of steps that differ: outliers, changes, falling speed.

These are statistical. Outliers are told by the median and the median absolute deviation (MAD);
changes by Pettitt's test (Pettitt 1979, Applied Statistics 28), which asks nothing of how step
times are spread. Their false-alarm rates on clean runs are measured in the tests.
"""

import math

import numpy as np
import numpy.typing as npt

from meshwright.observe.analyze.steps import Step, counted_window
from meshwright.observe.findings.rank import Rank
from meshwright.observe.findings.registry import Hit, Pattern, of_rank
from meshwright.observe.findings.say import took
from meshwright.timeline.schema import ABSENT

FEWEST_FOR_OUTLIERS = 8
OUTLIER_DEVIATIONS = 8.0
"""Of 1.4826 MAD, which is the standard deviation where times are normal."""
OUTLIER_FEW = 6.0
"""The MAD of few steps is often small by chance: of n, the limit is wider by this part over n."""
OUTLIER_EXCESS = 0.10
"""And at least this part of the median step."""
OUTLIER_MOST = 0.2
"""Where more steps than this part are longer, they are no outliers but another kind of step."""
CHANGE_CHANCE = 0.005
"""Pettitt's chance that steps without a change look like this."""
CHANGE_LEAST = 0.03
"""A smaller change is not told."""

Floats = npt.NDArray[np.float64]


def outliers(times: Floats) -> npt.NDArray[np.intp]:
    """Places of steps that are far longer than the usual one; none for fewer than eight."""
    if times.size < FEWEST_FOR_OUTLIERS:
        return np.zeros(0, dtype=np.intp)
    usual = float(np.median(times))
    spread = 1.4826 * float(np.median(np.abs(times - usual)))
    spread *= 1 + OUTLIER_FEW / times.size
    limit = usual + max(OUTLIER_DEVIATIONS * spread, OUTLIER_EXCESS * usual)
    far = np.flatnonzero(times > limit)
    return far if far.size <= OUTLIER_MOST * times.size else far[:0]


def change(times: Floats) -> tuple[int, float] | None:
    """Where step times change for good, and how sure: place of the first changed one, chance.

    Pettitt's statistic is the largest imbalance, over all splits, of how often a later step is
    longer than an earlier one; its chance is at most 2 exp(-6 K² / (n³ + n²)). For the first t
    steps the imbalance is t (n + 1) less twice the sum of their ranks, equal times sharing theirs.
    """
    n = times.size
    if n < 2:
        return None
    _, which, count = np.unique(times, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(count) - (count - 1) / 2)[which.reshape(-1)]
    balance = np.arange(1, n) * (n + 1) - 2 * np.cumsum(ranks)[:-1]
    place = int(np.argmax(np.abs(balance)))
    chance = 2 * math.exp(-6 * float(balance[place]) ** 2 / (n**3 + n**2))
    return (place + 1, min(1.0, chance)) if chance < CHANGE_CHANCE else None


def step_times(rank: Rank) -> tuple[tuple[Step, ...], Floats]:
    """The counted steps, and how long each took.

    On the device, from the end of the step before: a host that runs ahead spends in one step what
    it waits for another. Where a step launched nothing, the host's time of each.
    """
    window = counted_window(rank.part)
    marks = tuple(s for s in rank.steps.steps if window is None or s.start_ns < window[1])
    if not marks or any(step.device_end_ns == ABSENT for step in marks):
        return marks, np.array([step.duration_ns for step in marks], dtype=np.float64)
    ends = [marks[0].device_start_ns, *(step.device_end_ns for step in marks)]
    # Work on another stream may end behind that of the step after it.
    return marks, np.diff(np.maximum.accumulate(np.array(ends))).astype(np.float64)


@of_rank(
    Pattern(
        name="step-outliers",
        title="Single steps take far longer",
        family="steps",
        detected="of n steps, eight or more, those that take the device longer than the median by "
        "8 (1 + 6 / n) scaled MAD and by 10 %; at most a fifth of the steps",
        cost="measured: what they take longer than the median, over all steps",
        remedy="look at what those steps do that others do not (checkpoint, evaluation, data, "
        "garbage collection): compare them with mw diff",
    )
)
def step_outliers(rank: Rank) -> Hit | None:
    """Statistical: median and MAD."""
    steps, times = step_times(rank)
    far = outliers(times)
    if not far.size:
        return None
    usual = float(np.median(times))
    excess = float((times[far] - usual).sum())
    marks = [steps[at] for at in far.tolist()]
    kernels = {step.num_spans for step in steps}
    evidence = (
        f"steps {', '.join(str(step.number) for step in marks[:8])} take "
        f"{took(float(np.median(times[far])))} instead of {took(usual)} (median of {times.size})",
        "all steps launch the same number of kernels"
        if len(kernels) == 1
        else "they launch "
        + ", ".join(str(step.num_spans) for step in marks[:4])
        + f" kernels, the usual step {int(np.median([s.num_spans for s in steps]))}",
    )
    whole = float(times.sum())
    cost = excess / whole * rank.window_ns if whole else 0.0
    return Hit(cost, evidence, tuple((step.start_ns, step.end_ns) for step in marks[:5]))


@of_rank(
    Pattern(
        name="step-time-change",
        title="Steps become slower for good",
        family="steps",
        detected="Pettitt's change-point test on step times, chance below 0.5 % and a rise of 3 % "
        "or more; needs about 16 steps",
        cost="measured: what steps after the change take longer, by medians",
        remedy="nvidia-smi -q -d PERFORMANCE,CLOCK (throttling), other jobs on the host, memory "
        "near its end (PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True); compare a step before "
        "and one after with mw diff",
        rocm="amd-smi metric --clock --power --temperature (throttling), other jobs on the host, "
        "memory near its end; compare a step before and one after with mw diff",
    )
)
def step_time_change(rank: Rank) -> Hit | None:
    """Statistical: Pettitt's test."""
    steps, times = step_times(rank)
    found = change(times)
    if found is None:
        return None
    place, chance = found
    before, after = float(np.median(times[:place])), float(np.median(times[place:]))
    if after < (1 + CHANGE_LEAST) * before:
        return None
    step = steps[place]
    evidence = (
        f"from step {step.number} on {took(after)} instead of {took(before)} "
        f"({place} steps before, {times.size - place} after; chance {chance:.1g})",
    )
    cost = (after - before) * (times.size - place) / float(times.sum()) * rank.window_ns
    return Hit(cost, evidence, ((step.start_ns, step.end_ns),))


@of_rank(
    Pattern(
        name="kernels-slow-down",
        title="The same kernels take longer and longer",
        family="steps",
        detected="Pettitt's test on the busy time of steps with the same number of kernels: chance "
        "below 0.5 %, a rise of 3 % or more; needs about 16 steps",
        cost="measured: what the device is busy longer after the change, by medians",
        remedy="the device lowers its clocks: nvidia-smi -q -d PERFORMANCE,CLOCK,POWER; fix them "
        "with nvidia-smi -lgc, raise the power limit (-pl), look at cooling",
        rocm="the device lowers its clocks: amd-smi metric --clock --power --temperature; fix them "
        "with rocm-smi --setperfdeterminism, raise the power cap (amd-smi set --power-cap), look "
        "at cooling",
    )
)
def kernels_slow_down(rank: Rank) -> Hit | None:
    """Statistical: Pettitt's test on busy time."""
    marks = [step for step in step_times(rank)[0] if step.num_spans]
    if not marks:
        return None
    counts = [step.num_spans for step in marks]
    usual = max(set(counts), key=counts.count)
    alike = [step for step in marks if step.num_spans == usual]
    busy = np.array([step.busy_ns for step in alike], dtype=np.float64)
    found = change(busy)
    if found is None:
        return None
    place, chance = found
    before, after = float(np.median(busy[:place])), float(np.median(busy[place:]))
    if after < (1 + CHANGE_LEAST) * before:
        return None
    evidence = (
        f"steps of {usual} kernels keep the device busy for {took(after)} from step "
        f"{alike[place].number} on, {took(before)} before (chance {chance:.1g})",
    )
    return Hit(
        (after - before) * (busy.size - place),
        evidence,
        ((alike[place].start_ns, alike[place].end_ns),),
    )
