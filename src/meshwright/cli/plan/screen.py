"""The screen of one answer: the winner, its rivals, why it wins, what binds it, what is doubtful.

It fits 80 columns. It draws; the search and its explanation come from outside.
"""

import re
from collections.abc import Iterable
from typing import Any, NamedTuple

import msgspec

from meshwright.cli.plan.flags import PlanRequest
from meshwright.cli.render.step_bars import STEP_SEGMENTS
from meshwright.cli.render.step_screen import format_layout
from meshwright.cli.result import (
    CommandResult,
    FieldsView,
    TableView,
    View,
    make_fields,
    make_table,
)
from meshwright.errors import InputError
from meshwright.predict.plan import Plan, PlanAnswer
from meshwright.predict.plan.answer.explanation import PlanExplanation
from meshwright.predict.plan.studies.bottlenecks import PlanBottleneck
from meshwright.predict.plan.studies.pareto_front import min_bytes_needed
from meshwright.predict.price import dollars_per_trillion_tokens
from meshwright.spec.layout import Layout
from meshwright.spec.units import format_bytes, format_count, format_seconds
from meshwright.spec.workload import TrainingWorkload

MAX_TERMS = 5
"""Lines for what two plans differ in; the smallest differences are left out."""
MAX_CONSTRAINTS = 4
ROUNDING_TOLERANCE = 1e-7
"""Share of a step below which two parts of it are the same."""
_GIB = 2.0**30
_PART_NAMES = {part.field.removesuffix("_s"): part.name for part in STEP_SEGMENTS}


class ExplainedPlan(NamedTuple):
    """An answer with everything that is said about it."""

    answer: PlanAnswer
    reasons: PlanExplanation
    constraints: tuple[PlanBottleneck, ...]
    search_scope: str
    """What space the proof is about, where it is not the whole one."""
    long_run: str
    """What all tokens take, in words; empty where nobody said how many."""
    cost_source: str
    """Where the constants of the GPUs come from."""


def render_plan(explained: ExplainedPlan) -> tuple[View, ...]:
    """Return the views of the screen, top to bottom."""
    views: list[View] = [summarize_plan(explained), _plans(explained)]
    if explained.reasons.runner_up is not None:
        views += [make_fields({"why": explained.reasons.summary}), _terms(explained.reasons)]
    if explained.constraints:
        views.append(_binds(explained.constraints, explained.answer.best))
    if explained.reasons.extrapolations and explained.reasons.extrapolations[0]:
        said = explained.reasons.extrapolations[0]
        views.append(FieldsView(tuple(("·", one) for one in said), "doubts about the winner"))
    return tuple(views)


def summarize_plan(explained: ExplainedPlan) -> FieldsView:
    """Return the winner, and whether it is proved."""
    plan = explained.answer.best
    work, step, memory, gpus = plan.job, plan.step, plan.memory, plan.layout.gpus
    workload = work.workload
    assert isinstance(workload, TrainingWorkload)
    worst, hourly = memory.worst_stage, work.cluster.price_per_gpu_hour
    dollars = dollars_per_trillion_tokens(work, step.tokens_per_s)
    least = format_bytes(min_bytes_needed(memory))
    executed = None
    if plan.simulated_s is not None:
        executed = f"event simulation {format_seconds(plan.simulated_s)}"
    return make_fields(
        {
            "work": f"{work.model.name} on {gpus:,} × {work.cluster.gpu.title}",
            "layout": format_layout(plan.layout),
            "step": f"{format_seconds(step.step_s)} for {workload.global_batch:,} × "
            f"{workload.sequence_length:,} tokens",
            "interval": f"{format_seconds(step.low_s)} to {format_seconds(step.high_s)}; "
            "nine of ten published steps lie in theirs",
            "executed": executed,
            "throughput": f"{format_count(step.tokens_per_s)} tokens/s, "
            f"{format_count(step.tokens_per_s / gpus)} per GPU",
            "MFU": f"{step.mfu:.1%} of the {plan.layout.precision} peak",
            "memory": f"{format_bytes(worst.total_bytes)} of "
            f"{format_bytes(memory.capacity_bytes)} on stage {worst.stage}, {least} at the least",
            "price": None
            if dollars is None
            else f"${format_count(dollars)} per trillion tokens at ${hourly:.2f} per GPU and hour",
            "whole run": explained.long_run,
            "costs": explained.cost_source,
            "search": format_proof(explained.answer, explained.search_scope),
        }
    )


