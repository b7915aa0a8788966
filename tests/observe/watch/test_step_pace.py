import numpy as np
import pytest

from meshwright.observe.watch.step_pace import smooth_ahead_steps, summarize_step_times


def test_a_host_that_waits_every_tenth_step_has_steps_of_the_mean_length() -> None:
    times = np.array(([0.001] * 9 + [0.091]) * 30)
    figures = summarize_step_times(times)
    assert figures is not None
    assert figures.median_s == pytest.approx(0.010)
    assert figures.variation == pytest.approx(0, abs=1e-9)


def test_steps_that_save_do_not_change_what_is_usual() -> None:
    times = np.full(400, 0.010)
    times[100::200] = 30.0
    assert smooth_ahead_steps(times) is times


def test_noise_is_left_as_it_is() -> None:
    times = np.random.default_rng(0).normal(0.010, 0.001, 500)
    assert smooth_ahead_steps(times) is times


def test_nothing_is_usual_before_the_first_step() -> None:
    assert summarize_step_times(np.array([])) is None
