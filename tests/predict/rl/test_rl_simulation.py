"""Reinforcement learning on a virtual clock: time adds up, order is the controller's."""

from typing import Any

import pytest
from msgspec.structs import replace

from meshwright.errors import InputError
from meshwright.policy.rollout import PLACEMENTS, Placement
from meshwright.predict.rl import compute_rl_metrics, predict_rl, simulate_rl
from meshwright.predict.rl.rl_framework import MESHWRIGHT
from meshwright.predict.rl.trainer_costs import build_trainer_costs
from tests.predict.rl.setups import EVEN, SKEWED, rounds, setup

STALE: tuple[Placement, ...] = ("one_step_off", "async")


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_what_the_trainer_does_and_waits_for_is_the_whole_step(placement: Placement) -> None:
    found = compute_rl_metrics(simulate_rl(setup(placement)))
    spent = found.training_s + found.sync_s + found.memory_phases_s
    assert spent + sum(found.waits_s["trainer"].values()) == pytest.approx(found.step_s)
    assert (found.memory_phases_s > 0) == (placement == "colocated")
    assert found.max_staleness == (1 if placement in STALE else 0)
    assert 0 < found.engine_utilization <= 1
    assert 0 <= found.bubble < 1


def test_without_staleness_asynchronous_takes_exactly_as_long_as_synchronous() -> None:
    exact = simulate_rl(setup("disaggregated"))
    streamed = simulate_rl(setup("async", max_staleness=0))
    assert streamed.steps == exact.steps
    assert streamed.trainer_spans == exact.trainer_spans


def test_steps_that_overlap_are_shorter() -> None:
    found = {one: compute_rl_metrics(simulate_rl(setup(one))).step_s for one in PLACEMENTS}
    assert found["one_step_off"] < found["disaggregated"]
    assert found["async"] < found["disaggregated"]
    # No step is shorter than its training and its sync.
    one = compute_rl_metrics(simulate_rl(setup("async")))
    assert one.step_s >= one.training_s + one.sync_s - 1e-9


def test_skewed_lengths_cost_time_and_staleness_hides_it() -> None:
    many = rounds(prompts_per_step=16)
    exact = predict_rl(setup("disaggregated", rollout_batch=many))
    streamed = predict_rl(setup("async", rollout_batch=many, max_staleness=3))
    assert exact.length_skew_slowdown is not None
    assert streamed.length_skew_slowdown is not None
    assert exact.length_skew_slowdown > 0.1
    assert streamed.length_skew_slowdown < exact.length_skew_slowdown
    even = predict_rl(setup("disaggregated", rollout_batch=rounds(response_lengths=EVEN)))
    assert even.length_skew_slowdown == pytest.approx(0, abs=1e-6)


def test_engines_stand_still_while_weights_come_in() -> None:
    run = simulate_rl(
        setup("async", max_staleness=2, rollout_batch=rounds(response_lengths=SKEWED))
    )
    syncs = [span for span in run.trainer_spans if span.name == "sync"]
    assert len(syncs) == len(run.steps) - 1
    interrupted = 0
    for sync in syncs:
        for did in run.engine_runs:
            inside = (did.start_s > sync.start_s) & (did.start_s < sync.end_s)
            assert not inside.any()
            interrupted += bool(((did.start_s < sync.start_s) & (did.end_s > sync.start_s)).any())
    assert interrupted > 0


def test_groups_that_got_too_old_are_let_go_and_every_step_is_still_whole() -> None:
    # Steps take what has ended: with few, long groups some are overtaken again and again.
    long = rounds(
        prompts_per_step=2,
        group_size=1,
        response_lengths=type(SKEWED)(median=400, sigma=1.6),
        max_response_tokens=30000,
    )
    run = simulate_rl(
        setup(
            "async",
            max_staleness=1,
            rollout_batch=long,
            measured_steps=40,
            stale_policy="regenerate",
        )
    )
    assert run.dropped_at_s
    assert len(run.steps) == run.setup.rollout_policy.total_steps
    assert all(len(one.staleness) == 2 for one in run.steps)
    assert max(stale for one in run.steps for stale in one.staleness) == 1


