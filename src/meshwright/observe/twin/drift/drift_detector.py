"""The steps of a run, one after another: are they as predicted, and do they stay as they are?

Two things are told. *Off prediction*: the settled pace lies outside the band of the prediction.
*Slower*: the pace has left what was settled, by a jump or little by little; and *recovered*, when
it is back. There is no clock and no file here; `run_steps` reads the steps of a run.

Steps are looked at twice. By themselves (short ones in blocks of 0.1 s), where a long one now and
then is nobody's business; and by the mean of eight, where a step in four that takes twice as long
shows, which no median would tell.
"""

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np

from meshwright.observe.statistics.cusum import (
    MIN_RISE,
    NUM_NEWEST,
    CusumDetector,
    LevelShift,
    estimate_baseline,
)

DriftTerm = Literal["data", "between", "gradients", "exchange", "update"]
"""Waiting for data; all else between two steps; passes; waiting for other ranks; the update."""
StepTimeChangeKind = Literal["off_prediction", "slower", "faster", "recovered"]

NUM_WARMUP_STEPS = 3
"""Of a session, left out: they compile, tune and fill caches."""
MIN_BASELINE_VALUES = 48
"""Values that a pace is first told from."""
MAX_BASELINE_VALUES = 2048
"""Values that a pace is told from at most; later ones no longer change what is usual."""
NUM_RECENT_VALUES = 32
"""The newest values, which do not count as usual yet."""
REESTIMATE_FACTOR = 1.15
"""What is usual is estimated again when there are so many times as many values."""
BLOCK_S = 0.1
"""Steps shorter than this are judged in blocks of as long: a hiccup is no change."""
COARSE_BLOCK_VALUES = 8
"""Values whose mean is looked at, too."""
MAX_RELATIVE_STEP = 3.0
"""A step counts for as many usual ones at most."""
OFF_PREDICTION_ERRORS = 3.0
"""Standard errors by which a settled pace is outside the band for sure."""
_SIZED_BY = 8
"""Steps whose median says how many go to a block."""
_KEPT = 8192
_EXAMPLES = 512
"""Steps of a pace whose terms are kept."""


class StepSample(NamedTuple):
    """One step as it was measured."""

    number: int
    step_s: float
    terms: Mapping[DriftTerm, float] = {}
    """Seconds of its parts, as far as they are known."""
    starts_session: bool = False
    """Whether a session begins with it."""


class ExpectedStep(NamedTuple):
    """The same step as it was predicted."""

    step_s: float
    low_s: float
    high_s: float
    terms: Mapping[DriftTerm, float] = {}

    def is_within_interval(self, step_s: float) -> bool:
        """Whether a step is within the band."""
        return self.low_s <= step_s <= self.high_s


class TermChange(NamedTuple):
    """Part of a step on both sides of a comparison."""

    term: DriftTerm
    before_s: float
    after_s: float

    @property
    def increase_s(self) -> float:
        """How much longer it is."""
        return self.after_s - self.before_s


class StepTimeChange(NamedTuple):
    """What is told of a run."""

    kind: StepTimeChangeKind
    step: int
    """The step after which it is told."""
    since_step: int
    """The first step that it is true of, by the best guess."""
    before_s: float
    """A step as it was settled; for `off_prediction`, as it was predicted."""
    after_s: float
    terms: tuple[TermChange, ...] = ()
    starts_session: bool = False
    """Whether it begins with a session, give or take the steps left out there."""

    @property
    def relative_increase(self) -> float:
        """By how much a step is longer, as a part of what it was."""
        return self.after_s / self.before_s - 1

    @property
    def largest_change(self) -> TermChange | None:
        """The term that moved most, in the direction of the whole; None where none is known."""
        sign = 1 if self.after_s >= self.before_s else -1
        most = max(self.terms, key=lambda one: sign * one.increase_s, default=None)
        return most if most is not None and sign * most.increase_s > 0 else None


