"""What an evaluation found: shares with their intervals, and a verdict on every question."""

import math
from collections.abc import Sequence
from typing import Literal

import msgspec

QuestionKind = Literal["exact", "choices", "code"]


class QuestionResult(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one question."""

    where: str
    task: QuestionKind
    right: tuple[bool, ...]
    """For each answer that was drawn; of choices, whether the likeliest is right."""
    answers: tuple[str, ...] = ()
    reasons: tuple[str, ...] = ()
    measures: dict[str, bool] = {}
    """Of choices: whether each measure of likely finds the right one."""
    num_truncated: int = 0
    """Answers that the limit of tokens ended."""


class AccuracyEstimate(msgspec.Struct, frozen=True, kw_only=True):
    """A share of questions."""

    name: str
    share: float
    questions: int
    low: float
    """The interval that holds the true share in 95 of 100 samples of as many questions."""
    high: float

    def __str__(self) -> str:
        return (
            f"{self.name:<18} {self.share:6.1%}  ({self.low:.1%} to {self.high:.1%}, "
            f"{self.questions:,} questions)"
        )


class EvaluationReport(msgspec.Struct, frozen=True, kw_only=True):
    """All of it."""

    scores: tuple[AccuracyEstimate, ...]
    results: tuple[QuestionResult, ...]

    def __getitem__(self, name: str) -> AccuracyEstimate:
        """Return a score by its name."""
        return next(score for score in self.scores if score.name == name)

    @property
    def num_truncated(self) -> int:
        """Answers that the limit of tokens ended."""
        return sum(verdict.num_truncated for verdict in self.results)

    def __str__(self) -> str:
        lines = [str(score) for score in self.scores]
        if self.num_truncated:
            lines.append(
                f"{self.num_truncated:,} answers were ended by max_tokens, which may be too low"
            )
        return "\n".join(lines)


def build_report(verdicts: Sequence[QuestionResult], at: Sequence[int]) -> EvaluationReport:
    """Return scores of verdicts; `at` asks for the share with one right of so many answers."""
    scores = []
    tasks: tuple[QuestionKind, ...] = ("exact", "code")
    for task in tasks:
        mine = [verdict for verdict in verdicts if verdict.task == task]
        if mine:
            shares = [sum(one.right) / len(one.right) for one in mine]
            scores.append(estimate_accuracy(task, shares))
            scores += [
                estimate_accuracy(
                    f"{task} pass@{count}", [pass_at_k(one.right, count) for one in mine]
                )
                for count in at
            ]
    chosen = [verdict for verdict in verdicts if verdict.task == "choices"]
    for name in chosen[0].measures if chosen else ():
        shares = [float(one.measures[name]) for one in chosen]
        scores.append(estimate_accuracy(f"choices {name}", shares))
    return EvaluationReport(scores=tuple(scores), results=tuple(verdicts))


def pass_at_k(right: Sequence[bool], count: int) -> float:
    """Return the chance that `count` of these answers, none drawn twice, hold a right one.

    Chen et al. 2021 (arXiv 2107.03374), equation 1: it has no bias, as 1 − (1 − c/n)^k would.
    """
    wrong = len(right) - sum(right)
    return 1.0 - math.comb(wrong, count) / math.comb(len(right), count)


def estimate_accuracy(name: str, shares: Sequence[float]) -> AccuracyEstimate:
    """Return the mean of shares with Wilson's interval, as if each question were right or wrong."""
    count, z = len(shares), 1.959964
    share = sum(shares) / count
    centre = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = z / (1 + z * z / count) * math.sqrt(
        share * (1 - share) / count + z * z / (4 * count * count)
    )  # fmt: skip
    return AccuracyEstimate(
        name=name, share=share, questions=count, low=max(0.0, centre - half),
        high=min(1.0, centre + half),
    )  # fmt: skip
