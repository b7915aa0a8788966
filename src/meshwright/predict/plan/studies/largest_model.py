"""The largest model that trains fast enough on some GPUs."""

from collections.abc import Callable, Iterable

from msgspec.structs import replace

from meshwright.errors import InputError, Problem
from meshwright.predict.long_run.reliability import RELIABILITY, Reliability
from meshwright.predict.plan.question.plan_question import PlanQuestion
from meshwright.predict.plan.studies.model_scaling import scale_model
from meshwright.predict.plan.studies.trials import GoalResult, PlanTrial, PlanTrials
from meshwright.spec.layout import Layout, stage_state_bytes
from meshwright.spec.model import Model, count_parameters

MIN_SCALE = 2**-10
"""Share of the largest model whose states fit, below which none is tried."""
REFINEMENT_FACTORS = (2**0.75, 2**0.5, 2**0.25)
"""Factors tried above a size that is fast enough where twice the size is not, largest first."""


def find_largest_model(
    question: PlanQuestion,
    mfu: float,
    *,
    models: Iterable[Model] | None = None,
    reliability: Reliability = RELIABILITY,
    exact: bool = False,
) -> GoalResult:
    """Return the largest model that trains at an MFU or better on the question's GPUs.

    `models` are tried from the largest down, such as `family`. Without them the question's own is
    scaled in depth and width (`scale_model`): from the most parameters whose states GPUs can hold,
    halved until one is fast enough, and then in finer steps. Nothing is taken to be monotone: small
    models are slow as well.

    Raises:
        InputError: where none is fast enough.
    """
    if not 0 < mfu < 1:
        what = f"{mfu} is no share of the peak"
        raise InputError([Problem("mfu", what, "use a number between 0 and 1, like 0.4")])
    trials = PlanTrials(question, reliability, exact)

    def fast(model: Model) -> bool:
        blank = PlanTrial(gpus=question.gpus, model=model.name, tokens=question.workload.tokens)
        trial = trials.get_trial(model, blank, lambda: replace(question, model=model))
        return trial.answer is not None and trial.answer.best.step.mfu >= mfu

    if models is not None:
        shapes = {(_size(model), model.hidden, model.layers): model for model in models}
        given = sorted(shapes.values(), key=_size, reverse=True)
        best, note = (
            next(filter(fast, given), None),
            "of the models given, each shape was tried once",
        )
    else:
        best = _largest_scaled(question, fast)
        note = "depth and width were scaled alike, in steps of a fourth root of two"
    if best is None:
        raise _too_slow(mfu, trials)
    asked = f"the largest model at {mfu:.0%} MFU or better on {question.gpus:,} GPUs"
    return trials.make_result(asked, trials.tried[best], note)


def _size(model: Model) -> int:
    return count_parameters(model).total


def _largest_scaled(question: PlanQuestion, fast: Callable[[Model], bool]) -> Model | None:
    model = question.model
    factor = largest = _most_parameters(question) / _size(model)
    while factor >= MIN_SCALE * largest:
        found = scale_model(model, factor)
        if fast(found):
            finer = (
                scale_model(model, f * factor) for f in REFINEMENT_FACTORS if f * factor <= largest
            )
            return next(filter(fast, finer), found)
        factor /= 2
    return None


def _most_parameters(question: PlanQuestion) -> float:
    """Return the parameters whose states, spread over all GPUs, fill their memory."""
    base, model = question.space.base, question.model
    whole = Layout(
        precision=base.precision,
        optimizer=base.optimizer,
        master_precision=base.master_precision,
        gradient_precision=base.gradient_precision,
        moment_precision=base.moment_precision,
    )
    if question.workload.adapter is not None:
        held = stage_state_bytes(whole, model)[0].parameters
    else:
        # Fully sharded weights are kept in the master copy alone.
        single = replace(whole, precision="fp32")
        held = min(stage_state_bytes(layout, model)[0].total for layout in (whole, single))
    return question.gpus * question.usable_cluster.gpu.memory_bytes / held * _size(model)


def _too_slow(mfu: float, trials: PlanTrials) -> InputError:
    gpus = trials.question.gpus
    reached = [
        (trial.answer.best.step.mfu, trial.model)
        for trial in trials.tried.values()
        if trial.answer is not None
    ]
    if not reached:
        return InputError(trials.problems)
    best, name = max(reached)
    what = f"no model tried reaches {mfu:.0%} MFU on {gpus:,} GPUs"
    return InputError([Problem("mfu", what, f"ask for {best:.1%}, which {name} reaches")])
