"""`PlanTrial` and `GoalResult`: what inverse questions try on their way, and what they come to."""

from collections.abc import Callable

import msgspec

from meshwright.errors import InputError, Problem
from meshwright.predict.long_run.long_run import LongRun, predict_long_run
from meshwright.predict.long_run.reliability import Reliability
from meshwright.predict.plan.answer.plan_answer import PlanAnswer
from meshwright.predict.plan.question.plan_question import PlanQuestion
from meshwright.predict.plan.studies.sweeps import answer_question, vary_question


class PlanTrial(msgspec.Struct, frozen=True, kw_only=True):
    """One question that was tried on the way."""

    gpus: int
    """GPUs of the job; spare nodes come on top."""
    model: str
    """Name of the model."""
    tokens: int
    """Tokens to train on."""
    answer: PlanAnswer | None = None
    """The best layout; None where none fits."""
    long_run: LongRun | None = None
    """The whole run in it, failures included; None where it would have no end."""
    problems: tuple[Problem, ...] = ()
    """Why one of them is missing."""

    @property
    def gpu_hours(self) -> float:
        """What the run takes; without end where there is none."""
        return float("inf") if self.long_run is None else self.long_run.gpu_hours


class GoalResult(msgspec.Struct, frozen=True, kw_only=True):
    """What an inverse question comes to."""

    question: str
    """The question in words."""
    best: PlanTrial
    """What answers it, with its answer and its run."""
    trials: tuple[PlanTrial, ...]
    """All that was looked at, in order."""
    note: str
    """How finely it was searched, and what the answer hangs on."""


class PlanTrials:
    """Tries variants of one question, each once."""

    def __init__(self, question: PlanQuestion, reliability: Reliability, exact: bool) -> None:
        self.question, self.reliability, self.exact = question, reliability, exact
        self.tried: dict[object, PlanTrial] = {}

    def try_gpus(self, gpus: int) -> PlanTrial:
        """Return what the question comes to on another number of GPUs."""
        blank = PlanTrial(
            gpus=gpus, model=self.question.model.name, tokens=self.question.workload.tokens
        )
        return self.get_trial(gpus, blank, lambda: vary_question(self.question, "gpus", gpus))

    def get_trial(
        self, key: object, blank: PlanTrial, make: Callable[[], PlanQuestion]
    ) -> PlanTrial:
        """Return what a question comes to; `blank` says what is tried."""
        if key not in self.tried:
            try:
                self.tried[key] = self._filled(blank, make())
            except InputError as error:
                self.tried[key] = msgspec.structs.replace(blank, problems=tuple(error.problems))
        return self.tried[key]

    def _filled(self, blank: PlanTrial, question: PlanQuestion) -> PlanTrial:
        answer = answer_question(question, exact=self.exact)
        if not answer.is_proved:
            raise KeyboardInterrupt  # what was broken off decides nothing
        best = answer.best
        try:
            run = predict_long_run(best.job, best.step.step_s, self.reliability)
        except InputError as error:
            return msgspec.structs.replace(blank, answer=answer, problems=tuple(error.problems))
        return msgspec.structs.replace(blank, answer=answer, long_run=run)

    @property
    def problems(self) -> tuple[Problem, ...]:
        """All that stood in the way, each once."""
        found = (problem for trial in self.tried.values() for problem in trial.problems)
        return tuple(dict.fromkeys(found))

    def make_result(self, asked: str, best: PlanTrial, note: str) -> GoalResult:
        """Return the outcome with all that was tried."""
        if not self.exact:
            note += "; only usual layouts were tried"
        return GoalResult(question=asked, best=best, trials=tuple(self.tried.values()), note=note)
