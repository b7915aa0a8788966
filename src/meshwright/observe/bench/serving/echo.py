"""No lost or mixed-up token: each answer under load held against the same answer alone."""

from collections.abc import Sequence
from typing import NamedTuple

from meshwright.observe.bench.serving.result import Run
from meshwright.observe.bench.serving.served import Served


class Echo(NamedTuple):
    """How answers compare."""

    same: int
    differing: tuple[str, ...]
    """What is unlike, request by request."""
    unanswered: tuple[str, ...]
    """Requests that one side has no answer to, and why."""


def compare_answers(under_load: Sequence[Served], alone: Sequence[Served]) -> Echo:
    """Hold answers to the same requests against each other."""
    first, second = ({one.index: one for one in side} for side in (under_load, alone))
    whose = {one.digest: one.index for one in alone if not one.fault}
    same, differing, unanswered = 0, list[str](), list[str]()
    for index in sorted(first.keys() | second.keys()):
        one, other = first.get(index), second.get(index)
        if one is None or other is None or one.fault or other.fault:
            unanswered.append(f"request {index}: {_why(one)} under load, {_why(other)} beside it")
        elif one.digest == other.digest:
            same += 1
        else:
            differing.append(_unlike(one, other, whose))
    return Echo(same, tuple(differing), tuple(unanswered))


def _why(one: Served | None) -> str:
    if one is None:
        return "not asked"
    return f"{one.fault} ({one.detail})" if one.fault else "answered"


def compare_runs(one: Sequence[Run], other: Sequence[Run]) -> Echo:
    """Hold all answers of two results against each other, run by run."""
    found = [compare_answers(a.requests, b.requests) for a, b in zip(one, other, strict=False)]
    missing = [run.name for run in (*one[len(other) :], *other[len(one) :])]
    return in_all([*found, Echo(0, (), tuple(f"{name}: only in one result" for name in missing))])


def in_all(echoes: Sequence[Echo]) -> Echo:
    """Put comparisons together."""
    return Echo(
        sum(echo.same for echo in echoes),
        tuple(line for echo in echoes for line in echo.differing),
        tuple(line for echo in echoes for line in echo.unanswered),
    )


def _unlike(one: Served, other: Served, whose: dict[str, int]) -> str:
    line = f"request {one.index}: "
    stranger = whose.get(one.digest)
    if stranger is not None:
        return f"{line}has the answer of request {stranger}"
    a, b = one.answer, other.answer
    if a is None or b is None or type(a) is not type(b):
        return f"{line}another answer of {one.output_tokens} tokens, {other.output_tokens} before"
    unit = "character" if isinstance(a, str) else "token"
    at = next((n for n, pair in enumerate(zip(a, b, strict=False)) if pair[0] != pair[1]), None)
    if at is None:
        return f"{line}ends after {len(a)} {unit}s, not {len(b)}"
    return f"{line}{unit} {at} is {a[at]!r}, not {b[at]!r}"
