import numpy as np
import pytest

from meshwright.observe.statistics.rank_test import (
    MAX_BASELINE_TIMES,
    MIN_BASELINE_TIMES,
    NUM_NEWEST_TIMES,
    average_blocks,
    compute_false_alarm_rate,
    detect_slowdown,
    has_recovered,
)

Random = np.random.Generator


def noise(random: Random, count: int) -> "np.typing.NDArray[np.float64]":
    """Step times with a spread of 5 %, and one in twenty far longer: saves and logs."""
    times = random.lognormal(0.0, 0.05, count)
    times[random.random(count) < 0.05] *= 2.5
    return times


def test_a_slowdown_is_found_within_as_many_steps_as_are_newest() -> None:
    random = np.random.default_rng(1)
    times = np.concatenate([noise(random, 60), 1.25 * noise(random, NUM_NEWEST_TIMES)])
    found = detect_slowdown(times, 0.10)
    assert found is not None
    assert abs(found.first_slow_index - 60) <= 2
    assert found.before_s == pytest.approx(1.0, rel=0.03)
    assert found.relative_increase == pytest.approx(0.25, abs=0.05)


def test_a_faster_job_a_single_hiccup_and_a_small_rise_are_no_slowdown() -> None:
    random = np.random.default_rng(2)
    usual = random.lognormal(0.0, 0.01, 60)
    assert detect_slowdown(np.concatenate([usual, 0.5 * usual[:NUM_NEWEST_TIMES]]), 0.10) is None
    assert detect_slowdown(np.concatenate([usual, [9.0]]), 0.10) is None
    assert detect_slowdown(np.concatenate([usual, 1.05 * usual[:NUM_NEWEST_TIMES]]), 0.10) is None


def test_too_few_steps_before_tell_nothing() -> None:
    times = np.concatenate([np.ones(MIN_BASELINE_TIMES - 1), np.full(NUM_NEWEST_TIMES, 2.0)])
    assert detect_slowdown(times, 0.10) is None


def test_stated_chance_of_a_false_alarm_holds_without_a_least_rise() -> None:
    # One test of times that all come from one distribution, a great many times.
    random = np.random.default_rng(3)
    runs, before = 20_000, MIN_BASELINE_TIMES
    alarms = sum(
        detect_slowdown(random.lognormal(0, 0.3, before + NUM_NEWEST_TIMES), -1.0) is not None
        for _ in range(runs)
    )
    assert compute_false_alarm_rate(before) < 5e-6
    assert compute_false_alarm_rate(MAX_BASELINE_TIMES) < 5e-7
    assert alarms <= 2


def test_no_alarm_in_long_runs_without_a_change() -> None:
    random = np.random.default_rng(4)
    times = noise(random, 20_000)
    window = NUM_NEWEST_TIMES + MAX_BASELINE_TIMES
    assert not any(
        detect_slowdown(times[at - window : at], 0.10)
        for at in range(window, times.size, NUM_NEWEST_TIMES // 2)
    )


def test_short_steps_are_joined_to_blocks_that_end_with_the_newest() -> None:
    joined, size = average_blocks(np.array([0.5, *([0.03] * 7), 0.06]))
    assert size == 4
    assert joined.tolist() == pytest.approx([0.03, (0.03 * 3 + 0.06) / 4])
    assert average_blocks(np.full(5, 2.0))[1] == 1


def test_recovery_is_seen_when_the_newest_are_as_before() -> None:
    slow, quick = np.full(10, 1.5), np.full(NUM_NEWEST_TIMES, 1.02)
    assert not has_recovered(np.concatenate([slow, quick[:4]]), 1.0, 0.10)
    assert has_recovered(np.concatenate([slow, quick]), 1.0, 0.10)