class _ValueHistory:
    """Values of some steps each, and what is usual of them."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.sums: CusumDetector | None = None
        self.firsts: deque[int] = deque(maxlen=_KEPT)
        """Where the newest values begin."""
        self.count = 0
        self._values: list[float] = []
        self._open: list[StepSample] = []

    def add(self, step: StepSample) -> LevelShift | None:
        """Add a step; tell where the value that it completes makes a move sure."""
        self._open.append(step)
        if len(self._open) < self.size:
            return None
        self.firsts.append(self._open[0].number)
        value = math.log(_mean([one.step_s for one in self._open]))
        self._open = []
        self.count += 1
        if (
            self.count <= MAX_BASELINE_VALUES + NUM_RECENT_VALUES
        ):  # a run of months is to need no more memory
            self._values.append(value)
        if self.sums is None:
            if self.count == MIN_BASELINE_VALUES:
                self.sums = CusumDetector(estimate_baseline(np.array(self._values)))
            return None
        moved = self.sums.add(value)
        known = len(self._values) - NUM_RECENT_VALUES
        count = self.sums.baseline.num_values
        if (
            moved is None
            and count < MAX_BASELINE_VALUES
            and known >= REESTIMATE_FACTOR * count
            and self.sums.alarm_fraction < 0.5
        ):
            self.sums.update_baseline(estimate_baseline(np.array(self._values[:known])))
        return moved


class _SettledLevel:
    """Steps that go at one pace, as far as anybody can tell."""

    def __init__(self, block: int, steps: Iterable[StepSample] = ()) -> None:
        self.fine, self.coarse = _ValueHistory(block), _ValueHistory(COARSE_BLOCK_VALUES * block)
        self.examples: list[StepSample] = []
        for step in steps:
            self.add(step)

    def add(self, step: StepSample) -> tuple[int, bool, bool] | None:
        """Add a step; return the first of another pace, if that is slower, if `fine` tells."""
        if len(self.examples) < _EXAMPLES:
            self.examples.append(step)
        for row in (self.fine, self.coarse):
            moved = row.add(step)
            if moved is not None:
                return (
                    row.firsts[-min(moved.num_values_ago, len(row.firsts))],
                    moved.is_up,
                    row is self.fine,
                )
        return None

    @property
    def settled(self) -> bool:
        return self.fine.sums is not None

    @property
    def level_s(self) -> float:
        """The usual step."""
        assert self.fine.sums is not None, "not settled yet"
        return math.exp(self.fine.sums.baseline.level)

    @property
    def error(self) -> float:
        """How far that may be off, as a part of it."""
        assert self.fine.sums is not None, "not settled yet"
        return self.fine.sums.baseline.standard_error


class DriftDetector:
    """Takes steps, and tells what changes."""

    def __init__(self, expected: ExpectedStep | None = None) -> None:
        self.expected = expected
        self.slowdown: StepTimeChange | None = None
        """The slowdown that has not ended; further ones add to it."""
        self.taken = 0
        """Steps that were judged."""
        self._left_out = NUM_WARMUP_STEPS
        self._recent: deque[StepSample] = deque(maxlen=_KEPT)
        self._pace: _SettledLevel | None = None
        self._judged = False
        self._side = 0
        """Where the pace was when it was last judged: under the band, within, over."""
        self._began: list[int] = []

    @property
    def baseline_s(self) -> float | None:
        """The settled step; None where none is yet."""
        return self._pace.level_s if self._pace is not None and self._pace.settled else None

    def add(self, step: StepSample) -> StepTimeChange | None:
        """Take the next step; tell what it makes sure."""
        if step.starts_session:
            self._left_out = NUM_WARMUP_STEPS
            self._began = [*self._began[-9:], step.number]
        if self._left_out:
            self._left_out -= 1
            return None
        if not (math.isfinite(step.step_s) and step.step_s > 0):
            return None
        self.taken += 1
        self._recent.append(step)
        if self._pace is None:
            if len(self._recent) == _SIZED_BY:
                middle_s = _middle([one.step_s for one in self._recent], False)
                self._pace = _SettledLevel(math.ceil(BLOCK_S / middle_s), self._recent)
            return None
        left = self._pace.add(step)
        if left is not None:
            return self._changed(step.number, *left)
        return self._settled(step.number)

    def _changed(self, number: int, since: int, up: bool, fine: bool) -> StepTimeChange | None:
        """Begin another pace with the step where the one before was left."""
        assert self._pace is not None, "a pace is there to be left"
        before = [one for one in self._pace.examples if one.number < since]
        after = [one for one in self._recent if one.number >= since]
        self._pace = _SettledLevel(self._pace.fine.size, after)
        terms = compare_terms(before, after, by_mean=not fine)
        begins = any(since - NUM_NEWEST <= one <= since + NUM_WARMUP_STEPS for one in self._began)
        before_s, after_s = (
            _middle([one.step_s for one in rows], not fine) for rows in (before, after)
        )
        kind: StepTimeChangeKind = "slower" if up else "faster"
        found = StepTimeChange(kind, number, since, before_s, after_s, terms, begins)
        if up:
            first = self.slowdown or found
            self.slowdown = found._replace(before_s=first.before_s, since_step=first.since_step)
            return found
        if self.slowdown is None:
            self._judged = False
            return found
        return self._recovered(found) or found

    def _recovered(self, found: StepTimeChange) -> StepTimeChange | None:
        """Close the slowdown that is open, where steps are back at what they were before it."""
        slow = self.slowdown
        if slow is None:
            return None
        if found.after_s > (1 + MIN_RISE) * slow.before_s:
            self.slowdown = slow._replace(after_s=found.after_s)
            return None
        self.slowdown, self._judged = None, False
        return found._replace(kind="recovered", before_s=slow.after_s)

    def _settled(self, number: int) -> StepTimeChange | None:
        """Judge a pace that has just settled: against the prediction, and for a slowdown's end."""
        pace = self._pace
        if pace is None or not pace.settled:
            return None
        since, level_s = pace.examples[0].number, pace.level_s
        if self.slowdown is not None:
            if pace.fine.count > MIN_BASELINE_VALUES:
                return None
            slow = self.slowdown
            found = self._recovered(StepTimeChange("faster", number, number, slow.after_s, level_s))
            if found is not None:  # its steps are of both paces: what is usual is learnt anew
                self._pace = _SettledLevel(pace.fine.size)
            return found
        if self._judged or self.expected is None:
            return None
        self._judged = True
        expected, sure = self.expected, math.exp(OFF_PREDICTION_ERRORS * pace.error)
        over, under = level_s / sure > expected.high_s, level_s * sure < expected.low_s
        before, self._side = self._side, over - under
        if self._side in (0, before):  # what was told is not told again
            return None
        own = {term: _middle(values, False) for term, values in _by_term(pace.examples).items()}
        terms = tuple(
            TermChange(term, expected.terms[term], own[term])
            for term in expected.terms
            if term in own
        )
        return StepTimeChange("off_prediction", number, since, expected.step_s, level_s, terms)


def compare_terms(
    before: Sequence[StepSample], after: Sequence[StepSample], *, by_mean: bool
) -> tuple[TermChange, ...]:
    """Return every term that both sides know, by medians or by means."""
    old, new = _by_term(before), _by_term(after)
    return tuple(
        TermChange(term, _middle(old[term], by_mean), _middle(new[term], by_mean))
        for term in old
        if term in new
    )


def _by_term(steps: Iterable[StepSample]) -> dict[DriftTerm, list[float]]:
    found: dict[DriftTerm, list[float]] = {}
    for step in steps:
        for term, seconds in step.terms.items():
            found.setdefault(term, []).append(seconds)
    return found


def _mean(times: list[float]) -> float:
    """Return the mean, in which a single step counts for `MAX_RELATIVE_STEP` usual ones at most."""
    if len(times) == 1:
        return times[0]
    far = MAX_RELATIVE_STEP * sorted(times)[len(times) // 2]
    return sum(min(far, one) for one in times) / len(times)


def _middle(values: Sequence[float], by_mean: bool) -> float:
    return float(np.mean(values) if by_mean else np.median(values))
