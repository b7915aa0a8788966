"""Reinforcement learning on a virtual clock: time adds up, order is the controller's."""

from typing import Any

import pytest
from msgspec.structs import replace

from meshwright.errors import InputError
from meshwright.policy.rollout import PLACEMENTS, Placement
from meshwright.predict.rl import outcome_of, predict_rl, simulate
from meshwright.predict.rl.framework import MESHWRIGHT
from meshwright.predict.rl.prices import prices_of
from tests.predict.rl.setups import EVEN, SKEWED, rounds, setup

STALE: tuple[Placement, ...] = ("one-step-off", "asynchronous")


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_what_the_trainer_does_and_waits_for_is_the_whole_step(placement: Placement) -> None:
    found = outcome_of(simulate(setup(placement)))
    spent = found.training_s + found.sync_s + found.phases_s
    assert spent + sum(found.waits_s["trainer"].values()) == pytest.approx(found.step_s)
    assert (found.phases_s > 0) == (placement == "colocated")
    assert found.most_stale == (1 if placement in STALE else 0)
    assert 0 < found.engines_busy <= 1
    assert 0 <= found.bubble < 1


def test_without_staleness_asynchronous_takes_exactly_as_long_as_synchronous() -> None:
    exact = simulate(setup("disaggregated"))
    streamed = simulate(setup("asynchronous", max_staleness=0))
    assert streamed.steps == exact.steps
    assert streamed.doings == exact.doings


def test_steps_that_overlap_are_shorter() -> None:
    found = {one: outcome_of(simulate(setup(one))).step_s for one in PLACEMENTS}
    assert found["one-step-off"] < found["disaggregated"]
    assert found["asynchronous"] < found["disaggregated"]
    # No step is shorter than its training and its sync.
    one = outcome_of(simulate(setup("asynchronous")))
    assert one.step_s >= one.training_s + one.sync_s - 1e-9


def test_skewed_lengths_cost_time_and_staleness_hides_it() -> None:
    many = rounds(prompts=16)
    exact = predict_rl(setup("disaggregated", rounds=many))
    streamed = predict_rl(setup("asynchronous", rounds=many, max_staleness=3))
    assert exact.skew is not None
    assert streamed.skew is not None
    assert exact.skew > 0.1
    assert streamed.skew < exact.skew
    even = predict_rl(setup("disaggregated", rounds=rounds(output=EVEN)))
    assert even.skew == pytest.approx(0, abs=1e-6)


def test_engines_stand_still_while_weights_come_in() -> None:
    run = simulate(setup("asynchronous", max_staleness=2, rounds=rounds(output=SKEWED)))
    syncs = [span for span in run.doings if span.name == "sync"]
    assert len(syncs) == len(run.steps) - 1
    interrupted = 0
    for sync in syncs:
        for did in run.engines:
            inside = (did.start_s > sync.start_s) & (did.start_s < sync.end_s)
            assert not inside.any()
            interrupted += bool(((did.start_s < sync.start_s) & (did.end_s > sync.start_s)).any())
    assert interrupted > 0


def test_groups_that_got_too_old_are_let_go_and_every_step_is_still_whole() -> None:
    # Steps take what has ended: with few, long groups some are overtaken again and again.
    long = rounds(prompts=2, samples=1, output=type(SKEWED)(median=400, sigma=1.6), longest=30000)
    run = simulate(
        setup("asynchronous", max_staleness=1, rounds=long, measured=40, too_old="again")
    )
    assert run.dropped
    assert len(run.steps) == run.setup.arrangement.steps
    assert all(len(one.staleness) == 2 for one in run.steps)
    assert max(stale for one in run.steps for stale in one.staleness) == 1


def test_fewer_groups_under_way_are_fresher() -> None:
    slow = rounds(prompts=16, output=type(EVEN)(tokens=3000))
    many = outcome_of(simulate(setup("asynchronous", max_staleness=4, rounds=slow)))
    few = outcome_of(simulate(setup("asynchronous", max_staleness=4, rounds=slow, running=16)))
    assert few.staleness < many.staleness
    assert few.decoding < many.decoding


def test_the_same_setup_gives_the_same_run() -> None:
    assert simulate(setup("asynchronous")).steps == simulate(setup("asynchronous")).steps
    other = simulate(setup("asynchronous", rounds=rounds(seed=1)))
    assert other.steps != simulate(setup("asynchronous")).steps


def test_training_is_priced_by_its_tokens() -> None:
    prices = prices_of(setup("disaggregated"))
    batch = [rounds().drawn(group) for group in range(8)]
    once = prices.training_s(batch)
    step = prices.step
    fixed = step.optimizer_s + step.dp_s
    assert prices.training_s(batch * 2) - fixed == pytest.approx(2 * (once - fixed))
    without = prices_of(setup("disaggregated", rounds=rounds(forwards=0))).training_s(batch)
    assert without == pytest.approx(
        (step.step_s - fixed) * sum(one.tokens for one in batch) / prices.tokens + fixed
    )
    assert once > without


def test_one_step_off_and_asynchronous_differ_by_the_ends_of_long_answers() -> None:
    def step_s(placement: Placement, **given: Any) -> float:
        asked = rounds(prompts=64, samples=16, output=given.pop("output"))
        found = predict_rl(setup(placement, rounds=asked, measured=8, **given), even=False)
        return found.step_s

    even = [step_s(placement, output=EVEN) for placement in STALE]
    assert even[0] == pytest.approx(even[1], rel=1e-6)
    anew, kept = (
        step_s("asynchronous", output=SKEWED, framework=replace(MESHWRIGHT, recomputes=recomputes))
        for recomputes in (True, False)
    )
    assert kept == pytest.approx(anew, rel=0.05)
    assert step_s("asynchronous", output=SKEWED, max_staleness=2) < min(
        anew, step_s("one-step-off", output=SKEWED)
    )


def test_weights_travel_faster_inside_a_node() -> None:
    near = prices_of(setup("colocated", 16, 16)).sync
    far = prices_of(setup("disaggregated")).sync
    assert 0 < near.seconds < far.seconds
    # Trainers and engines of two GPUs each cut the model alike: nothing has to go anywhere.
    assert near.moved_bytes == 0
    assert far.moved_bytes > 4 * 2 * 8e9, "four engines get eight billion numbers of two bytes"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"placement": "colocated", "rollout": 4}, "which are the same"),
        ({"placement": "disaggregated", "rollout": 16}, "24 GPUs are needed"),
        ({"placement": "one-step-off", "max_staleness": 2}, "one-step-off means 1"),
        ({"placement": "disaggregated", "measured": 0}, "measured"),
        ({"placement": "one-step-off", "too_old": "again"}, "no group gets too old"),
    ],
)
def test_what_cannot_be_is_refused(given: dict[str, object], said: str) -> None:
    with pytest.raises(InputError, match=said):
        setup(**given)  # type: ignore[arg-type]


def test_a_sample_that_fits_no_engine_is_refused() -> None:
    huge = rounds(output=type(EVEN)(tokens=2_000_000), longest=2_000_000, prompts=1, samples=1)
    with pytest.raises(InputError, match=r"longer than an engine's cache|needs .* of"):
        simulate(setup("disaggregated", rounds=huge))
