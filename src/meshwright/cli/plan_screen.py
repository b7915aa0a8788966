"""The screen of one answer: the winner, its rivals, why it wins, what binds it, what is doubtful.

It fits 80 columns. It draws; the search and its explanation come from outside.
"""

import re
from collections.abc import Iterable
from typing import Any, NamedTuple

import msgspec

from meshwright.cli.answer import Answer as Shown
from meshwright.cli.answer import Facts, Table, View, facts, table
from meshwright.cli.bars import STEP_PARTS
from meshwright.cli.plan_question import Request
from meshwright.cli.step_screen import layout_words
from meshwright.errors import InputError
from meshwright.predict.plan import Answer, Plan
from meshwright.predict.plan.binding import Binding
from meshwright.predict.plan.front import needed_bytes
from meshwright.predict.plan.why import Explanation
from meshwright.predict.price import dollars_per_trillion_tokens
from meshwright.spec.layout import Layout
from meshwright.spec.units import format_bytes, format_count, format_seconds
from meshwright.spec.workload import Training

MOST_TERMS = 5
"""Lines for what two plans differ in; the smallest differences are left out."""
MOST_BINDINGS = 4
ROUNDING = 1e-7
"""Share of a step below which two parts of it are the same."""
_GIB = 2.0**30
_PART_NAMES = {part.field.removesuffix("_s"): part.name for part in STEP_PARTS}


class Explained(NamedTuple):
    """An answer with everything that is said about it."""

    answer: Answer
    why: Explanation
    binds: tuple[Binding, ...]
    among: str
    """What space the proof is about, where it is not the whole one."""
    weeks: str
    """What all tokens take, in words; empty where nobody said how many."""
    costs: str
    """Where the constants of the GPUs come from."""


def screen(explained: Explained) -> tuple[View, ...]:
    """Return the views of the screen, top to bottom."""
    views: list[View] = [summary(explained), _plans(explained)]
    if explained.why.runner_up is not None:
        views += [facts({"why": explained.why.because}), _terms(explained.why)]
    if explained.binds:
        views.append(_binds(explained.binds, explained.answer.best))
    if explained.why.doubts and explained.why.doubts[0]:
        said = explained.why.doubts[0]
        views.append(Facts(tuple(("·", one) for one in said), "doubts about the winner"))
    return tuple(views)


def summary(explained: Explained) -> Facts:
    """Return the winner, and whether it is proved."""
    plan = explained.answer.best
    work, step, memory, gpus = plan.work, plan.step, plan.memory, plan.layout.gpus
    workload = work.workload
    assert isinstance(workload, Training)
    worst, hourly = memory.worst, work.cluster.price_per_gpu_hour
    dollars = dollars_per_trillion_tokens(work, step.tokens_per_s)
    least = format_bytes(needed_bytes(memory))
    executed = None
    if plan.executed_s is not None:
        executed = f"{format_seconds(plan.executed_s)}, the schedule run event by event"
    return facts(
        {
            "work": f"{work.model.name} on {gpus:,} × {work.cluster.gpu.title}",
            "layout": layout_words(plan.layout),
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
            "whole run": explained.weeks,
            "costs": explained.costs,
            "search": proof_words(explained.answer, explained.among),
        }
    )


def proof_words(answer: Answer, among: str = "") -> str:
    """Say whether the winner is proved, and what that took."""
    looked = (
        f"{answer.judged:,} layouts judged, {answer.evaluated:,} predicted in full, "
        f"{format_seconds(answer.seconds)}"
    )
    where = f" {among}" if among else ""
    if answer.proved:
        return f"proved: no layout{where} is faster ({looked})"
    if answer.bound_s <= 0:
        return f"ended before anything was proved: this is the best so far ({looked})"
    gap = f"{answer.gap:.1%}" if answer.gap >= _SMALL_GAP else "less than 0.1%"
    return f"not proved: another layout{where} may be {gap} faster ({looked})"


_SMALL_GAP = 0.0005
"""Gaps below are not worth a number."""


def _plans(explained: Explained) -> Table:
    """Return the best of each family, with how far their intervals overlap."""
    rows = []
    best = explained.answer.best.step.step_s
    pairs = zip(explained.answer.plans, explained.why.overlaps, strict=True)
    for number, (plan, overlap) in enumerate(pairs, start=1):
        step = plan.step
        rows.append(
            (
                number,
                format_seconds(step.step_s),
                f"{step.step_s / best - 1:+.1%}" if number > 1 else "",
                _range(step.low_s, step.high_s),
                f"{overlap.share:.0%}{'' if overlap.apart or number == 1 else '~'}",
                f"{plan.memory.worst.total_bytes / _GIB:.1f}",
                brief_words(plan.layout),
            )
        )
    columns = " , step, more, interval, overlap, GiB, layout"
    title = "the best of each family"
    if any(not one.apart for one in explained.why.overlaps[1:]):
        title += " (~ cannot be told apart from the first)"
    return table(columns, rows, title, right="step, more, interval, overlap, GiB", wide="layout")