def test_fewer_groups_under_way_are_fresher() -> None:
    slow = rounds(prompts_per_step=16, response_lengths=type(EVEN)(tokens=3000))
    many = compute_rl_metrics(simulate_rl(setup("async", max_staleness=4, rollout_batch=slow)))
    few = compute_rl_metrics(
        simulate_rl(setup("async", max_staleness=4, rollout_batch=slow, max_running_groups=16))
    )
    assert few.mean_staleness < many.mean_staleness
    assert few.mean_decode_batch < many.mean_decode_batch


def test_the_same_setup_gives_the_same_run() -> None:
    assert simulate_rl(setup("async")).steps == simulate_rl(setup("async")).steps
    other = simulate_rl(setup("async", rollout_batch=rounds(seed=1)))
    assert other.steps != simulate_rl(setup("async")).steps


def test_training_is_priced_by_its_tokens() -> None:
    prices = build_trainer_costs(setup("disaggregated"))
    batch = [rounds().sample_group(group) for group in range(8)]
    once = prices.training_s(batch)
    step = prices.step
    fixed = step.optimizer_s + step.dp_s
    assert prices.training_s(batch * 2) - fixed == pytest.approx(2 * (once - fixed))
    without = build_trainer_costs(
        setup("disaggregated", rollout_batch=rounds(logprob_passes=0))
    ).training_s(batch)
    assert without == pytest.approx(
        (step.step_s - fixed) * sum(one.tokens for one in batch) / prices.tokens + fixed
    )
    assert once > without


def test_one_step_off_and_asynchronous_differ_by_the_ends_of_long_answers() -> None:
    def step_s(placement: Placement, **given: Any) -> float:
        asked = rounds(
            prompts_per_step=64,
            group_size=16,
            response_lengths=given.pop("response_lengths"),
        )
        found = predict_rl(
            setup(placement, rollout_batch=asked, measured_steps=8, **given), even=False
        )
        return found.step_s

    even = [step_s(placement, response_lengths=EVEN) for placement in STALE]
    assert even[0] == pytest.approx(even[1], rel=1e-6)
    anew, kept = (
        step_s(
            "async",
            response_lengths=SKEWED,
            framework=replace(MESHWRIGHT, recomputes_kv_cache=recomputes),
        )
        for recomputes in (True, False)
    )
    assert kept == pytest.approx(anew, rel=0.05)
    assert step_s("async", response_lengths=SKEWED, max_staleness=2) < min(
        anew, step_s("one_step_off", response_lengths=SKEWED)
    )


def test_weights_travel_faster_inside_a_node() -> None:
    near = build_trainer_costs(setup("colocated", 16, 16)).sync
    far = build_trainer_costs(setup("disaggregated")).sync
    assert 0 < near.seconds < far.seconds
    # Trainers and engines of two GPUs each cut the model alike: nothing has to go anywhere.
    assert near.moved_bytes == 0
    assert far.moved_bytes > 4 * 2 * 8e9, "four engines get eight billion numbers of two bytes"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"placement": "colocated", "rollout": 4}, "which are the same"),
        ({"placement": "disaggregated", "rollout": 16}, "24 GPUs are needed"),
        ({"placement": "one_step_off", "max_staleness": 2}, "one_step_off means 1"),
        ({"placement": "disaggregated", "measured_steps": 0}, "measured"),
        ({"placement": "one_step_off", "stale_policy": "regenerate"}, "no group gets too old"),
    ],
)
def test_what_cannot_be_is_refused(given: dict[str, object], said: str) -> None:
    with pytest.raises(InputError, match=said):
        setup(**given)  # type: ignore[arg-type]


def test_a_sample_that_fits_no_engine_is_refused() -> None:
    huge = rounds(
        response_lengths=type(EVEN)(tokens=2_000_000),
        max_response_tokens=2_000_000,
        prompts_per_step=1,
        group_size=1,
    )
    with pytest.raises(InputError, match=r"longer than an engine's cache|needs .* of"):
        simulate_rl(setup("disaggregated", rollout_batch=huge))
