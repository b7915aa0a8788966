"""`find_plans`: runs the layout search for a question and returns the fastest plans."""

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager

from meshwright.errors import InputError, Problem
from meshwright.predict.plan.answer.infeasibility import explain_infeasible
from meshwright.predict.plan.answer.plan_answer import PlanAnswer, build_plan
from meshwright.predict.plan.question.layout_space import FIXED_BY_USER
from meshwright.predict.plan.question.plan_question import PlanQuestion
from meshwright.predict.plan.search.branch_and_bound import (
    PlanSearch,
    Report,
    restrict_to_common_layouts,
)


def find_plans(
    question: PlanQuestion,
    *,
    most: int = 5,
    beam: int | None = None,
    report: Report | None = None,
    execute: bool = True,
) -> PlanAnswer:
    """Find the fastest layouts of a question, one of each of the `most` fastest families.

    `beam` keeps only so many nodes of each level of the search, for spaces too large to go through:
    the answer is then rarely proved, but says how much better another could be.

    Raises:
        InputError: where no layout fits, saying what is missing and what would help.
    """
    reject_unsearched_fields(question)
    start, proved = time.monotonic(), False
    quick = search = PlanSearch(restrict_to_common_layouts(question), max_plans=most)
    try:
        with pause_gc():
            _run(quick, beam, report)
            search = PlanSearch(question, max_plans=most, known=quick.best)
            proved = _run(search, beam, report)
    except KeyboardInterrupt:
        if not search.best:
            raise
    if not search.best:
        raise explain_infeasible(question)
    plans = tuple(build_plan(question, one, execute) for one in search.best)
    return PlanAnswer(
        question=question,
        plans=plans,
        is_proved=proved,
        # A search among usual layouts bounds nothing but them.
        bound_s=0.0 if search is quick else search.bound_s,
        expanded_nodes=sum(one.expanded_nodes for one in {quick, search}),
        layouts_bounded=sum(one.layout_nodes.evaluated for one in {quick, search}),
        evaluated=sum(one.evaluated for one in {quick, search}),
        search_s=time.monotonic() - start,
    )


def _run(search: PlanSearch, beam: int | None, report: Report | None) -> bool:
    if beam is None:
        return search.run(report=report)
    return search.run_beam(beam, report=report)


def reject_unsearched_fields(question: PlanQuestion) -> None:
    """Refuse fixed values that no layout of the search has, rather than not to heed them."""
    fixed = question.space.fixed
    problems = [
        Problem(name, "is not searched, as it changes results", "set it in the space's base layout")
        for name in FIXED_BY_USER
        if name in fixed and name != "precision"
    ]
    for name in ("recompute_layers", "offload_layers"):
        if name in fixed:
            what = "is not for fixing: a search takes the fewest layers that fit"
            problems.append(Problem(name, what, "leave it out"))
    if problems:
        raise InputError(problems)


@contextmanager
def pause_gc() -> Iterator[None]:
    """Hold back the garbage collector: a search keeps what it makes, and makes millions."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()
