"""`Plan` and `PlanAnswer`: the layouts that answer a question best, with what they cost.

`find_plans` searches in closed form, proves the fastest layout, and then executes the finalists
event by event. Ctrl-C ends the search and leaves the best so far, with how much better another
layout could be.
"""

import msgspec

from meshwright.predict.event_sim.step_simulation import simulate_step
from meshwright.predict.memory.memory_prediction import MemoryPrediction, predict_memory
from meshwright.predict.plan.question.plan_question import PlanQuestion
from meshwright.predict.plan.search.branch_and_bound import PlanCandidate
from meshwright.predict.step.step_prediction import StepPrediction
from meshwright.spec.job_spec import JobSpec
from meshwright.spec.layout import Layout


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """A layout with its predicted cost."""

    job: JobSpec
    """The model on the cluster in this layout."""
    step: StepPrediction
    """Its step in closed form, split by cause."""
    memory: MemoryPrediction
    """What its ranks hold, of the memory that may be used."""
    simulated_s: float | None = None
    """Its step executed event by event; None where it was not."""

    @property
    def layout(self) -> Layout:
        """The layout itself."""
        return self.job.layout


class PlanAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """What a search found."""

    question: PlanQuestion
    plans: tuple[Plan, ...]
    """The fastest layout of each family, the fastest first."""
    is_proved: bool
    """Whether no layout of the space is faster than the first."""
    bound_s: float
    """No layout of the space takes less; the first plan's step where it is proved."""
    expanded_nodes: int
    """Nodes of the search tree looked into."""
    layouts_bounded: int
    """Layouts whose memory and lower bound were worked out one by one."""
    evaluated: int
    """Layouts predicted in full."""
    search_s: float
    """How long the search took."""

    @property
    def best(self) -> Plan:
        """The winner."""
        return self.plans[0]

    @property
    def gap(self) -> float:
        """How much less time any other layout could take, as a share of the winner's."""
        return max(0.0, 1 - self.bound_s / self.best.step.step_s)


def build_plan(question: PlanQuestion, candidate: PlanCandidate, execute: bool) -> Plan:
    """Return a candidate as a plan: with its memory, and executed where that is asked for."""
    run = question.build_run(candidate.layout)
    return Plan(
        job=question.build_job(candidate.layout),
        step=candidate.step,
        memory=predict_memory(run),
        simulated_s=simulate_step(run).step_s if execute else None,
    )
