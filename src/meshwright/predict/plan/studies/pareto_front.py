"""The Pareto front: plans that no other beats in time, memory, price and GPUs at once.

For every number of GPUs the search runs under ever tighter limits of memory. Where the fastest
plan under one limit keeps to a tighter one as well, it is the fastest there too, and that search is
left out.
"""

import math
from collections.abc import Iterable, Iterator

import msgspec
from msgspec.structs import replace

from meshwright.errors import InputError, Problem
from meshwright.predict.long_run.long_run import predict_long_run
from meshwright.predict.long_run.reliability import Reliability
from meshwright.predict.memory.buffers import MEMORY_CONSTANTS
from meshwright.predict.memory.memory_prediction import MemoryPrediction
from meshwright.predict.plan.answer.plan_answer import Plan, PlanAnswer
from meshwright.predict.plan.question.plan_question import PlanQuestion
from meshwright.predict.plan.studies.sweeps import answer_question, vary_question
from meshwright.spec.workload import TrainingWorkload

MEMORY_SHARES = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5)
"""Shares of the memory that may be used."""
MAX_FAMILIES = 3
"""Families of layouts that each search keeps: some of the slower need less memory."""


MIN_SAVING_SHARE = 0.005
"""Share of memory, price or GPUs that a slower plan must save to be shown beside a faster one."""


class ParetoPoint(msgspec.Struct, frozen=True, kw_only=True):
    """A plan that no other beats in everything."""

    plan: Plan
    """The plan."""
    gpus: int
    """GPUs that it runs on; spare nodes are not among them."""
    time_s: float
    """For the workload's tokens; for one step where they are no more than that."""
    memory_bytes: int
    """What the worst GPU needs at least."""
    price: float | None
    """US dollars for that time; None where the cluster has no price."""

    @property
    def objectives(self) -> tuple[float, ...]:
        """All that should be small; clusters without a price have none to compare."""
        price = 0.0 if self.price is None else self.price
        return self.time_s, self.memory_bytes, price, self.gpus

    def dominates(self, other: "ParetoPoint") -> bool:
        """Tell whether this is no worse in anything than another, and better in something."""
        mine, its = self.objectives, other.objectives
        return mine != its and all(a <= b for a, b in zip(mine, its, strict=True))


def min_bytes_needed(memory: MemoryPrediction) -> int:
    """Return what the worst stage needs at least: the allocator wastes little where it must.

    What a prediction calls its total holds as much waste as there is room for, so it says little
    about how much less would do.
    """
    least = 1 + MEMORY_CONSTANTS.fragmentation_when_full
    return max(
        stage.runtime_bytes + math.ceil(least * stage.allocated_bytes) for stage in memory.stages
    )


def find_pareto_front(
    question: PlanQuestion,
    *,
    gpus: Iterable[int] = (),
    memory: Iterable[float] = MEMORY_SHARES,
    exact: bool = False,
    reliability: Reliability | None = None,
) -> tuple[ParetoPoint, ...]:
    """Return the plans that no other beats in everything, the fastest first.

    `gpus` are the counts to look at, the question's own where none are given; `memory` are shares
    of what the question allows. Of plans that are alike but for half a percent, the fastest stands
    for all. Searches look among usual layouts only unless `exact`. Times and prices include
    failures where a `reliability` is given.

    Raises:
        InputError: where nothing fits on any of the counts.
    """
    shares = sorted(set(memory), reverse=True)
    if not shares or not all(0 < share <= 1 for share in shares):
        what = f"{shares} are no shares of a GPU's memory"
        raise InputError([Problem("memory", what, "use numbers from 0 to 1, like 0.9")])
    points: list[ParetoPoint] = []
    problems: list[Problem] = []
    for count in sorted(set(gpus)) or [question.gpus]:
        try:
            for answer in _answers(vary_question(question, "gpus", count), shares, exact):
                points += (_point(question.workload, plan, reliability) for plan in answer.plans)
        except InputError as error:
            problems += error.problems
    if not points:
        raise InputError(problems)
    kept: list[ParetoPoint] = []
    for point in sorted(points, key=lambda point: point.objectives):
        if any(other.dominates(point) for other in points) or any(
            _alike(other, point) for other in kept
        ):
            continue
        kept.append(point)
    return tuple(kept)


def _alike(fast: ParetoPoint, slow: ParetoPoint) -> bool:
    """Tell whether a slower plan saves next to nothing in anything else."""
    pairs = zip(fast.objectives, slow.objectives, strict=True)
    return all(a <= (1 + MIN_SAVING_SHARE) * b for a, b in pairs)


def _answers(question: PlanQuestion, shares: list[float], exact: bool) -> Iterator[PlanAnswer]:
    """Yield what is found under ever tighter limits of memory; raises where the first fails."""
    space, most_bytes = question.space, question.usable_cluster.gpu.memory_bytes
    answer: PlanAnswer | None = None
    for share in shares:
        if answer is not None and min_bytes_needed(answer.best.memory) <= share * most_bytes:
            continue
        limited = replace(question, space=replace(space, max_memory=share * space.max_memory))
        try:
            answer = answer_question(limited, exact=exact, most=MAX_FAMILIES)
        except InputError:
            if answer is None:
                raise
            return
        yield answer


def _point(training: TrainingWorkload, plan: Plan, reliability: Reliability | None) -> ParetoPoint:
    gpus, hourly = plan.layout.gpus, plan.job.cluster.price_per_gpu_hour
    time_s = training.num_steps * plan.step.step_s
    price = None if hourly is None else gpus * time_s / 3600 * hourly
    if reliability is not None and training.num_steps > 1:
        run = predict_long_run(plan.job, plan.step.step_s, reliability)
        time_s, price = run.calendar_s, run.price
    return ParetoPoint(
        plan=plan, gpus=gpus, time_s=time_s, memory_bytes=min_bytes_needed(plan.memory), price=price
    )
