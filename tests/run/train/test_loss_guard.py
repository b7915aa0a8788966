"""Which steps a guard lets pass, skips, or stops a run at."""

import json
import math
import random
from typing import Any

import pytest

from meshwright.errors import InputError
from meshwright.run.train.loss_guard import LossGuard, LossGuardConfig, TrainingStoppedError

NAN, INF = math.nan, math.inf


def _settled(**settings: Any) -> LossGuard:
    """Return a guard that has seen forty losses around 3."""
    guard = LossGuard(LossGuardConfig(**settings))
    noise = random.Random(1)
    for step in range(40):
        assert guard.check_step(step, 3 + noise.gauss(0, 0.1), 1.0).action == "go"
    return guard


@pytest.mark.parametrize(
    ("loss", "norm", "why"),
    [(NAN, 1.0, "the loss of step 40 is nan"), (3.0, INF, "the gradient of step 40 is inf")],
)
def test_what_is_not_finite_is_skipped(loss: float, norm: float, why: str) -> None:
    guard = _settled()
    assert guard.check_step(40, loss, norm) == ("skip", why)
    assert guard.check_step(41, 3.0, 1.0).action == "go"


def test_too_many_skips_in_a_row_stop_the_run_and_name_the_way_back() -> None:
    guard = _settled(max_skipped_steps=2)
    for step in (40, 41):
        assert guard.check_step(step, NAN, 1.0).action == "skip"
    with pytest.raises(
        TrainingStoppedError,
        match=r"stopped at step 42: the loss of step 42 is nan \(step 3 in a row\); "
        r"the last good checkpoint is run/000007-step-30",
    ):
        guard.check_step(42, NAN, 1.0, last_good="run/000007-step-30")


def test_a_good_step_starts_the_count_again() -> None:
    guard = _settled(max_skipped_steps=1)
    for step in range(40, 60, 2):
        assert guard.check_step(step, NAN, 1.0).action == "skip"
        assert guard.check_step(step + 1, 3.0, 1.0).action == "go"
    assert guard.state.skipped == 10


def test_no_patience_stops_at_the_first() -> None:
    with pytest.raises(TrainingStoppedError, match="there is no checkpoint yet"):
        LossGuard(LossGuardConfig(max_skipped_steps=0)).check_step(1, INF)


def test_a_spike_is_warned_of_skipped_or_stops_the_run() -> None:
    why = "the loss of step 40 is 6"
    warned = _settled().check_step(40, 6.0, 1.0)
    assert warned.action == "warn"
    assert warned.reason.startswith(why)
    assert _settled(spike_action="skip").check_step(40, 6.0, 1.0).action == "skip"
    assert _settled(spike_action="off").check_step(40, 6.0, 1.0).action == "go"
    with pytest.raises(TrainingStoppedError, match=why):
        _settled(spike_action="stop").check_step(40, 6.0, 1.0)


def test_spikes_skipped_in_a_row_stop_the_run_too() -> None:
    guard = _settled(spike_action="skip", max_skipped_steps=3)
    for step in range(40, 43):
        assert guard.check_step(step, 6.0, 1.0).action == "skip"
    with pytest.raises(TrainingStoppedError, match="step 4 in a row"):
        guard.check_step(43, 6.0, 1.0)


def test_a_falling_loss_is_no_spike_however_fast_it_falls() -> None:
    guard = LossGuard(LossGuardConfig(spike_action="stop"))
    for step in range(300):
        assert guard.check_step(step, 2 + 9 * math.exp(-step / 20)).action == "go"
    assert guard.check_step(300, 0.001).action == "go"


def test_ordinary_noise_is_no_spike() -> None:
    guard = LossGuard(LossGuardConfig(spike_action="stop"))
    noise = random.Random(7)
    for step in range(5000):
        assert guard.check_step(step, 2.5 + noise.gauss(0, 0.2)).action == "go"


def test_earlier_spikes_hide_none_that_follow() -> None:
    guard = _settled()
    for step in range(40, 50):
        assert guard.check_step(step, 50.0).action == "warn"
    assert guard.check_step(50, 6.0).action == "warn"


def test_a_new_level_is_accepted_once_it_fills_half_of_the_window() -> None:
    guard = _settled(spike_window=40)
    verdicts = [guard.check_step(step, 6.0).action for step in range(40, 80)]
    assert verdicts[:15] == ["warn"] * 15
    assert verdicts[-15:] == ["go"] * 15


def test_equal_losses_make_no_hair_trigger() -> None:
    guard = LossGuard(LossGuardConfig(spike_action="stop"))
    for step in range(40):
        guard.check_step(step, 3.0)
    assert guard.check_step(40, 3.1).action == "go"


def test_nothing_is_a_spike_before_there_is_something_to_compare_with() -> None:
    guard = LossGuard(LossGuardConfig(spike_action="stop", spike_min_steps=32))
    for step in range(31):
        guard.check_step(step, 3.0)
    assert guard.check_step(31, 300.0).action == "go"


def test_a_resumed_guard_judges_like_an_uninterrupted_one() -> None:
    noise = random.Random(3)
    losses = [
        NAN if noise.random() < 0.1 else 3 + noise.gauss(0, 0.1) + 4 * (noise.random() < 0.1)
        for _ in range(200)
    ]
    settings = LossGuardConfig(spike_action="skip", max_skipped_steps=100)
    whole, resumed = LossGuard(settings), LossGuard(settings)
    for step, loss in enumerate(losses):
        if step % 17 == 0:
            resumed = LossGuard(settings, json.loads(json.dumps(resumed.state_dict())))
        assert whole.check_step(step, loss) == resumed.check_step(step, loss)
    assert whole.state == resumed.state


@pytest.mark.parametrize(
    ("settings", "where"),
    [
        ({"max_skipped_steps": -1}, "max_skipped_steps"),
        ({"spike_action": "panic"}, "spike_action"),
        ({"spike_threshold": 0.0}, "spike_threshold"),
        ({"spike_window": 16}, "spike_min_steps"),
    ],
)
def test_settings_without_sense_are_refused(settings: dict[str, Any], where: str) -> None:
    with pytest.raises(InputError) as raised:
        LossGuardConfig(**settings)
    assert [problem.where for problem in raised.value.problems] == [where]
