"""`Trial` and `Reached`: what inverse questions try on their way, and what they come to."""

from collections.abc import Callable

import msgspec

from meshwright.errors import InputError, Problem
from meshwright.predict.long_run import LongRun, predict_long_run
from meshwright.predict.plan.answer import Answer
from meshwright.predict.plan.curves import solve, varied
from meshwright.predict.plan.question import Question
from meshwright.predict.reliability import Reliability


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """One question that was tried on the way."""

    gpus: int
    """GPUs of the job; spare nodes come on top."""
    model: str
    """Name of the model."""
    tokens: int
    """Tokens to train on."""
    answer: Answer | None = None
    """The best layout; None where none fits."""
    run: LongRun | None = None
    """The whole run in it, failures included; None where it would have no end."""
    problems: tuple[Problem, ...] = ()
    """Why one of them is missing."""

    @property
    def gpu_hours(self) -> float:
        """What the run takes; without end where there is none."""
        return float("inf") if self.run is None else self.run.gpu_hours


class Reached(msgspec.Struct, frozen=True, kw_only=True):
    """What an inverse question comes to."""

    asked: str
    """The question in words."""
    best: Trial
    """What answers it, with its answer and its run."""
    tried: tuple[Trial, ...]
    """All that was looked at, in order."""
    note: str
    """How finely it was searched, and what the answer hangs on."""


class Trials:
    """Tries variants of one question, each once."""

    def __init__(self, question: Question, reliability: Reliability, exact: bool) -> None:
        self.question, self.reliability, self.exact = question, reliability, exact
        self.tried: dict[object, Trial] = {}

    def on(self, gpus: int) -> Trial:
        """Return what the question comes to on another number of GPUs."""
        blank = Trial(
            gpus=gpus, model=self.question.model.name, tokens=self.question.workload.tokens
        )
        return self.of(gpus, blank, lambda: varied(self.question, "gpus", gpus))

    def of(self, key: object, blank: Trial, make: Callable[[], Question]) -> Trial:
        """Return what a question comes to; `blank` says what is tried."""
        if key not in self.tried:
            try:
                self.tried[key] = self._filled(blank, make())
            except InputError as error:
                self.tried[key] = msgspec.structs.replace(blank, problems=tuple(error.problems))
        return self.tried[key]

    def _filled(self, blank: Trial, question: Question) -> Trial:
        answer = solve(question, exact=self.exact)
        if not answer.proved:
            raise KeyboardInterrupt  # what was broken off decides nothing
        best = answer.best
        try:
            run = predict_long_run(best.work, best.step.step_s, self.reliability)
        except InputError as error:
            return msgspec.structs.replace(blank, answer=answer, problems=tuple(error.problems))
        return msgspec.structs.replace(blank, answer=answer, run=run)

    @property
    def problems(self) -> tuple[Problem, ...]:
        """All that stood in the way, each once."""
        found = (problem for trial in self.tried.values() for problem in trial.problems)
        return tuple(dict.fromkeys(found))

    def reached(self, asked: str, best: Trial, note: str) -> Reached:
        """Return the outcome with all that was tried."""
        if not self.exact:
            note += "; only usual layouts were tried"
        return Reached(asked=asked, best=best, tried=tuple(self.tried.values()), note=note)
