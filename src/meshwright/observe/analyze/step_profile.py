"""What a step of a run costs, by phase, kernel, operator and collective: what `diff` compares.

Everything is per step and the mean over ranks, so runs of different lengths and sizes compare. A
profile holds sums only, so ranks may come one after another.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np

from meshwright.observe.analyze.device_time.breakdown import analyze_rank_breakdown, collective_of
from meshwright.observe.analyze.device_time.idle_time import analyze_rank_idle
from meshwright.observe.analyze.device_time.kernel_names import normalize_kernel_name
from meshwright.observe.analyze.device_time.overlap import analyze_rank_overlap
from meshwright.observe.analyze.spans.analysis_extent import (
    AnalysisExtent,
    count_complete_steps,
    select_counted_spans,
)
from meshwright.observe.analyze.spans.call_stacks import NO_SPAN, build_call_stacks, find_innermost
from meshwright.observe.analyze.spans.device_split import split_by_device
from meshwright.observe.analyze.spans.intervals import (
    COMMUNICATION,
    DeviceSpans,
    Flags,
    Ints,
    match_values,
)
from meshwright.observe.analyze.spans.steps import find_launch_rows, mask_host_rows, number_threads
from meshwright.spec.units import format_bytes
from meshwright.timeline.schema import ABSENT, TimelineSource
from meshwright.timeline.timeline import Timeline

NO_OPERATOR = "(no operator)"
"""Device work whose launch, or the operator around it, the trace does not show."""


class PerStepCost(NamedTuple):
    """What something costs in a step."""

    ns: float
    calls: float = 0.0

    def add(self, other: "PerStepCost", factor: float = 1.0) -> "PerStepCost":
        """Both together, the other one scaled."""
        return PerStepCost(self.ns + factor * other.ns, self.calls + factor * other.calls)


CostsByName = dict[str, PerStepCost]


class StepProfile(NamedTuple):
    """A step of a run, the mean over ranks."""

    label: str
    source: TimelineSource
    ranks: tuple[int, ...]
    num_steps: tuple[int, ...]
    """Steps counted on each rank; 0 where a trace tells none, and then all of it is one step."""
    step_ns: float
    """Time of the device per step: from first start to last end of what is counted."""
    overlap_share: float | None
    """Part of the communication that compute hides; None where there is none."""
    phases: CostsByName
    """Compute, exposed communication, exposed copies, idle: they add up to the step."""
    idle: CostsByName
    """Idle by cause; adds up to that phase."""
    kernels: CostsByName
    """Device time by kernel; kernels that run at once count each."""
    operators: CostsByName
    """Device time by the innermost operator that launched it."""
    collectives: CostsByName
    """Device time by collective, element type and size."""


def build_step_profile(
    timelines: Iterable[Timeline],
    label: str = "",
    extent: AnalysisExtent = AnalysisExtent.COMPLETE_STEPS,
) -> StepProfile:
    """Sum up a run whose ranks come one after another."""
    ranks, steps, source = [], [], TimelineSource.UNKNOWN
    tables: tuple[CostsByName, ...] = ({}, {}, {}, {}, {})
    step_ns = hidden_ns = talking_ns = 0.0
    for timeline in timelines:
        source = timeline.source
        for part in split_by_device(timeline):
            ranks.append(part.ranks[0])
            number = count_complete_steps(part, extent)
            steps.append(number)
            each = 1.0 / max(number, 1)
            found = analyze_rank_breakdown(part, extent)
            step_ns += found.window_ns * each
            over = analyze_rank_overlap(part, extent)
            hidden_ns, talking_ns = hidden_ns + over.hidden_ns, talking_ns + over.communication_ns
            for whole, own in zip(tables, _tables(part, extent), strict=True):
                for name, amount in own.items():
                    whole[name] = whole.get(name, PerStepCost(0.0)).add(amount, each)
    count = max(len(ranks), 1)
    for whole in tables:
        for name, amount in whole.items():
            whole[name] = PerStepCost(amount.ns / count, amount.calls / count)
    return StepProfile(
        label,
        source,
        tuple(ranks),
        tuple(steps),
        step_ns / count,
        hidden_ns / talking_ns if talking_ns else None,
        *tables,
    )


def _tables(part: Timeline, extent: AnalysisExtent) -> tuple[CostsByName, ...]:
    """Phases, idle causes, kernels, operators and collectives of one rank, all steps together."""
    found, idle = analyze_rank_breakdown(part, extent), analyze_rank_idle(part, extent)
    phases = {
        "compute": PerStepCost(found.compute_ns),
        "exposed communication": PerStepCost(found.exposed_communication_ns),
        "exposed copies": PerStepCost(found.exposed_memory_copy_ns),
        "idle": PerStepCost(found.idle_ns),
    }
    causes = {
        "host bound": PerStepCost(idle.host_bound_ns),
        "data wait": PerStepCost(idle.data_wait_ns),
        "synchronization": PerStepCost(idle.synchronization_ns),
        "kernel gap": PerStepCost(idle.kernel_gap_ns),
        "other": PerStepCost(idle.other_ns),
    }
    spans = select_counted_spans(part, extent)
    talks = spans.kind == COMMUNICATION
    kernels = _summed(
        spans, ~talks, spans.name, lambda code: normalize_kernel_name(spans.names[code])
    )
    return phases, causes, kernels, _operators(part, spans), _collectives(part, spans, talks)


def _summed(
    spans: DeviceSpans, own: Flags, code: Ints, name_of: Callable[[int], str]
) -> CostsByName:
    """Time and number of spans by name; several codes may have one name."""
    length = (spans.end - spans.start)[own]
    distinct, place = np.unique(code[own], return_inverse=True)
    total = np.bincount(place.reshape(-1), weights=length, minlength=distinct.size)
    calls = np.bincount(place.reshape(-1), minlength=distinct.size)
    found: CostsByName = {}
    rows = zip(distinct.tolist(), total.tolist(), calls.tolist(), strict=True)
    for one, ns, number in rows:
        name = name_of(one)
        found[name] = found.get(name, PerStepCost(0.0)).add(PerStepCost(ns, number))
    return found


def _operators(part: Timeline, spans: DeviceSpans) -> CostsByName:
    names, category = part.string_column("name"), part.string_column("category")
    start = part.column("start_ns")
    end = start + part.column("duration_ns")
    is_operator = mask_host_rows(part) & match_values(
        category, lambda value: value in {"cpu_op", "Operator"}
    )
    row = np.flatnonzero(is_operator)
    if not row.size:
        return {}
    thread = number_threads(part)
    launch = find_launch_rows(part, spans)
    known = np.flatnonzero(launch != ABSENT)
    code = np.full(spans.row.size, NO_SPAN, dtype=np.int64)
    tree = build_call_stacks(thread[row], start[row], end[row])
    place = find_innermost(tree, thread[launch[known]], start[launch[known]])
    code[known] = np.where(place != NO_SPAN, names.codes[row[place]], NO_SPAN)
    everything = np.ones(spans.row.size, dtype=np.bool_)
    return _summed(
        spans,
        everything,
        code,
        lambda one: normalize_kernel_name(names.values[one]) if one != NO_SPAN else NO_OPERATOR,
    )


def _collectives(part: Timeline, spans: DeviceSpans, talks: Flags) -> CostsByName:
    said, dtype, size = (
        part.string_column("collective"),
        part.string_column("dtype"),
        part.column("bytes"),
    )
    keys = np.stack(
        [said.codes[spans.row], spans.name, dtype.codes[spans.row], size[spans.row]], axis=1
    )
    distinct, place = np.unique(keys, axis=0, return_inverse=True)

    def name_of(one: int) -> str:
        word, kernel, kind, number = distinct[one].tolist()
        text = collective_of(said.values[word] if word >= 0 else spans.names[kernel])
        # A simulation knows other sizes than a trace tells: there the kind alone is compared.
        if part.source == TimelineSource.SIMULATED or number < 0:
            return text
        return f"{text} {format_bytes(number)}" + (f" {dtype.values[kind]}" if kind >= 0 else "")

    return _summed(spans, talks, place.reshape(-1), name_of)
