"""Inverse questions: how many GPUs, how many tokens, how large a model.

Each needs several searches, which look among common layouts only (`restrict_to_common_layouts`)
unless they are asked to be `exact`. Counts of GPUs that people use are tried: whole nodes,
doubling, and some between. Calendars and prices include failures, restarts and spare nodes
(`predict.long_run`).
"""

from collections.abc import Iterable

from msgspec.structs import replace

from meshwright.errors import InputError, Problem
from meshwright.predict.long_run.long_run import LongRun, predict_long_run
from meshwright.predict.long_run.reliability import RELIABILITY, Reliability
from meshwright.predict.plan.answer.plan_answer import PlanAnswer
from meshwright.predict.plan.question.plan_question import PlanQuestion
from meshwright.predict.plan.studies.largest_model import find_largest_model
from meshwright.predict.plan.studies.model_scaling import list_family
from meshwright.predict.plan.studies.trials import GoalResult, PlanTrial, PlanTrials
from meshwright.spec.field_checks import FieldChecker
from meshwright.spec.units import format_count, format_seconds
from meshwright.spec.workload import TrainingWorkload, training_flops

__all__ = [
    "GoalResult",
    "PlanTrial",
    "find_cheapest_gpus",
    "find_largest_model",
    "find_max_tokens",
    "find_min_gpus",
    "list_family",
]

NODE_EIGHTHS = (5, 6, 7)
"""Eighths of the nodes that are tried where half of them are too few."""
MAX_NODES = 2**15
"""More nodes than this are not tried where the cluster does not say how many it can have."""


def find_min_gpus(
    question: PlanQuestion,
    deadline_s: float,
    *,
    reliability: Reliability = RELIABILITY,
    exact: bool = False,
) -> GoalResult:
    """Return the fewest GPUs that finish the workload's tokens by a deadline.

    Nodes double or halve, starting where half of the peak would do, until the deadline is met and
    half as many miss it; then some counts between are tried, the smallest first. More GPUs are
    taken to be faster until a doubling is not.

    Raises:
        InputError: where no number of GPUs meets it.
    """
    trials = PlanTrials(question, reliability, exact)
    best = _Deadline(trials, deadline_s).fewest()
    asked = f"the fewest GPUs for {_tokens(question)} tokens in {format_seconds(deadline_s)}"
    return trials.make_result(asked, best, "nodes were doubled, and some counts tried between")


def find_cheapest_gpus(
    question: PlanQuestion,
    deadline_s: float,
    *,
    reliability: Reliability = RELIABILITY,
    exact: bool = False,
) -> GoalResult:
    """Return the number of GPUs that finishes by a deadline for the fewest GPU-hours.

    All GPUs of a cluster have one price, so these are the cheapest. The search starts at the fewest
    that meet the deadline, and from the cheapest tried so far doubles as long as that saves some.

    Raises:
        InputError: where no number of GPUs meets it.
    """
    trials = PlanTrials(question, reliability, exact)
    deadline = _Deadline(trials, deadline_s)
    deadline.fewest()
    best = deadline.cheapest()
    while 2 * best.gpus <= deadline.most_gpus:
        larger = trials.try_gpus(2 * best.gpus)
        if larger.gpu_hours >= best.gpu_hours:
            break
        best = larger
    asked = f"the cheapest GPUs for {_tokens(question)} tokens in {format_seconds(deadline_s)}"
    note = "the fewest GPUs in time and doublings of them were compared by GPU-hours"
    return trials.make_result(asked, best, note)


