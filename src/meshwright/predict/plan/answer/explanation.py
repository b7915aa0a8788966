"""Why the winner wins: against the runner-up term by term, and how sure that is.

A prediction's range holds nine of ten published steps, each of another run. Two plans of one
question share what makes such steps differ (the machine, its software, the model), so overlapping
ranges alone do not make their order a coin flip. How often published pairs of layouts came in the
predicted order is said beside them.
"""

import math
from typing import NamedTuple

import msgspec

from meshwright.predict.plan.answer.extrapolation import list_extrapolations
from meshwright.predict.plan.answer.measured_setups import (
    PairOrderRecord,
    get_order_record,
    load_measured_setups,
)
from meshwright.predict.plan.answer.plan_answer import Plan, PlanAnswer
from meshwright.predict.step.step_prediction import StepPrediction
from meshwright.spec.layout import Layout
from meshwright.spec.layout.layout_changes import list_changed_fields
from meshwright.spec.units import format_seconds

TERMS = {
    "compute": "kernels",
    "recompute": "recompute",
    "tp": "tensor-parallel exchange",
    "cp": "context-parallel exchange",
    "ep": "experts' exchange",
    "pp": "pipeline transfers",
    "dp": "gradient and parameter exchange",
    "offload": "transfers to host memory",
    "bubble": "bubble",
    "optimizer": "optimizer",
}
"""The parts of a step, as fields of a `StepPrediction` without `_s`, and in words."""
MIN_CORRECT_ORDER_SHARE = 0.6
"""Share of pairs in the right order below which an order is taken for chance."""
MIN_NAMED_SHARE = 0.15
"""Share of the largest difference from which on a term is named in a sentence."""

MAX_LISTED = 8
"""Parts of a list that are written out."""


class StepTerm(NamedTuple):
    """One part of a step in the winner and in the runner-up."""

    name: str
    """compute, recompute, tp, cp, ep, pp, dp, offload, bubble or optimizer."""
    winner_s: float
    """Seconds of the winner's step."""
    other_s: float
    """Seconds of the runner-up's step."""

    @property
    def difference_s(self) -> float:
        """Seconds that the winner saves; below 0 where it spends more."""
        return self.other_s - self.winner_s


class IntervalOverlap(NamedTuple):
    """How far a plan can be told from the winner."""

    share: float
    """Share of the plan's nine-of-ten range that lies within the winner's; 1 for the winner."""
    correct_order_share: float
    """Share of published pairs of layouts, predicted as far apart as these two, that were measured
    in the predicted order; 1 for the winner itself."""
    is_distinguishable: bool
    """Whether that record is better than chance, or the ranges do not meet at all."""
    description: str
    """The same in words."""


SELF_OVERLAP = IntervalOverlap(1.0, 1.0, True, "the winner")


class PlanExplanation(msgspec.Struct, frozen=True, kw_only=True):
    """Why the first plan of an answer comes first, and how sure that is."""

    winner: Plan
    """The first plan."""
    runner_up: Plan | None
    """The fastest of the next best family; None where there is only one."""
    terms: tuple[StepTerm, ...]
    """Their differences, the largest first; all of them add up to that of the steps. Empty where
    there is no runner-up."""
    summary: str
    """One sentence."""
    note: str
    """Where the event simulation orders the plans otherwise; else empty."""
    overlaps: tuple[IntervalOverlap, ...]
    """For every plan of the answer, in its order."""
    extrapolations: tuple[tuple[str, ...], ...]
    """For every plan of the answer: how it lies outside what has been measured."""


def explain_plan(answer: PlanAnswer) -> PlanExplanation:
    """Explain why the first plan of an answer comes first, and how sure that is."""
    winner, *others = answer.plans
    runner_up = others[0] if others else None
    terms = compare_steps(winner.step, runner_up.step) if runner_up else ()
    return PlanExplanation(
        winner=winner,
        runner_up=runner_up,
        terms=terms,
        summary=_because(winner, runner_up, terms),
        note=_note(answer.plans),
        overlaps=(SELF_OVERLAP, *(compare_intervals(winner.step, plan.step) for plan in others)),
        extrapolations=tuple(list_extrapolations(plan.job) for plan in answer.plans),
    )


