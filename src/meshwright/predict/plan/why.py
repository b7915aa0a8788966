"""Why the winner wins: against the runner-up term by term, and how sure that is.

A prediction's range holds nine of ten published steps, each of another run. Two plans of one
question share what makes such steps differ (the machine, its software, the model), so overlapping
ranges alone do not make their order a coin flip. How often published pairs of layouts came in the
predicted order is said beside them.
"""

import math
from typing import NamedTuple

import msgspec

from meshwright.predict.plan.answer import Answer, Plan
from meshwright.predict.plan.doubts import doubts_of
from meshwright.predict.plan.measured import Order, measured, order_record
from meshwright.predict.relayout import differences
from meshwright.predict.step import StepPrediction
from meshwright.spec.layout import Layout
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
COIN_FLIP = 0.6
"""Share of pairs in the right order below which an order is taken for chance."""
WORTH_NAMING = 0.15
"""Share of the largest difference from which on a term is named in a sentence."""

LONGEST = 8
"""Parts of a list that are written out."""


class Term(NamedTuple):
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


class Overlap(NamedTuple):
    """How far a plan can be told from the winner."""

    share: float
    """Share of the plan's nine-of-ten range that lies within the winner's; 1 for the winner."""
    order_right: float
    """Share of published pairs of layouts, predicted as far apart as these two, that were measured
    in the predicted order; 1 for the winner itself."""
    apart: bool
    """Whether that record is better than chance, or the ranges do not meet at all."""
    said: str
    """The same in words."""


ITSELF = Overlap(1.0, 1.0, True, "the winner")


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """Why the first plan of an answer comes first, and how sure that is."""

    winner: Plan
    """The first plan."""
    runner_up: Plan | None
    """The fastest of the next best family; None where there is only one."""
    terms: tuple[Term, ...]
    """Their differences, the largest first; all of them add up to that of the steps. Empty where
    there is no runner-up."""
    because: str
    """One sentence."""
    note: str
    """Where the event simulation orders the plans otherwise; else empty."""
    overlaps: tuple[Overlap, ...]
    """For every plan of the answer, in its order."""
    doubts: tuple[tuple[str, ...], ...]
    """For every plan of the answer: how it lies outside what has been measured."""


def explain(answer: Answer) -> Explanation:
    """Explain why the first plan of an answer comes first, and how sure that is."""
    winner, *others = answer.plans
    runner_up = others[0] if others else None
    terms = compare(winner.step, runner_up.step) if runner_up else ()
    return Explanation(
        winner=winner,
        runner_up=runner_up,
        terms=terms,
        because=_because(winner, runner_up, terms),
        note=_note(answer.plans),
        overlaps=(ITSELF, *(overlap(winner.step, plan.step) for plan in others)),
        doubts=tuple(doubts_of(plan.work) for plan in answer.plans),
    )


def compare(winner: StepPrediction, other: StepPrediction) -> tuple[Term, ...]:
    """Return the terms of two steps, the largest difference first."""
    terms = [
        Term(name, getattr(winner, f"{name}_s"), getattr(other, f"{name}_s")) for name in TERMS
    ]
    return tuple(sorted(terms, key=lambda term: -abs(term.difference_s)))


def overlap(winner: StepPrediction, other: StepPrediction) -> Overlap:
    """Return how far a step can be told from the winner's, which is no slower."""
    slower = other.step_s / winner.step_s - 1
    low_s, high_s = max(winner.low_s, other.low_s), min(winner.high_s, other.high_s)
    share = max(0.0, high_s - low_s) / (other.high_s - other.low_s)
    record = order_record(slower)
    right = record.right / record.pairs if record.pairs else math.nan
    apart = share == 0 or right >= COIN_FLIP
    ranges = f"{share:.0%} of its range is within the winner's" if share else "ranges do not meet"
    seen = (
        f"of {record.pairs} published pairs predicted {_bin(record)} apart, {right:.0%} were "
        "measured in the predicted order"
    )
    verdict = "" if apart else "; the two cannot be told apart"
    return Overlap(share, right, apart, f"{_percent(slower)} slower: {ranges}; {seen}{verdict}")


def _bin(record: Order) -> str:
    """Say which predicted differences a record is about."""
    edges = [0.0, *(one.up_to for one in measured().order)]
    low, high = edges[edges.index(record.up_to) - 1], record.up_to
    return f"more than {low:.0%}" if high > 1 else f"{low:.0%} to {high:.0%}"


def _percent(share: float) -> str:
    return f"{share:.1%}" if share >= 0.001 or share == 0 else "under 0.1%"


def short(layout: Layout, names: tuple[str, ...]) -> str:
    """Write some fields of a layout in one line."""
    return " ".join(f"{name}={_value(getattr(layout, name))}" for name in names)


def _value(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, tuple):
        words = list(map(str, value))
        if len(words) > LONGEST:
            words = [*words[:2], "…", *words[-2:]]
        return "+".join(words) or "none"
    return "default" if value is None else str(value)


def _because(winner: Plan, other: Plan | None, terms: tuple[Term, ...]) -> str:
    if other is None:
        return "no other family of layouts was kept to compare it with"
    saved_s = other.step.step_s - winner.step.step_s
    names = tuple(differences(other.layout, winner.layout))
    against = f"{short(winner.layout, names)} against {short(other.layout, names)}"
    if saved_s <= 0:
        return f"{against}: both take {format_seconds(winner.step.step_s)}"
    least_s = WORTH_NAMING * abs(terms[0].difference_s)
    less = [term for term in terms if term.difference_s >= max(least_s, 1e-12)]
    more = [term for term in terms if term.difference_s <= -max(least_s, 1e-12)]
    said = f"{_listed(less)} less"
    if more:
        said += f" against {_listed(more)} more"
    share = saved_s / other.step.step_s
    return f"{against} saves {format_seconds(saved_s)} ({_percent(share)}) of a step: {said}"


def _listed(terms: list[Term]) -> str:
    return " and ".join(
        f"{format_seconds(abs(term.difference_s))} of {TERMS[term.name]}" for term in terms
    )


def _note(plans: tuple[Plan, ...]) -> str:
    """Say so where the finalists, executed event by event, come in another order."""
    executed = [(plan.executed_s, at) for at, plan in enumerate(plans, 1) if plan.executed_s]
    first_s = plans[0].executed_s
    if first_s is None or not executed or min(executed)[1] == 1:
        return ""
    best_s, at = min(executed)
    return (
        f"executed event by event, plan {at} is faster than the winner: "
        f"{format_seconds(best_s)} against {format_seconds(first_s)}"
    )