class _Deadline:
    """Looks for numbers of GPUs that meet a deadline."""

    def __init__(self, trials: PlanTrials, deadline_s: float) -> None:
        bounds = FieldChecker()
        bounds.positive(deadline_s=deadline_s)
        bounds.raise_problems()
        self.trials, self.deadline_s = trials, deadline_s
        cluster = trials.question.cluster
        self.node = cluster.gpus_per_node
        self.most = cluster.max_nodes or MAX_NODES

    @property
    def most_gpus(self) -> int:
        """As many as the cluster can have."""
        return self.most * self.node

    def met(self, trial: PlanTrial) -> bool:
        """Tell whether a trial ends in time."""
        return trial.long_run is not None and trial.long_run.calendar_s <= self.deadline_s

    def meets(self, nodes: int) -> bool:
        """Tell whether so many nodes do."""
        return self.met(self.trials.try_gpus(nodes * self.node))

    def cheapest(self) -> PlanTrial:
        """Return what takes the fewest GPU-hours of all that was tried and ends in time."""
        in_time = filter(self.met, self.trials.tried.values())
        return min(in_time, key=lambda trial: trial.gpu_hours)

    def fewest(self) -> PlanTrial:
        """Return the fewest GPUs that meet the deadline."""
        least = _least_gpus(self.trials.question, self.deadline_s) / self.node
        nodes = 1
        while nodes < 2 * least and 2 * nodes <= self.most:
            nodes *= 2
        nodes, too_few = self._runnable(nodes, least), 0
        while self.meets(nodes) and nodes // 2 >= max(1.0, least):
            if not self.meets(nodes // 2):
                too_few = nodes // 2
                break
            nodes //= 2
        if not self.meets(nodes):
            too_few, nodes = self._doubled(nodes)
        between = (nodes * part // 8 for part in NODE_EIGHTHS if nodes * part % 8 == 0)
        fewer = (count for count in between if count >= least and count > too_few)
        return self.trials.try_gpus(next(filter(self.meets, fewer), nodes) * self.node)

    def _runnable(self, nodes: int, least: float = 1.0) -> int:
        """Halve nodes over which the batch does not divide until it does, but not below `least`."""
        fewer = nodes
        while self._calendar_s(fewer) == float("inf"):
            if fewer // 2 < max(1.0, least):
                return nodes
            fewer //= 2
        return fewer

    def _doubled(self, nodes: int) -> tuple[int, int]:
        """Double nodes that are too few until they are not; return the last two numbers."""
        before_s = self._calendar_s(nodes)
        while nodes < self.most:
            fewer, nodes = nodes, min(2 * nodes, self.most)
            if self.meets(nodes):
                return fewer, nodes
            now_s = self._calendar_s(nodes)
            if now_s >= before_s < float("inf"):
                break  # more do not help, or the batch does not divide over them
            before_s = now_s
        self._fastest(self._runnable(nodes))  # so that there is a best to name
        raise self._missed()

    def _fastest(self, nodes: int) -> None:
        """Halve nodes as long as that is faster: too many only wait for each other."""
        while nodes > 1 and self._calendar_s(nodes // 2) < self._calendar_s(nodes):
            nodes //= 2

    def _calendar_s(self, nodes: int) -> float:
        run = self.trials.try_gpus(nodes * self.node).long_run
        return float("inf") if run is None else run.calendar_s

    def _missed(self) -> InputError:
        question, deadline = self.trials.question, format_seconds(self.deadline_s)
        tried = self.trials.tried.values()
        runs = [
            (trial.long_run.calendar_s, trial.gpus) for trial in tried if trial.long_run is not None
        ]
        if not runs:
            return InputError(self.trials.problems)
        best_s, gpus = min(runs)
        what = (
            f"{_tokens(question)} tokens in {deadline} are out of reach: the fastest found takes "
            f"{format_seconds(best_s)} on {gpus:,} GPUs"
        )
        fix = f"allow {format_seconds(best_s)}, a larger batch, or fewer tokens"
        return InputError([Problem("deadline", what, fix)])


def _least_gpus(question: PlanQuestion, deadline_s: float) -> float:
    """Return how many GPUs would do at the peak, without a pause: no layout needs fewer."""
    training, space, gpu = question.workload, question.space, question.cluster.gpu
    usable = set(space.get_allowed("precision") or ()) & set(gpu.precisions)
    peak = max(map(gpu.peak_flops, usable), default=0.0)
    work = training_flops(question.model, training.sequence_length, training.adapter)
    return work * training.tokens / (peak * deadline_s) if peak else 1.0


def find_max_tokens(
    question: PlanQuestion,
    dollars: float,
    *,
    gpus: Iterable[int] = (),
    deadline_s: float | None = None,
    reliability: Reliability = RELIABILITY,
    exact: bool = False,
) -> GoalResult:
    """Return how many tokens a budget trains on, on the question's GPUs or the best of some counts.

    With a deadline, tokens must be trained on by then as well.

    Raises:
        InputError: where the cluster has no price, nothing fits, or the budget buys no step.
    """
    bounds = FieldChecker()
    bounds.positive(dollars=dollars, deadline_s=deadline_s)
    bounds.raise_problems()
    if not question.cluster.price_per_gpu_hour:
        what = f"{question.cluster.name} has no price"
        raise InputError([Problem("price_per_gpu_hour", what, "add it to the cluster")])
    trials, found = PlanTrials(question, reliability, exact), list[PlanTrial]()
    for count in sorted(set(gpus)) or [question.gpus]:
        trial = trials.try_gpus(count)
        if trial.answer is not None and trial.long_run is not None:
            steps = _steps(trial.answer, dollars, deadline_s, reliability)
            if steps:
                trials.tried[count] = longer = _with_steps(trial, steps, reliability)
                found.append(longer)
    if not found:
        what = f"${dollars:,.0f} pays for no step"
        few = Problem("budget", what, "use fewer GPUs or more money")
        raise InputError(trials.problems or [few])
    best = max(found, key=lambda trial: (trial.tokens, -trial.gpu_hours))
    asked = f"the most tokens for ${dollars:,.0f}"
    if deadline_s is not None:
        asked += f" in {format_seconds(deadline_s)}"
    return trials.make_result(asked, best, "whole steps are counted, spare nodes paid for")


def _steps(
    answer: PlanAnswer, dollars: float, deadline_s: float | None, reliability: Reliability
) -> int:
    """Return the most steps that a budget and a deadline allow; 0 where not even one."""

    def allowed(steps: int) -> bool:
        run = _run(answer, steps, reliability)
        return (run.price or 0.0) <= dollars and run.calendar_s <= (deadline_s or float("inf"))

    # Price and calendar grow with the steps, so the most that are allowed are found by halving.
    low, high = 0, 1
    while allowed(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if allowed(middle) else (low, middle)
    return low


def _run(answer: PlanAnswer, steps: int, reliability: Reliability) -> LongRun:
    best = answer.best
    work = replace(best.job, workload=_training(answer, steps))
    return predict_long_run(work, best.step.step_s, reliability)


def _training(answer: PlanAnswer, steps: int) -> TrainingWorkload:
    training = answer.question.workload
    return replace(training, tokens=steps * training.tokens_per_step)


def _with_steps(trial: PlanTrial, steps: int, reliability: Reliability) -> PlanTrial:
    """Return a trial whose workload has so many steps."""
    answer = trial.answer
    assert answer is not None
    training = _training(answer, steps)
    plans = tuple(replace(p, job=replace(p.job, workload=training)) for p in answer.plans)
    asked = replace(answer.question, workload=training)
    return replace(
        trial,
        tokens=training.tokens,
        answer=replace(answer, question=asked, plans=plans),
        long_run=_run(answer, steps, reliability),
    )


def _tokens(question: PlanQuestion) -> str:
    return format_count(question.workload.tokens)
