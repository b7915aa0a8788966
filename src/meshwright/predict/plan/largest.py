"""The largest model that trains fast enough on some GPUs."""

from collections.abc import Callable, Iterable

from msgspec.structs import replace

from meshwright.errors import InputError, Problem
from meshwright.predict.plan.question import Question
from meshwright.predict.plan.scaling import scaled
from meshwright.predict.plan.trials import Reached, Trial, Trials
from meshwright.predict.reliability import RELIABILITY, Reliability
from meshwright.spec.layout import Layout, state_bytes
from meshwright.spec.model import Model, count_parameters

SMALLEST = 2**-10
"""Share of the largest model whose states fit, below which none is tried."""
FINER = (2**0.75, 2**0.5, 2**0.25)
"""Factors tried above a size that is fast enough where twice the size is not, largest first."""


def largest_model(
    question: Question,
    mfu: float,
    *,
    models: Iterable[Model] | None = None,
    reliability: Reliability = RELIABILITY,
    exact: bool = False,
) -> Reached:
    """Return the largest model that trains at an MFU or better on the question's GPUs.

    `models` are tried from the largest down, such as `family`. Without them the question's own is
    scaled in depth and width (`scaled`): from the most parameters whose states GPUs can hold,
    halved until one is fast enough, and then in finer steps. Nothing is taken to be monotone: small
    models are slow as well.

    Raises:
        InputError: where none is fast enough.
    """
    if not 0 < mfu < 1:
        what = f"{mfu} is no share of the peak"
        raise InputError([Problem("mfu", what, "use a number between 0 and 1, like 0.4")])
    trials = Trials(question, reliability, exact)

    def fast(model: Model) -> bool:
        blank = Trial(gpus=question.gpus, model=model.name, tokens=question.workload.tokens)
        trial = trials.of(model, blank, lambda: replace(question, model=model))
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
    return trials.reached(asked, trials.tried[best], note)


def _size(model: Model) -> int:
    return count_parameters(model).total


def _largest_scaled(question: Question, fast: Callable[[Model], bool]) -> Model | None:
    model = question.model
    factor = largest = _most_parameters(question) / _size(model)
    while factor >= SMALLEST * largest:
        found = scaled(model, factor)
        if fast(found):
            finer = (scaled(model, f * factor) for f in FINER if f * factor <= largest)
            return next(filter(fast, finer), found)
        factor /= 2
    return None


def _most_parameters(question: Question) -> float:
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
        held = state_bytes(whole, model)[0].parameters
    else:
        # Fully sharded weights are kept in the master copy alone.
        single = replace(whole, precision="fp32")
        held = min(state_bytes(layout, model)[0].total for layout in (whole, single))
    return question.gpus * question.limited.gpu.memory_bytes / held * _size(model)


def _too_slow(mfu: float, trials: Trials) -> InputError:
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