def _range(low_s: float, high_s: float) -> str:
    """Write an interval with its unit once, where both ends have the same."""
    low, high = format_seconds(low_s), format_seconds(high_s)
    return f"{low.split()[0] if low.split()[1] == high.split()[1] else low}–{high}"


def brief_words(layout: Layout) -> str:
    """Say a layout in half a line: what tells families apart."""
    words = [_axis(layout, axis) for axis in ("tp", "cp", "pp", "dp", "ep")]
    if layout.experts_tp != layout.tp:
        words.append(f"expert tp {layout.experts_tp}")
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


def _terms(why: Explanation) -> Table:
    """Return where winner and runner-up differ."""
    rows = [
        (
            _PART_NAMES.get(term.name, term.name),
            format_seconds(term.winner_s),
            format_seconds(term.other_s),
            f"{'-' if term.difference_s < 0 else ''}{format_seconds(abs(term.difference_s))}",
        )
        for term in why.terms[:MOST_TERMS]
        if abs(term.difference_s) > ROUNDING * why.winner.step.step_s
    ]
    return table("part of the step, first, second, saved", rows, right="first, second, saved")


def _binds(binds: tuple[Binding, ...], plan: Plan) -> Table:
    rows = [
        (
            one.what,
            format_seconds(one.costs_s),
            f"{one.costs_s / plan.step.step_s:.1%}",
            one.evidence,
        )
        for one in binds[:MOST_BINDINGS]
    ]
    columns = "what binds, costs, share, evidence"
    return table(columns, rows, right="costs, share", wide="evidence")


def plan_data(plan: Plan) -> dict[str, Any]:
    """Return a plan for the JSON form."""
    step = plan.step
    return {
        "layout": msgspec.to_builtins(plan.layout),
        "gpus": plan.layout.gpus,
        **{name: getattr(step, name) for name in step.__struct_fields__},
        "executed_s": plan.executed_s,
        "memory_bytes": plan.memory.worst.total_bytes,
        "needed_bytes": needed_bytes(plan.memory),
        "capacity_bytes": plan.memory.capacity_bytes,
        "dollars_per_trillion_tokens": dollars_per_trillion_tokens(plan.work, step.tokens_per_s),
    }


def answer_data(explained: Explained, commands: Iterable[str]) -> dict[str, Any]:
    """Return an answer for the JSON form; `commands` has one line for every plan."""
    answer, why = explained.answer, explained.why
    plans = [
        {
            **plan_data(plan),
            "overlap": overlap._asdict(),
            "doubts": list(doubts),
            "command": command,
        }
        for plan, overlap, doubts, command in zip(
            answer.plans, why.overlaps, why.doubts, commands, strict=True
        )
    ]
    return {
        "plans": plans,
        "proved": answer.proved,
        "among": explained.among or None,
        "bound_s": answer.bound_s,
        "gap": answer.gap,
        "opened": answer.opened,
        "judged": answer.judged,
        "evaluated": answer.evaluated,
        "seconds": answer.seconds,
        "because": why.because,
        "note": why.note or None,
        "terms": [{**term._asdict(), "difference_s": term.difference_s} for term in why.terms],
        "binds": [one._asdict() for one in explained.binds],
    }


def unfit(error: InputError, schema: str) -> Shown:
    """Answer that nothing does what was asked, and what would."""
    told = [problem._replace(fix=_as_flags(problem.fix)) for problem in error.problems]
    problems = [problem._asdict() for problem in told]
    view = table("where, what, try", told, wide="what, try")
    quiet = tuple(problem.what for problem in error.problems)
    return Shown(schema, {"plans": [], "problems": problems}, (view,), quiet, 1)


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


def space_table(request: Request) -> Table:
    """Show what is asked and which layouts may answer, for `--dry-run`."""
    question, space = request.question, request.question.space
    rows: list[tuple[str, str]] = [
        ("model", question.model.name),
        ("cluster", question.cluster.name),
        ("gpus", f"{question.gpus:,}"),
        ("sequence_length", f"{question.workload.sequence_length:,}"),
        ("global_batch", f"{question.workload.global_batch:,}"),
        ("tokens", format_count(question.workload.tokens) if request.names_tokens else "not said"),
        ("max_memory", f"{space.max_memory:.0%}"),
    ]
    for name in Layout.__struct_fields__:
        if name == "global_batch":
            continue
        allowed = space.allowed(name)
        if allowed is None:
            rows.append((name, _OPEN.get(name, "all that are sound")))
        elif len(allowed) > 12:
            rows.append((name, f"{len(allowed)} values"))
        else:
            rows.append((name, " or ".join(_shown(value) for value in allowed)))
    return table("field, may be", rows, wide="may be")


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, tuple):
        return "+".join(map(str, value)) or "nothing"
    return "left out" if value is None else str(value)
