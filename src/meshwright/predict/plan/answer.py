"""`Plan` and `Answer`: the layouts that answer a question best, with what they cost.

`find_plans` searches in closed form, proves the fastest layout, and then executes the finalists
event by event. Ctrl-C ends the search and leaves the best so far, with how much better another
layout could be.
"""

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from meshwright.errors import InputError, Problem
from meshwright.predict.memory import MemoryPrediction, predict_memory
from meshwright.predict.plan.question import FIXED_BY_USER, Question
from meshwright.predict.plan.search import Candidate, Report, Search, narrowed
from meshwright.predict.plan.unfit import nothing_fits
from meshwright.predict.simulate import simulate_step
from meshwright.predict.step import StepPrediction
from meshwright.spec.layout import Layout
from meshwright.spec.work import Work


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """A layout with its predicted cost."""

    work: Work
    """The model on the cluster in this layout."""
    step: StepPrediction
    """Its step in closed form, split by cause."""
    memory: MemoryPrediction
    """What its ranks hold, of the memory that may be used."""
    executed_s: float | None = None
    """Its step executed event by event; None where it was not."""

    @property
    def layout(self) -> Layout:
        """The layout itself."""
        return self.work.layout


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What a search found."""

    question: Question
    plans: tuple[Plan, ...]
    """The fastest layout of each family, the fastest first."""
    proved: bool
    """Whether no layout of the space is faster than the first."""
    bound_s: float
    """No layout of the space takes less; the first plan's step where it is proved."""
    opened: int
    """Nodes of the search tree looked into."""
    judged: int
    """Layouts whose memory and lower bound were worked out one by one."""
    evaluated: int
    """Layouts predicted in full."""
    seconds: float
    """How long the search took."""

    @property
    def best(self) -> Plan:
        """The winner."""
        return self.plans[0]

    @property
    def gap(self) -> float:
        """How much less time any other layout could take, as a share of the winner's."""
        return max(0.0, 1 - self.bound_s / self.best.step.step_s)


def find_plans(
    question: Question,
    *,
    most: int = 5,
    beam: int | None = None,
    report: Report | None = None,
    execute: bool = True,
) -> Answer:
    """Find the fastest layouts of a question, one of each of the `most` fastest families.

    `beam` keeps only so many nodes of each level of the search, for spaces too large to go through:
    the answer is then rarely proved, but says how much better another could be.

    Raises:
        InputError: where no layout fits, saying what is missing and what would help.
    """
    refuse_what_is_not_searched(question)
    start, proved = time.monotonic(), False
    quick = search = Search(narrowed(question), most=most)
    try:
        with without_collector():
            _run(quick, beam, report)
            search = Search(question, most=most, known=quick.best)
            proved = _run(search, beam, report)
    except KeyboardInterrupt:
        if not search.best:
            raise
    if not search.best:
        raise nothing_fits(question)
    plans = tuple(plan_of(question, one, execute) for one in search.best)
    return Answer(
        question=question,
        plans=plans,
        proved=proved,
        # A search among usual layouts bounds nothing but them.
        bound_s=0.0 if search is quick else search.bound_s,
        opened=sum(one.opened for one in {quick, search}),
        judged=sum(one.leaves.tried for one in {quick, search}),
        evaluated=sum(one.evaluated for one in {quick, search}),
        seconds=time.monotonic() - start,
    )


def _run(search: Search, beam: int | None, report: Report | None) -> bool:
    if beam is None:
        return search.run(report=report)
    return search.run_beam(beam, report=report)


def refuse_what_is_not_searched(question: Question) -> None:
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
def without_collector() -> Iterator[None]:
    """Hold back the garbage collector: a search keeps what it makes, and makes millions."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def plan_of(question: Question, candidate: Candidate, execute: bool) -> Plan:
    """Return a candidate as a plan: with its memory, and executed where that is asked for."""
    run = question.run(candidate.layout)
    return Plan(
        work=question.work(candidate.layout),
        step=candidate.step,
        memory=predict_memory(run),
        executed_s=simulate_step(run).step_s if execute else None,
    )
