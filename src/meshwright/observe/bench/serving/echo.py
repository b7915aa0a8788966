"""No lost or mixed-up token: each answer under load held against the same answer alone."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from meshwright.observe.bench.serving.result import Run
from meshwright.observe.bench.serving.served import Served


class Echo(NamedTuple):
    """How answers compare."""

    same: int
    differing: tuple[str, ...]
    """What is unlike, request by request."""
    uncompared: int
    """Requests that one side has no answer to."""


def compare_answers(under_load: Iterable[Served], alone: Iterable[Served]) -> Echo:
    """Hold answers to the same requests against each other."""
    known = {one.index: one for one in alone if not one.fault}
    answers = [one for one in under_load if not one.fault]
    whose = {one.digest: one.index for one in known.values()}
    pairs = [(one, known[one.index]) for one in answers if one.index in known]
    differing = [_unlike(one, other, whose) for one, other in pairs if one.digest != other.digest]
    lost = len({one.index for one in under_load} | set(known)) - len(pairs)
    return Echo(len(pairs) - len(differing), tuple(differing), lost)


def compare_runs(one: Sequence[Run], other: Sequence[Run]) -> Echo:
    """Hold all answers of two results against each other, run by run."""
    found = [compare_answers(a.requests, b.requests) for a, b in zip(one, other, strict=False)]
    missing = sum(len(run.requests) for run in (*one[len(other) :], *other[len(one) :]))
    return in_all([*found, Echo(0, (), missing)])


def in_all(echoes: Sequence[Echo]) -> Echo:
    """Put comparisons together."""
    return Echo(
        sum(echo.same for echo in echoes),
        tuple(line for echo in echoes for line in echo.differing),
        sum(echo.uncompared for echo in echoes),
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
