"""Curves: one question at many values, and how a plan's figures hang on what was asked.

A curve needs many searches, so it looks among usual layouts only (`restrict_to_common_layouts`)
unless it is asked to be `exact`. All points of a curve are searched alike, so that its shape is no
artefact.
"""

from collections.abc import Callable, Iterable

import msgspec
from msgspec.structs import replace

from meshwright.errors import InputError, Problem
from meshwright.predict.long_run.long_run import predict_long_run
from meshwright.predict.long_run.reliability import RELIABILITY, Reliability
from meshwright.predict.plan.answer.plan_answer import PlanAnswer
from meshwright.predict.plan.planner import find_plans
from meshwright.predict.plan.question.plan_question import PlanQuestion
from meshwright.predict.plan.search.branch_and_bound import Report, restrict_to_common_layouts
from meshwright.predict.price import TRILLION, dollars_per_trillion_tokens
from meshwright.spec.name_suggestions import build_unknown_name_problem
from meshwright.spec.units import parse_count

FACTORS = (0.25, 0.5, 1, 2, 4)
"""How far batch, length and GPUs are varied."""
FAILURE_RATES = (0.0, 0.5, 1.0, 2.0, 5.0, 10.0)
"""How far the failure rate is."""


class SweepPoint(msgspec.Struct, frozen=True, kw_only=True):
    """One value of what is swept, with its answer or the reason why there is none."""

    value: float | int | str
    """The value."""
    answer: PlanAnswer | None = None
    """What was found; its question is the narrowed one unless the point is exact."""
    problems: tuple[Problem, ...] = ()
    """Why there is no answer."""
    exact: bool = False
    """Whether the whole space was searched, not only usual layouts."""

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens of the whole job per second."""
        return self.answer.best.step.tokens_per_s if self.answer else None

    @property
    def mfu(self) -> float | None:
        """Useful FLOPs over the peak."""
        return self.answer.best.step.mfu if self.answer else None

    @property
    def dollars_per_trillion_tokens(self) -> float | None:
        """For a trillion tokens if nothing breaks; None where the cluster has no price."""
        if self.answer is None:
            return None
        best = self.answer.best
        return dollars_per_trillion_tokens(best.job, best.step.tokens_per_s)


class SweepRate(msgspec.Struct, frozen=True, kw_only=True):
    """What a run gets at one value of what is varied."""

    value: float | int
    """The value."""
    tokens_per_s: float | None = None
    """Tokens of the whole job per second."""
    mfu: float | None = None
    """Useful FLOPs over the peak."""
    dollars_per_trillion_tokens: float | None = None
    """For a trillion tokens; None where the cluster has no price."""
    goodput: float | None = None
    """Share of the time in which steps are made that count, where failures are looked at; then the
    other figures include it."""
    spares: int | None = None
    """Spare nodes then, chosen anew for the fewest GPU-hours: goodput rises where one is added, at
    a price."""
    problems: tuple[Problem, ...] = ()
    """Why there are no figures."""


class PlanSensitivity(msgspec.Struct, frozen=True, kw_only=True):
    """How the figures of a plan hang on what was asked; each value has its own best layout."""

    batch: tuple[SweepRate, ...]
    """Over sequences per step."""
    length: tuple[SweepRate, ...]
    """Over the sequence length, tokens per step kept."""
    gpus: tuple[SweepRate, ...]
    """Over the number of GPUs, tokens per step kept."""
    failures: tuple[SweepRate, ...]
    """Over failures per GPU and hour, for the winner itself."""
    exact: bool
    """Whether whole spaces were searched, not only usual layouts."""


def parse_range(text: str, where: str = "--sweep") -> tuple[int, ...]:
    """Read `256..16384`, which doubles, or `256,512,1024`, or both: `256..1024,1536`.

    The end of a range is in it, whether doubling meets it or not. Values come back rising, once.
    """
    problems: list[Problem] = []
    values: set[int] = set()
    for part in (part.strip() for part in text.split(",")):
        try:
            values.update(_values(part, where))
        except InputError as error:
            problems += error.problems
    if problems:
        raise InputError(problems)
    return tuple(sorted(values))


def _values(part: str, where: str) -> list[int]:
    fix = "write it like 256..16384 or 256,512,1024"
    if not part:
        raise InputError([Problem(where, "a value is missing", fix)])
    first, dots, last = part.partition("..")
    if not dots:
        last = first
    ends = [parse_count(end, where) for end in (first.strip(), last.strip())]
    low, high = ends
    if low < 1:
        raise InputError([Problem(where, f"{part!r} begins below 1", fix)])
    if high < low:
        what = f"{part!r} ends before it begins"
        raise InputError([Problem(where, what, f"write {high}..{low}")])
    found = [low]
    while 2 * found[-1] <= high:
        found.append(2 * found[-1])
    return [*found, high]


def vary_question(question: PlanQuestion, thing: str, value: int) -> PlanQuestion:
    """Return the question with another number of `gpus`, `batch` or `length`, the rest kept."""
    if thing not in _THINGS:
        raise InputError([build_unknown_name_problem("thing to sweep", thing, _THINGS, "--sweep")])
    return _THINGS[thing](question, value)


def _with_gpus(question: PlanQuestion, gpus: int) -> PlanQuestion:
    cluster = question.cluster.with_gpus(gpus)
    if cluster.gpus != gpus:
        node = cluster.gpus_per_node
        what = f"{gpus:,} GPUs are no whole nodes of {node}"
        raise InputError([Problem("gpus", what, f"use {cluster.gpus:,}")])
    return replace(question, cluster=cluster)


def _with_batch(question: PlanQuestion, batch: int) -> PlanQuestion:
    return replace(question, workload=replace(question.workload, global_batch=batch))


def _with_length(question: PlanQuestion, length: int) -> PlanQuestion:
    return replace(question, workload=replace(question.workload, sequence_length=length))


_THINGS: dict[str, Callable[[PlanQuestion, int], PlanQuestion]] = {
    "gpus": _with_gpus,
    "batch": _with_batch,
    "length": _with_length,
}


def answer_question(
    question: PlanQuestion, *, exact: bool = False, most: int = 1, report: Report | None = None
) -> PlanAnswer:
    """Answer a question, among usual layouts only unless `exact`.

    Raises:
        InputError: where nothing fits, saying so if only usual layouts were tried.
    """
    if exact:
        return find_plans(question, most=most, report=report, execute=False)
    try:
        return find_plans(
            restrict_to_common_layouts(question), most=most, report=report, execute=False
        )
    except InputError as error:
        tried = "or search exactly: only usual layouts were tried"
        raise InputError(p._replace(fix=f"{p.fix}, {tried}") for p in error.problems) from None


def run_sweep(
    questions: Iterable[tuple[float | int | str, PlanQuestion]],
    *,
    exact: bool = False,
    most: int = 1,
    report: Report | None = None,
) -> tuple[SweepPoint, ...]:
    """Answer every question, among usual layouts only unless `exact`.

    Where no layout fits, the point says why. A search that is broken off (Ctrl-C) ends the sweep:
    its answer, not proved, is the last.
    """
    found = []
    for value, question in questions:
        point = _point(value, question, exact=exact, most=most, report=report)
        found.append(point)
        if point.answer is not None and not point.answer.is_proved:
            break
    return tuple(found)


def _point(
    value: float | int | str,
    question: PlanQuestion,
    *,
    exact: bool,
    most: int,
    report: Report | None,
) -> SweepPoint:
    try:
        answer = answer_question(question, exact=exact, most=most, report=report)
    except InputError as error:
        return SweepPoint(value=value, problems=tuple(error.problems), exact=exact)
    return SweepPoint(value=value, answer=answer, exact=exact)


def analyze_sensitivity(
    answer: PlanAnswer,
    *,
    exact: bool = False,
    reliability: Reliability = RELIABILITY,
    report: Report | None = None,
) -> PlanSensitivity:
    """Vary batch, length and GPUs around what was asked, and failures around the winner.

    Every value of the first three is a search of its own, among usual layouts only unless `exact`.
    Values that make no sense (half a node, half a sequence) are left out.
    """
    asked = answer.question
    training, node = asked.workload, asked.cluster.gpus_per_node

    def rates(values: Iterable[tuple[int, PlanQuestion]]) -> tuple[SweepRate, ...]:
        return tuple(map(_rate, run_sweep(values, exact=exact, report=report)))

    limit = asked.cluster.max_nodes
    counts = [n for n in _around(asked.gpus, node) if limit is None or n <= limit * node]
    return PlanSensitivity(
        batch=rates((n, vary_question(asked, "batch", n)) for n in _around(training.global_batch)),
        length=rates(
            (
                n,
                vary_question(
                    vary_question(asked, "length", n), "batch", training.tokens_per_step // n
                ),
            )
            for n in _around(training.sequence_length)
            if training.tokens_per_step % n == 0
        ),
        gpus=rates((n, vary_question(asked, "gpus", n)) for n in counts),
        failures=tuple(_with_failures(answer, factor, reliability) for factor in FAILURE_RATES),
        exact=exact,
    )


def _around(value: int, multiple: int = 1) -> list[int]:
    tried = (value * factor for factor in FACTORS)
    return [round(number) for number in tried if number >= 1 and number % multiple == 0]


def _rate(point: SweepPoint) -> SweepRate:
    assert not isinstance(point.value, str)
    return SweepRate(
        value=point.value,
        tokens_per_s=point.tokens_per_s,
        mfu=point.mfu,
        dollars_per_trillion_tokens=point.dollars_per_trillion_tokens,
        problems=point.problems,
    )


def _with_failures(answer: PlanAnswer, factor: float, reliability: Reliability) -> SweepRate:
    """Return what the winner gets where things break `factor` times as often."""
    best, step = answer.best, answer.best.step
    usual = reliability.failures_per_gpu_hour
    if usual is None:
        usual = best.job.cluster.failures_per_gpu_hour
    if usual is None:
        usual = reliability.usual_failures_per_gpu_hour
    rate = factor * usual
    try:
        run = predict_long_run(
            best.job, step.step_s, replace(reliability, failures_per_gpu_hour=rate)
        )
    except InputError as error:
        return SweepRate(value=rate, problems=tuple(error.problems))
    tokens = answer.question.workload.tokens
    return SweepRate(
        value=rate,
        tokens_per_s=step.tokens_per_s * run.goodput,
        mfu=step.mfu * run.goodput,
        dollars_per_trillion_tokens=None if run.price is None else run.price / tokens * TRILLION,
        goodput=run.goodput,
        spares=run.spares,
    )
