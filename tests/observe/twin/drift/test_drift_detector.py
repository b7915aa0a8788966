"""The detector: slow for good is told, with its term; a long step now and then is not."""

from collections.abc import Callable

import numpy as np
import pytest

from meshwright.observe.twin.drift.drift_detector import (
    MAX_BASELINE_VALUES,
    MIN_BASELINE_VALUES,
    NUM_RECENT_VALUES,
    NUM_WARMUP_STEPS,
    DriftDetector,
    ExpectedStep,
    StepSample,
    StepTimeChange,
)

PARTS = {"data": 0.01, "between": 0.01, "gradients": 0.8, "update": 0.18}


def steps(factors: "np.typing.NDArray[np.float64]", moved: str = "gradients") -> list[StepSample]:
    """Return steps of a second each, as often as there are factors, of which one part differs."""
    found = []
    for at, factor in enumerate(factors):
        terms = {**PARTS, moved: PARTS[moved] + factor - 1.0}
        found.append(StepSample(at + 1, float(factor), terms))  # type: ignore[arg-type]
    return found


def told(given: list[StepSample], expected: ExpectedStep | None = None) -> list[StepTimeChange]:
    detector = DriftDetector(expected)
    return [found for one in given if (found := detector.add(one)) is not None]


def noise(count: int, seed: int = 1, spread: float = 0.01) -> "np.typing.NDArray[np.float64]":
    return np.random.default_rng(seed).lognormal(0.0, spread, count)


@pytest.mark.parametrize("term", list(PARTS))
@pytest.mark.parametrize("rise", [0.05, 0.20])
def test_a_slowdown_is_told_soon_with_its_term_and_its_end(term: str, rise: float) -> None:
    factors = noise(500)
    factors[200:350] += rise
    slow, back = told(steps(factors, term))
    assert (slow.kind, back.kind) == ("slower", "recovered")
    assert slow.largest_change is not None
    assert slow.largest_change.term == term
    assert abs(slow.since_step - 201) <= 2
    assert 201 <= slow.step <= 215
    assert slow.relative_increase == pytest.approx(rise, abs=0.02)
    assert 350 < back.step <= 365


def test_a_slow_drift_is_told_before_it_is_large() -> None:
    factors = noise(3000)
    factors[500:] *= np.linspace(1.0, 1.20, 2500)
    first = told(steps(factors))[0]
    assert first.kind == "slower"
    assert factors[first.step - 1] < 1.10


def test_steps_that_often_stall_are_told_though_the_median_stays() -> None:
    factors = noise(1500)
    factors[800::4] += 1.0
    first = told(steps(factors, "data"))[0]
    assert (first.kind, first.largest_change and first.largest_change.term) == ("slower", "data")
    assert first.step > 800
    assert first.relative_increase > 0.1


def linked(random: np.random.Generator, count: int) -> "np.typing.NDArray[np.float64]":
    """Noise of 2 %, heavy in its tails, of which each value remembers the one before."""
    drawn = 0.02 * random.standard_t(3, count) / np.sqrt(3)
    for at in range(1, count):
        drawn[at] = 0.8 * drawn[at - 1] + 0.6 * drawn[at]
    return np.asarray(np.exp(drawn))


def with_saves(random: np.random.Generator, count: int) -> "np.typing.NDArray[np.float64]":
    """Noise of 1 %; one step in fifty is three times as long, and one in thirty by chance."""
    factors = random.lognormal(0.0, 0.01, count)
    factors[::50] *= 3
    factors[random.random(count) < 0.03] *= 1 + random.exponential(1.0)
    return factors


@pytest.mark.parametrize("draw", [linked, with_saves])
def test_clean_runs_raise_no_alarm(
    draw: Callable[[np.random.Generator, int], "np.typing.NDArray[np.float64]"],
) -> None:
    # The rates that benchmarks/drift.py finds are below 0.1 in 1,000 steps.
    random = np.random.default_rng(7)
    alarms = [one for _ in range(4) for one in told(steps(draw(random, 2000)))]
    assert sum(one.kind == "slower" for one in alarms) <= 1


def test_a_few_long_steps_in_a_row_are_no_change() -> None:
    factors = noise(1500)
    for at in range(100, 1500, 100):
        factors[at : at + 4] *= 1.5
    assert told(steps(factors)) == []


def test_first_steps_of_sessions_are_left_out_and_a_change_there_is_marked() -> None:
    factors = noise(200)
    factors[:NUM_WARMUP_STEPS] = 30.0
    factors[100:103] = 30.0
    factors[103:] *= 1.1
    rows = steps(factors)
    rows[100] = rows[100]._replace(starts_session=True)
    (found,) = told(rows)
    assert (found.kind, found.starts_session) == ("slower", True)


def test_short_steps_are_judged_in_blocks() -> None:
    given = [one._replace(step_s=0.01 * one.step_s) for one in steps(noise(1000, spread=0.3))]
    slow = [one._replace(number=one.number + 1000, step_s=1.2 * one.step_s) for one in given]
    first = told([*given, *slow])[0]
    assert first.kind == "slower"
    assert 1000 < first.step <= 1200


EXPECTED = ExpectedStep(
    1.0, 0.9, 1.1, {"data": 0.0, "between": 0.0, "gradients": 0.8, "update": 0.18}
)


def test_steps_within_the_band_are_no_news() -> None:
    assert told(steps(1.05 * noise(300)), EXPECTED) == []


@pytest.mark.parametrize(("pace", "term"), [(1.3, "data"), (1.2, "update"), (0.7, "gradients")])
def test_a_pace_outside_the_band_is_told_once_with_the_term_furthest_off(
    pace: float, term: str
) -> None:
    (found,) = told(steps(pace * noise(300), term), EXPECTED)
    assert (found.kind, found.before_s) == ("off_prediction", 1.0)
    assert found.after_s == pytest.approx(pace, rel=0.01)
    assert found.largest_change is not None
    assert found.largest_change.term == term
    assert found.step == NUM_WARMUP_STEPS + MIN_BASELINE_VALUES


def test_what_was_told_of_the_prediction_is_not_told_again() -> None:
    factors = 1.3 * noise(600)
    factors[200:300] *= 1.2
    kinds = [one.kind for one in told(steps(factors), EXPECTED)]
    assert kinds == ["off_prediction", "slower", "recovered"]


def test_a_long_run_needs_no_more_memory() -> None:
    detector = DriftDetector()
    for one in steps(noise(9000)):
        detector.add(one)
    assert detector._pace is not None
    row = detector._pace.fine
    assert (row.count, len(row._values), len(row.firsts)) == (
        8997,
        MAX_BASELINE_VALUES + NUM_RECENT_VALUES,
        8192,
    )


def test_a_second_slowdown_adds_to_the_first_and_ends_with_it() -> None:
    factors = noise(600)
    factors[100:400] *= 1.1
    factors[250:400] *= 1.1
    detector = DriftDetector()
    kinds = []
    for one in steps(factors):
        found = detector.add(one)
        if found is not None:
            kinds.append(found.kind)
        if one.number == 300:
            assert detector.slowdown is not None
            assert detector.slowdown.before_s == pytest.approx(1.0, rel=0.01)
    assert kinds == ["slower", "slower", "recovered"]
    assert detector.slowdown is None


def test_what_is_no_time_is_passed_over() -> None:
    detector = DriftDetector()
    for number in range(100):
        assert detector.add(StepSample(number, float("nan") if number % 2 else 0.0)) is None
    assert (detector.taken, detector.baseline_s) == (0, None)
