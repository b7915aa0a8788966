"""No lost or mixed-up token: each answer under load held against the same answer alone."""

from collections.abc import Sequence
from typing import NamedTuple

from meshwright.observe.bench.serving.request_result import RequestResult
from meshwright.observe.bench.serving.serving_result import ServingBenchRun


class AnswerCheck(NamedTuple):
    """How answers compare."""

    num_same: int
    different: tuple[str, ...]
    """What is unlike, request by request."""
    unanswered: tuple[str, ...]
    """Requests that one side has no answer to, and why."""


def compare_answers(
    under_load: Sequence[RequestResult], alone: Sequence[RequestResult]
) -> AnswerCheck:
    """Hold answers to the same requests against each other."""
    first, second = ({one.index: one for one in side} for side in (under_load, alone))
    whose = {one.answer_hash: one.index for one in alone if not one.error}
    same, differing, unanswered = 0, list[str](), list[str]()
    for index in sorted(first.keys() | second.keys()):
        one, other = first.get(index), second.get(index)
        if one is None or other is None or one.error or other.error:
            unanswered.append(f"request {index}: {_why(one)} under load, {_why(other)} beside it")
        elif one.answer_hash == other.answer_hash:
            same += 1
        else:
            differing.append(_unlike(one, other, whose))
    return AnswerCheck(same, tuple(differing), tuple(unanswered))


def _why(one: RequestResult | None) -> str:
    if one is None:
        return "not asked"
    return f"{one.error} ({one.error_detail})" if one.error else "answered"


def compare_run_answers(
    one: Sequence[ServingBenchRun], other: Sequence[ServingBenchRun]
) -> AnswerCheck:
    """Hold all answers of two results against each other, run by run."""
    found = [compare_answers(a.requests, b.requests) for a, b in zip(one, other, strict=False)]
    missing = [run.name for run in (*one[len(other) :], *other[len(one) :])]
    return sum_checks(
        [*found, AnswerCheck(0, (), tuple(f"{name}: only in one result" for name in missing))]
    )


def sum_checks(echoes: Sequence[AnswerCheck]) -> AnswerCheck:
    """Put comparisons together."""
    return AnswerCheck(
        sum(echo.num_same for echo in echoes),
        tuple(line for echo in echoes for line in echo.different),
        tuple(line for echo in echoes for line in echo.unanswered),
    )


def _unlike(one: RequestResult, other: RequestResult, whose: dict[str, int]) -> str:
    line = f"request {one.index}: "
    stranger = whose.get(one.answer_hash)
    if stranger is not None:
        return f"{line}has the answer of request {stranger}"
    a, b = one.output, other.output
    if a is None or b is None or type(a) is not type(b):
        return f"{line}another answer of {one.output_tokens} tokens, {other.output_tokens} before"
    unit = "character" if isinstance(a, str) else "token"
    at = next((n for n, pair in enumerate(zip(a, b, strict=False)) if pair[0] != pair[1]), None)
    if at is None:
        return f"{line}ends after {len(a)} {unit}s, not {len(b)}"
    return f"{line}{unit} {at} is {a[at]!r}, not {b[at]!r}"
