"""Patterns of steps that differ: outliers, changes, falling speed.

These are statistical. Outliers are told by the median and the median absolute deviation (MAD);
changes by Pettitt's test (Pettitt 1979, Applied Statistics 28), which asks nothing of how step
times are spread. Their false-alarm rates on clean runs are measured in the tests.
"""

import numpy as np

from meshwright.observe.analyze.spans.analysis_extent import find_counted_window
from meshwright.observe.analyze.spans.steps import TrainingStep
from meshwright.observe.findings.job.job_registry import detects_on_rank
from meshwright.observe.findings.job.rank_context import RankContext
from meshwright.observe.findings.pattern import Detection, Pattern
from meshwright.observe.findings.text_format import format_duration
from meshwright.observe.statistics.change_points import Floats, find_change_point, find_outliers
from meshwright.timeline.schema import ABSENT

MIN_STEP_TIME_CHANGE = 0.03
"""A smaller change is not told."""


def measure_step_times(rank: RankContext) -> tuple[tuple[TrainingStep, ...], Floats]:
    """The counted steps, and how long each took.

    On the device, from the end of the step before: a host that runs ahead spends in one step what
    it waits for another. Where a step launched nothing, the host's time of each.
    """
    window = find_counted_window(rank.rank_timeline)
    marks = tuple(s for s in rank.steps.steps if window is None or s.start_ns < window[1])
    if not marks or any(step.device_end_ns == ABSENT for step in marks):
        return marks, np.array([step.duration_ns for step in marks], dtype=np.float64)
    ends = [marks[0].device_start_ns, *(step.device_end_ns for step in marks)]
    # Work on another stream may end behind that of the step after it.
    return marks, np.diff(np.maximum.accumulate(np.array(ends))).astype(np.float64)


@detects_on_rank(
    Pattern(
        name="step-outliers",
        title="Single steps take far longer",
        family="steps",
        rule="of n steps, eight or more, those that take the device longer than the median by "
        "8 (1 + 6 / n) scaled MAD and by 10 %; at most a fifth of the steps",
        cost_basis="measured: what they take longer than the median, over all steps",
        remedy="look at what those steps do that others do not (checkpoint, evaluation, data, "
        "garbage collection): compare them with mw diff",
    )
)
def detect_step_outliers(rank: RankContext) -> Detection | None:
    """Statistical: median and MAD."""
    steps, times = measure_step_times(rank)
    far = find_outliers(times)
    if not far.size:
        return None
    usual = float(np.median(times))
    excess = float((times[far] - usual).sum())
    marks = [steps[at] for at in far.tolist()]
    kernels = {step.num_spans for step in steps}
    evidence = (
        f"steps {', '.join(str(step.number) for step in marks[:8])} take "
        f"{format_duration(float(np.median(times[far])))} instead of {format_duration(usual)} "
        f"(median of {times.size})",
        "all steps launch the same number of kernels"
        if len(kernels) == 1
        else "they launch "
        + ", ".join(str(step.num_spans) for step in marks[:4])
        + f" kernels, the usual step {int(np.median([s.num_spans for s in steps]))}",
    )
    whole = float(times.sum())
    cost = excess / whole * rank.window_ns if whole else 0.0
    return Detection(cost, evidence, tuple((step.start_ns, step.end_ns) for step in marks[:5]))


@detects_on_rank(
    Pattern(
        name="step-time-change",
        title="Steps become slower for good",
        family="steps",
        rule="Pettitt's change-point test on step times, chance below 0.5 % and a rise of 3 % "
        "or more; needs about 16 steps",
        cost_basis="measured: what steps after the change take longer, by medians",
        remedy="nvidia-smi -q -d PERFORMANCE,CLOCK (throttling), other jobs on the host, memory "
        "near its end (PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True); compare a step before "
        "and one after with mw diff",
        rocm_remedy="amd-smi metric --clock --power --temperature (throttling), other jobs on the "
        "host, "
        "memory near its end; compare a step before and one after with mw diff",
    )
)
def detect_step_time_change(rank: RankContext) -> Detection | None:
    """Statistical: Pettitt's test."""
    steps, times = measure_step_times(rank)
    found = find_change_point(times)
    if found is None:
        return None
    place, chance = found
    before, after = float(np.median(times[:place])), float(np.median(times[place:]))
    if after < (1 + MIN_STEP_TIME_CHANGE) * before:
        return None
    step = steps[place]
    evidence = (
        f"from step {step.number} on {format_duration(after)} instead of {format_duration(before)} "
        f"({place} steps before, {times.size - place} after; chance {chance:.1g})",
    )
    cost = (after - before) * (times.size - place) / float(times.sum()) * rank.window_ns
    return Detection(cost, evidence, ((step.start_ns, step.end_ns),))


@detects_on_rank(
    Pattern(
        name="kernels-slow-down",
        title="The same kernels take longer and longer",
        family="steps",
        rule="Pettitt's test on the busy time of steps with the same number of kernels: chance "
        "below 0.5 %, a rise of 3 % or more; needs about 16 steps",
        cost_basis="measured: what the device is busy longer after the change, by medians",
        remedy="the device lowers its clocks: nvidia-smi -q -d PERFORMANCE,CLOCK,POWER; fix them "
        "with nvidia-smi -lgc, raise the power limit (-pl), look at cooling",
        rocm_remedy="the device lowers its clocks: amd-smi metric --clock --power --temperature; "
        "fix them "
        "with rocm-smi --setperfdeterminism, raise the power cap (amd-smi set --power-cap), look "
        "at cooling",
    )
)
def detect_kernel_slowdown(rank: RankContext) -> Detection | None:
    """Statistical: Pettitt's test on busy time."""
    marks = [step for step in measure_step_times(rank)[0] if step.num_spans]
    if not marks:
        return None
    counts = [step.num_spans for step in marks]
    usual = max(set(counts), key=counts.count)
    alike = [step for step in marks if step.num_spans == usual]
    busy = np.array([step.device_busy_ns for step in alike], dtype=np.float64)
    found = find_change_point(busy)
    if found is None:
        return None
    place, chance = found
    before, after = float(np.median(busy[:place])), float(np.median(busy[place:]))
    if after < (1 + MIN_STEP_TIME_CHANGE) * before:
        return None
    evidence = (
        f"steps of {usual} kernels keep the device busy for {format_duration(after)} from step "
        f"{alike[place].number} on, {format_duration(before)} before (chance {chance:.1g})",
    )
    return Detection(
        (after - before) * (busy.size - place),
        evidence,
        ((alike[place].start_ns, alike[place].end_ns),),
    )