def format_proof(answer: PlanAnswer, among: str = "") -> str:
    """Say whether the winner is proved, and what that took."""
    looked = (
        f"{answer.layouts_bounded:,} layouts judged, {answer.evaluated:,} predicted in full, "
        f"{format_seconds(answer.search_s)}"
    )
    where = f" {among}" if among else ""
    if answer.is_proved:
        return f"proved: no layout{where} is faster ({looked})"
    if answer.bound_s <= 0:
        return f"ended before anything was proved: this is the best so far ({looked})"
    gap = f"{answer.gap:.1%}" if answer.gap >= _SMALL_GAP else "less than 0.1%"
    return f"not proved: another layout{where} may be {gap} faster ({looked})"


_SMALL_GAP = 0.0005
"""Gaps below are not worth a number."""


def _plans(explained: ExplainedPlan) -> TableView:
    """Return the best of each family, with how far their intervals overlap."""
    rows = []
    best = explained.answer.best.step.step_s
    pairs = zip(explained.answer.plans, explained.reasons.overlaps, strict=True)
    for number, (plan, overlap) in enumerate(pairs, start=1):
        step = plan.step
        rows.append(
            (
                number,
                format_seconds(step.step_s),
                f"{step.step_s / best - 1:+.1%}" if number > 1 else "",
                _range(step.low_s, step.high_s),
                f"{overlap.share:.0%}{'' if overlap.is_distinguishable or number == 1 else '~'}",
                f"{plan.memory.worst_stage.total_bytes / _GIB:.1f}",
                format_brief_layout(plan.layout),
            )
        )
    columns = " , step, more, interval, overlap, GiB, layout"
    title = "the best of each family"
    if any(not one.is_distinguishable for one in explained.reasons.overlaps[1:]):
        title += " (~ cannot be told apart from the first)"
    return make_table(
        columns, rows, title, right="step, more, interval, overlap, GiB", wide="layout"
    )


def _range(low_s: float, high_s: float) -> str:
    """Write an interval with its unit once, where both ends have the same."""
    low, high = format_seconds(low_s), format_seconds(high_s)
    return f"{low.split()[0] if low.split()[1] == high.split()[1] else low}–{high}"


def format_brief_layout(layout: Layout) -> str:
    """Say a layout in half a line: what tells families apart."""
    words = [_axis(layout, axis) for axis in ("tp", "cp", "pp", "dp", "ep")]
    if layout.effective_expert_tp != layout.tp:
        words.append(f"expert tp {layout.effective_expert_tp}")
    words += [f"ZeRO {layout.zero}"] if layout.zero else []
    words += {"selective": ["sel. rec."], "full": ["full rec."]}.get(layout.recompute, [])
    words += [f"{'+'.join(layout.offload)} on host"] if layout.offload else []
    words += [layout.precision] if layout.precision != "bf16" else []
    return ", ".join([*filter(None, words), f"mb {layout.microbatch}"])


def _axis(layout: Layout, axis: str) -> str:
    """Say one degree, with what belongs to it; nothing where it is one."""
    degree = getattr(layout, axis)
    if degree == 1:
        return ""
    if axis == "pp":
        chunks = f"×{layout.virtual_stages}" if layout.virtual_stages > 1 else ""
        return f"pp {degree} {layout.schedule}{chunks}"
    if axis == "cp":
        return f"cp {degree}" + ("" if layout.cp_kind == "ring" else f" {layout.cp_kind}")
    return f"{axis} {degree}"


def _terms(why: PlanExplanation) -> TableView:
    """Return where winner and runner-up differ."""
    rows = [
        (
            _PART_NAMES.get(term.name, term.name),
            format_seconds(term.winner_s),
            format_seconds(term.other_s),
            f"{'-' if term.difference_s < 0 else ''}{format_seconds(abs(term.difference_s))}",
        )
        for term in why.terms[:MAX_TERMS]
        if abs(term.difference_s) > ROUNDING_TOLERANCE * why.winner.step.step_s
    ]
    return make_table("part of the step, first, second, saved", rows, right="first, second, saved")