def compare_steps(winner: StepPrediction, other: StepPrediction) -> tuple[StepTerm, ...]:
    """Return the terms of two steps, the largest difference first."""
    terms = [
        StepTerm(name, getattr(winner, f"{name}_s"), getattr(other, f"{name}_s")) for name in TERMS
    ]
    return tuple(sorted(terms, key=lambda term: -abs(term.difference_s)))


def compare_intervals(winner: StepPrediction, other: StepPrediction) -> IntervalOverlap:
    """Return how far a step can be told from the winner's, which is no slower."""
    slower = other.step_s / winner.step_s - 1
    low_s, high_s = max(winner.low_s, other.low_s), min(winner.high_s, other.high_s)
    share = max(0.0, high_s - low_s) / (other.high_s - other.low_s)
    record = get_order_record(slower)
    right = record.right / record.pairs if record.pairs else math.nan
    apart = share == 0 or right >= MIN_CORRECT_ORDER_SHARE
    ranges = f"{share:.0%} of its range is within the winner's" if share else "ranges do not meet"
    seen = (
        f"of {record.pairs} published pairs predicted {_bin(record)} apart, {right:.0%} were "
        "measured in the predicted order"
    )
    verdict = "" if apart else "; the two cannot be told apart"
    return IntervalOverlap(
        share, right, apart, f"{_percent(slower)} slower: {ranges}; {seen}{verdict}"
    )


def _bin(record: PairOrderRecord) -> str:
    """Say which predicted differences a record is about."""
    edges = [0.0, *(one.up_to for one in load_measured_setups().order)]
    low, high = edges[edges.index(record.up_to) - 1], record.up_to
    return f"more than {low:.0%}" if high > 1 else f"{low:.0%} to {high:.0%}"


def _percent(share: float) -> str:
    return f"{share:.1%}" if share >= 0.001 or share == 0 else "under 0.1%"


def format_layout_fields(layout: Layout, names: tuple[str, ...]) -> str:
    """Write some fields of a layout in one line."""
    return " ".join(f"{name}={_value(getattr(layout, name))}" for name in names)


def _value(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, tuple):
        words = list(map(str, value))
        if len(words) > MAX_LISTED:
            words = [*words[:2], "…", *words[-2:]]
        return "+".join(words) or "none"
    return "default" if value is None else str(value)


def _because(winner: Plan, other: Plan | None, terms: tuple[StepTerm, ...]) -> str:
    if other is None:
        return "no other family of layouts was kept to compare it with"
    saved_s = other.step.step_s - winner.step.step_s
    names = tuple(list_changed_fields(other.layout, winner.layout))
    against = (
        f"{format_layout_fields(winner.layout, names)} against "
        f"{format_layout_fields(other.layout, names)}"
    )
    if saved_s <= 0:
        return f"{against}: both take {format_seconds(winner.step.step_s)}"
    least_s = MIN_NAMED_SHARE * abs(terms[0].difference_s)
    less = [term for term in terms if term.difference_s >= max(least_s, 1e-12)]
    more = [term for term in terms if term.difference_s <= -max(least_s, 1e-12)]
    said = f"{_listed(less)} less"
    if more:
        said += f" against {_listed(more)} more"
    share = saved_s / other.step.step_s
    return f"{against} saves {format_seconds(saved_s)} ({_percent(share)}) of a step: {said}"


def _listed(terms: list[StepTerm]) -> str:
    return " and ".join(
        f"{format_seconds(abs(term.difference_s))} of {TERMS[term.name]}" for term in terms
    )


def _note(plans: tuple[Plan, ...]) -> str:
    """Say so where the event simulation orders the finalists differently."""
    executed = [(plan.simulated_s, at) for at, plan in enumerate(plans, 1) if plan.simulated_s]
    first_s = plans[0].simulated_s
    if first_s is None or not executed or min(executed)[1] == 1:
        return ""
    best_s, at = min(executed)
    return (
        f"in the event simulation plan {at} is faster than the winner: "
        f"{format_seconds(best_s)} against {format_seconds(first_s)}"
    )
