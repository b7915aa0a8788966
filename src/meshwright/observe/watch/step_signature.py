"""What a captured step is made of, in few sums, and whether that differs from the captures before.

With a device, the sums are those `mw diff` compares: kernels, collectives, idleness by cause. On
processors they are the operators of the thread that steps, each without what it calls, and the
time outside all of them.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from meshwright.observe.analyze.spans.call_stacks import NO_SPAN, build_call_stacks, find_enclosing
from meshwright.observe.analyze.spans.intervals import match_values
from meshwright.observe.analyze.spans.steps import find_rank_steps, mask_host_rows
from meshwright.observe.analyze.step_profile import build_step_profile
from meshwright.timeline.timeline import Timeline

OUTSIDE = "outside operators"
MIN_KNOWN_CAPTURES = 4
"""Captures before that say what is usual; until then each is kept."""
MAX_KNOWN_CAPTURES = 16
DEVIATIONS = 5.0
"""Of 1.4826 MAD, which is the standard deviation where times are normal."""
MIN_CHANGE_SHARE = 0.05
"""And at least this part of the step."""


class StepSignature(NamedTuple):
    """A captured step, the mean over its steps and ranks."""

    step_ns: float
    ns_by_name: dict[str, float]
    """What it is made of: ns by name. They need not add up, as some run at once."""
    has_device_work: bool = False
    """Whether that is work of devices."""


class SignatureChange(NamedTuple):
    """One part of a step that changed."""

    name: str
    before_ns: float
    after_ns: float


def build_signature(timelines: Iterable[Timeline]) -> StepSignature:
    """Sum up one capture."""
    found: list[StepSignature] = []
    for timeline in timelines:
        for part in timeline.split_by_rank():
            steps = find_rank_steps(part).steps
            step_ns = float(np.mean([step.duration_ns for step in steps])) if steps else 0.0
            own = build_step_profile([part])
            on_device = bool(own.kernels or own.collectives)
            if on_device:
                idle = {f"idle, {name}": amount for name, amount in own.idle.items()}
                tables = own.kernels | own.collectives | idle
                amounts = {name: amount.ns for name, amount in tables.items()}
            else:
                amounts = _operators(part, max(len(steps), 1))
            found.append(StepSignature(step_ns, amounts, on_device))
    return _mean(found)


def _mean(found: Sequence[StepSignature]) -> StepSignature:
    if not found:
        return StepSignature(0.0, {})
    names = dict.fromkeys(name for one in found for name in one.ns_by_name)
    count = len(found)
    return StepSignature(
        sum(one.step_ns for one in found) / count,
        {name: sum(one.ns_by_name.get(name, 0.0) for one in found) / count for name in names},
        any(one.has_device_work for one in found),
    )


def _operators(part: Timeline, num_steps: int) -> dict[str, float]:
    """Operators of the threads with steps, per step, each less what it calls."""
    names, category = part.string_column("name"), part.string_column("category")
    lane, process = part.string_column("lane"), part.string_column("process")
    thread = process.codes.astype(np.int64) * max(len(lane.values), 1) + lane.codes
    start = part.column("start_ns")
    end = start + part.column("duration_ns")
    marks = mask_host_rows(part) & match_values(
        names, lambda name: name.startswith("ProfilerStep#")
    )
    of_steps = np.isin(thread, np.unique(thread[marks]))
    row = np.flatnonzero(of_steps & match_values(category, lambda value: value == "cpu_op"))
    if not row.size:
        return {}
    tree = build_call_stacks(thread[row], start[row], end[row])
    place = tree.input_index
    levels = find_enclosing(tree, thread[row][place], start[row][place])
    own_ns = (end - start)[row].astype(np.float64)
    for depth in range(1, int(tree.depth.max(initial=0)) + 1):
        inner = tree.depth == depth
        outer = levels[depth - 1][inner] if depth <= len(levels) else np.full(inner.sum(), NO_SPAN)
        known = outer != NO_SPAN
        lengths = (tree.end - tree.start)[inner][known]
        np.subtract.at(own_ns, outer[known], lengths.astype(np.float64))
    codes = names.codes[row]
    sums = np.bincount(codes, weights=own_ns, minlength=len(names.values))
    found = {names.values[one]: float(sums[one]) / num_steps for one in np.unique(codes).tolist()}
    whole_ns = float((end - start)[marks].sum()) / num_steps
    found[OUTSIDE] = max(0.0, whole_ns - sum(found.values()))
    return found


def find_growth(before: StepSignature, after: StepSignature) -> tuple[SignatureChange, ...]:
    """What takes longer, the greatest growth first."""
    rows = [
        SignatureChange(name, before.ns_by_name.get(name, 0.0), after.ns_by_name.get(name, 0.0))
        for name in dict.fromkeys((*before.ns_by_name, *after.ns_by_name))
    ]
    longer = (row for row in rows if row.after_ns > row.before_ns)
    return tuple(sorted(longer, key=lambda row: row.before_ns - row.after_ns))


def find_unusual_change(
    new: StepSignature, known: Sequence[StepSignature]
) -> SignatureChange | None:
    """Return the part that changed most beyond noise; None where none did.

    Noise is how the captures before differ among each other.
    """
    known = known[-MAX_KNOWN_CAPTURES:]
    if len(known) < MIN_KNOWN_CAPTURES:
        return None
    names = dict.fromkeys((*new.ns_by_name, *(name for one in known for name in one.ns_by_name)))
    table = np.array([[one.ns_by_name.get(name, 0.0) for name in names] for one in known])
    middle = np.median(table, axis=0)
    spread = 1.4826 * np.median(np.abs(table - middle), axis=0)
    least = MIN_CHANGE_SHARE * float(np.median([one.step_ns for one in known]))
    now = np.array([new.ns_by_name.get(name, 0.0) for name in names])
    beyond = np.abs(now - middle) - np.maximum(DEVIATIONS * spread, least)
    if not beyond.size or beyond.max() <= 0:
        return None
    at = int(np.argmax(beyond))
    return SignatureChange(list(names)[at], float(middle[at]), float(now[at]))