def _binds(binds: tuple[PlanBottleneck, ...], plan: Plan) -> TableView:
    rows = [
        (
            one.resource,
            format_seconds(one.cost_s),
            f"{one.cost_s / plan.step.step_s:.1%}",
            one.evidence,
        )
        for one in binds[:MAX_CONSTRAINTS]
    ]
    columns = "what binds, costs, share, evidence"
    return make_table(columns, rows, right="costs, share", wide="evidence")


def plan_to_data(plan: Plan) -> dict[str, Any]:
    """Return a plan for the JSON form."""
    step = plan.step
    return {
        "layout": msgspec.to_builtins(plan.layout),
        "gpus": plan.layout.gpus,
        **{name: getattr(step, name) for name in step.__struct_fields__},
        "executed_s": plan.simulated_s,
        "memory_bytes": plan.memory.worst_stage.total_bytes,
        "needed_bytes": min_bytes_needed(plan.memory),
        "capacity_bytes": plan.memory.capacity_bytes,
        "dollars_per_trillion_tokens": dollars_per_trillion_tokens(plan.job, step.tokens_per_s),
    }


def answer_to_data(explained: ExplainedPlan, commands: Iterable[str]) -> dict[str, Any]:
    """Return an answer for the JSON form; `commands` has one line for every plan."""
    answer, why = explained.answer, explained.reasons
    plans = [
        {
            **plan_to_data(plan),
            "overlap": overlap._asdict(),
            "doubts": list(doubts),
            "command": command,
        }
        for plan, overlap, doubts, command in zip(
            answer.plans, why.overlaps, why.extrapolations, commands, strict=True
        )
    ]
    return {
        "plans": plans,
        "proved": answer.is_proved,
        "among": explained.search_scope or None,
        "bound_s": answer.bound_s,
        "gap": answer.gap,
        "opened": answer.expanded_nodes,
        "judged": answer.layouts_bounded,
        "evaluated": answer.evaluated,
        "seconds": answer.search_s,
        "because": why.summary,
        "note": why.note or None,
        "terms": [{**term._asdict(), "difference_s": term.difference_s} for term in why.terms],
        "binds": [one._asdict() for one in explained.constraints],
    }


def make_infeasible_result(error: InputError, schema: str) -> CommandResult:
    """Answer that nothing does what was asked, and what would."""
    told = [problem._replace(fix=_as_flags(problem.fix)) for problem in error.problems]
    problems = [problem._asdict() for problem in told]
    view = make_table("where, what, try", told, wide="what, try")
    quiet = tuple(problem.what for problem in error.problems)
    return CommandResult(schema, {"plans": [], "problems": problems}, (view,), quiet, 1)


_FLAGS = ("max_memory", "gpus", "global_batch", "sequence_length", "precision")
"""What a question has beside the fields that `--fix` takes."""


def _as_flags(fix: str) -> str:
    """Write the settings that a fix names as they are typed."""

    def typed(found: re.Match[str]) -> str:
        name, value = found.groups()
        return f"--{name.replace('_', '-')} {value}" if name in _FLAGS else f"--fix {name}={value}"

    return re.sub(r"(?<![-\w])([a-z_]+)=(\S+)", typed, fix)


_OPEN = {
    "stage_layers": "even, or balanced by time",
    "recompute_layers": "as few as fit",
    "offload_layers": "as few as fit",
}
"""Fields whose values a search works out itself."""


def render_search_space(request: PlanRequest) -> TableView:
    """Show what is asked and which layouts may answer, for `--dry-run`."""
    question, space = request.question, request.question.space
    rows: list[tuple[str, str]] = [
        ("model", question.model.name),
        ("cluster", question.cluster.name),
        ("gpus", f"{question.gpus:,}"),
        ("sequence_length", f"{question.workload.sequence_length:,}"),
        ("global_batch", f"{question.workload.global_batch:,}"),
        ("tokens", format_count(question.workload.tokens) if request.has_tokens else "not said"),
        ("max_memory", f"{space.max_memory:.0%}"),
    ]
    for name in Layout.__struct_fields__:
        if name == "global_batch":
            continue
        allowed = space.get_allowed(name)
        if allowed is None:
            rows.append((name, _OPEN.get(name, "all that are sound")))
        elif len(allowed) > 12:
            rows.append((name, f"{len(allowed)} values"))
        else:
            rows.append((name, " or ".join(_shown(value) for value in allowed)))
    return make_table("field, may be", rows, wide="may be")


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, tuple):
        return "+".join(map(str, value)) or "nothing"
    return "left out" if value is None else str(value)
