"""Which steps a guard lets pass, skips, or stops a run at."""

import json
import math
import random
from typing import Any

import pytest

from meshwright.errors import InputError
from meshwright.run.train.guards import Guard, GuardSettings, TrainingStopped

NAN, INF = math.nan, math.inf


def _settled(**settings: Any) -> Guard:
    """Return a guard that has seen forty losses around 3."""
    guard = Guard(GuardSettings(**settings))
    noise = random.Random(1)
    for step in range(40):
        assert guard.judge(step, 3 + noise.gauss(0, 0.1), 1.0).action == "go"
    return guard


@pytest.mark.parametrize(
    ("loss", "norm", "why"),
    [(NAN, 1.0, "the loss of step 40 is nan"), (3.0, INF, "the gradient of step 40 is inf")],
)
def test_what_is_not_finite_is_skipped(loss: float, norm: float, why: str) -> None:
    guard = _settled()
    assert guard.judge(40, loss, norm) == ("skip", why)
    assert guard.judge(41, 3.0, 1.0).action == "go"


def test_too_many_skips_in_a_row_stop_the_run_and_name_the_way_back() -> None:
    guard = _settled(most_skipped=2)
    for step in (40, 41):
        assert guard.judge(step, NAN, 1.0).action == "skip"
    with pytest.raises(
        TrainingStopped,
        match=r"stopped at step 42: the loss of step 42 is nan \(step 3 in a row\); "
        r"the last good checkpoint is run/000007-step-30",
    ):
        guard.judge(42, NAN, 1.0, last_good="run/000007-step-30")


def test_a_good_step_starts_the_count_again() -> None:
    guard = _settled(most_skipped=1)
    for step in range(40, 60, 2):
        assert guard.judge(step, NAN, 1.0).action == "skip"
        assert guard.judge(step + 1, 3.0, 1.0).action == "go"
    assert guard.state.skipped == 10


def test_no_patience_stops_at_the_first() -> None:
    with pytest.raises(TrainingStopped, match="there is no checkpoint yet"):
        Guard(GuardSettings(most_skipped=0)).judge(1, INF)


def test_a_spike_is_warned_of_skipped_or_stops_the_run() -> None:
    why = "the loss of step 40 is 6"
    warned = _settled().judge(40, 6.0, 1.0)
    assert warned.action == "warn"
    assert warned.why.startswith(why)
    assert _settled(spike_action="skip").judge(40, 6.0, 1.0).action == "skip"
    assert _settled(spike_action="off").judge(40, 6.0, 1.0).action == "go"
    with pytest.raises(TrainingStopped, match=why):
        _settled(spike_action="stop").judge(40, 6.0, 1.0)


def test_spikes_skipped_in_a_row_stop_the_run_too() -> None:
    guard = _settled(spike_action="skip", most_skipped=3)
    for step in range(40, 43):
        assert guard.judge(step, 6.0, 1.0).action == "skip"
    with pytest.raises(TrainingStopped, match="step 4 in a row"):
        guard.judge(43, 6.0, 1.0)


def test_a_falling_loss_is_no_spike_however_fast_it_falls() -> None:
    guard = Guard(GuardSettings(spike_action="stop"))
    for step in range(300):
        assert guard.judge(step, 2 + 9 * math.exp(-step / 20)).action == "go"
    assert guard.judge(300, 0.001).action == "go"


def test_ordinary_noise_is_no_spike() -> None:
    guard = Guard(GuardSettings(spike_action="stop"))
    noise = random.Random(7)
    for step in range(5000):
        assert guard.judge(step, 2.5 + noise.gauss(0, 0.2)).action == "go"


def test_earlier_spikes_hide_none_that_follow() -> None:
    guard = _settled()
    for step in range(40, 50):
        assert guard.judge(step, 50.0).action == "warn"
    assert guard.judge(50, 6.0).action == "warn"


def test_a_new_level_is_accepted_once_it_fills_half_of_the_window() -> None:
    guard = _settled(spike_window=40)
    verdicts = [guard.judge(step, 6.0).action for step in range(40, 80)]
    assert verdicts[:15] == ["warn"] * 15
    assert verdicts[-15:] == ["go"] * 15


def test_equal_losses_make_no_hair_trigger() -> None:
    guard = Guard(GuardSettings(spike_action="stop"))
    for step in range(40):
        guard.judge(step, 3.0)
    assert guard.judge(40, 3.1).action == "go"


def test_nothing_is_a_spike_before_there_is_something_to_compare_with() -> None:
    guard = Guard(GuardSettings(spike_action="stop", spike_after=32))
    for step in range(31):
        guard.judge(step, 3.0)
    assert guard.judge(31, 300.0).action == "go"


def test_a_resumed_guard_judges_like_an_uninterrupted_one() -> None:
    noise = random.Random(3)
    losses = [
        NAN if noise.random() < 0.1 else 3 + noise.gauss(0, 0.1) + 4 * (noise.random() < 0.1)
        for _ in range(200)
    ]
    settings = GuardSettings(spike_action="skip", most_skipped=100)
    whole, resumed = Guard(settings), Guard(settings)
    for step, loss in enumerate(losses):
        if step % 17 == 0:
            resumed = Guard(settings, json.loads(json.dumps(resumed.to_save())))
        assert whole.judge(step, loss) == resumed.judge(step, loss)
    assert whole.state == resumed.state


@pytest.mark.parametrize(
    ("settings", "where"),
    [
        ({"most_skipped": -1}, "most_skipped"),
        ({"spike_action": "panic"}, "spike_action"),
        ({"spike_deviations": 0.0}, "spike_deviations"),
        ({"spike_window": 16}, "spike_after"),
    ],
)
def test_settings_without_sense_are_refused(settings: dict[str, Any], where: str) -> None:
    with pytest.raises(InputError) as raised:
        GuardSettings(**settings)
    assert [problem.where for problem in raised.value.problems] == [where]
