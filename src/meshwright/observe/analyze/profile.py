"""What a step of a run costs, by phase, kernel, operator and collective: what `diff` compares.

Everything is per step and the mean over ranks, so runs of different lengths and sizes compare. A
profile holds sums only, so ranks may come one after another.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np

from meshwright.observe.analyze.breakdown import breakdown_of, collective_of
from meshwright.observe.analyze.idle import idle_of
from meshwright.observe.analyze.kernel_names import alike
from meshwright.observe.analyze.nest import NONE, innermost, nest
from meshwright.observe.analyze.overlap import overlap_of
from meshwright.observe.analyze.per_device import per_device
from meshwright.observe.analyze.spans import COMMUNICATION, DeviceSpans, Flags, Ints, where
from meshwright.observe.analyze.steps import (
    Extent,
    counted,
    counted_steps,
    launch_rows,
    on_host,
    threads,
)
from meshwright.spec.units import format_bytes
from meshwright.timeline.schema import ABSENT, Source
from meshwright.timeline.timeline import Timeline

NO_OPERATOR = "(no operator)"
"""Device work whose launch, or the operator around it, the trace does not show."""


class Amount(NamedTuple):
    """What something costs in a step."""

    ns: float
    calls: float = 0.0

    def plus(self, other: "Amount", factor: float = 1.0) -> "Amount":
        """Both together, the other one scaled."""
        return Amount(self.ns + factor * other.ns, self.calls + factor * other.calls)


Amounts = dict[str, Amount]


class Profile(NamedTuple):
    """A step of a run, the mean over ranks."""

    label: str
    source: Source
    ranks: tuple[int, ...]
    num_steps: tuple[int, ...]
    """Steps counted on each rank; 0 where a trace tells none, and then all of it is one step."""
    step_ns: float
    """Time of the device per step: from first start to last end of what is counted."""
    overlap: float | None
    """Part of the communication that compute hides; None where there is none."""
    phases: Amounts
    """Compute, exposed communication, exposed copies, idle: they add up to the step."""
    idle: Amounts
    """Idle by cause; adds up to that phase."""
    kernels: Amounts
    """Device time by kernel; kernels that run at once count each."""
    operators: Amounts
    """Device time by the innermost operator that launched it."""
    collectives: Amounts
    """Device time by collective, element type and size."""


def profile(
    timelines: Iterable[Timeline], label: str = "", extent: Extent = Extent.SETTLED
) -> Profile:
    """Sum up a run whose ranks come one after another."""
    ranks, steps, source = [], [], Source.UNKNOWN
    tables: tuple[Amounts, ...] = ({}, {}, {}, {}, {})
    step_ns = hidden_ns = talking_ns = 0.0
    for timeline in timelines:
        source = timeline.source
        for part in per_device(timeline):
            ranks.append(part.ranks[0])
            number = counted_steps(part, extent)
            steps.append(number)
            each = 1.0 / max(number, 1)
            found = breakdown_of(part, extent)
            step_ns += found.window_ns * each
            over = overlap_of(part, extent)
            hidden_ns, talking_ns = hidden_ns + over.hidden_ns, talking_ns + over.communication_ns
            for whole, own in zip(tables, _tables(part, extent), strict=True):
                for name, amount in own.items():
                    whole[name] = whole.get(name, Amount(0.0)).plus(amount, each)
    count = max(len(ranks), 1)
    for whole in tables:
        for name, amount in whole.items():
            whole[name] = Amount(amount.ns / count, amount.calls / count)
    return Profile(
        label,
        source,
        tuple(ranks),
        tuple(steps),
        step_ns / count,
        hidden_ns / talking_ns if talking_ns else None,
        *tables,
    )


def _tables(part: Timeline, extent: Extent) -> tuple[Amounts, ...]:
    """Phases, idle causes, kernels, operators and collectives of one rank, all steps together."""
    found, idle = breakdown_of(part, extent), idle_of(part, extent)
    phases = {
        "compute": Amount(found.compute_ns),
        "exposed communication": Amount(found.exposed_communication_ns),
        "exposed copies": Amount(found.exposed_memory_copy_ns),
        "idle": Amount(found.idle_ns),
    }
    causes = {
        "host bound": Amount(idle.host_bound_ns),
        "data wait": Amount(idle.data_wait_ns),
        "synchronisation": Amount(idle.synchronisation_ns),
        "kernel gap": Amount(idle.kernel_gap_ns),
        "other": Amount(idle.other_ns),
    }
    spans = counted(part, extent)
    talks = spans.kind == COMMUNICATION
    kernels = _summed(spans, ~talks, spans.name, lambda code: alike(spans.names[code]))
    return phases, causes, kernels, _operators(part, spans), _collectives(part, spans, talks)


def _summed(spans: DeviceSpans, own: Flags, code: Ints, name_of: Callable[[int], str]) -> Amounts:
    """Time and number of spans by name; several codes may have one name."""
    length = (spans.end - spans.start)[own]
    distinct, place = np.unique(code[own], return_inverse=True)
    total = np.bincount(place.reshape(-1), weights=length, minlength=distinct.size)
    calls = np.bincount(place.reshape(-1), minlength=distinct.size)
    found: Amounts = {}
    rows = zip(distinct.tolist(), total.tolist(), calls.tolist(), strict=True)
    for one, ns, number in rows:
        name = name_of(one)
        found[name] = found.get(name, Amount(0.0)).plus(Amount(ns, number))
    return found


def _operators(part: Timeline, spans: DeviceSpans) -> Amounts:
    names, category = part.strings("name"), part.strings("category")
    start = part.column("start_ns")
    end = start + part.column("duration_ns")
    is_operator = on_host(part) & where(category, lambda value: value in {"cpu_op", "Operator"})
    row = np.flatnonzero(is_operator)
    if not row.size:
        return {}
    thread = threads(part)
    launch = launch_rows(part, spans)
    known = np.flatnonzero(launch != ABSENT)
    code = np.full(spans.row.size, NONE, dtype=np.int64)
    tree = nest(thread[row], start[row], end[row])
    place = innermost(tree, thread[launch[known]], start[launch[known]])
    code[known] = np.where(place != NONE, names.codes[row[place]], NONE)
    everything = np.ones(spans.row.size, dtype=np.bool_)
    return _summed(
        spans,
        everything,
        code,
        lambda one: alike(names.values[one]) if one != NONE else NO_OPERATOR,
    )


def _collectives(part: Timeline, spans: DeviceSpans, talks: Flags) -> Amounts:
    said, dtype, size = part.strings("collective"), part.strings("dtype"), part.column("bytes")
    keys = np.stack(
        [said.codes[spans.row], spans.name, dtype.codes[spans.row], size[spans.row]], axis=1
    )
    distinct, place = np.unique(keys, axis=0, return_inverse=True)

    def name_of(one: int) -> str:
        word, kernel, kind, number = distinct[one].tolist()
        text = collective_of(said.values[word] if word >= 0 else spans.names[kernel])
        # A simulation knows other sizes than a trace tells: there the kind alone is compared.
        if part.source == Source.SIMULATED or number < 0:
            return text
        return f"{text} {format_bytes(number)}" + (f" {dtype.values[kind]}" if kind >= 0 else "")

    return _summed(spans, talks, place.reshape(-1), name_of)
