"""Why a plan wins: terms that add up, ranges that overlap, words that do not claim too much."""

import pytest
from msgspec.structs import replace

from meshwright.predict.plan import find_plans
from meshwright.predict.plan.answer.explanation import (
    TERMS,
    compare_intervals,
    compare_steps,
    explain_plan,
    format_layout_fields,
)
from meshwright.predict.plan.answer.measured_setups import get_order_record, load_measured_setups
from meshwright.predict.step.step_prediction import StepPrediction
from meshwright.spec.layout import Layout
from tests.predict.plan.tiny import answered, asked


def step(seconds: float, low: float = 0.9, high: float = 1.2, **parts: float) -> StepPrediction:
    """Return a step of so many seconds, all of them compute where nothing else is said."""
    rest = seconds - sum(parts.values())
    terms = {f"{name}_s": 0.0 for name in TERMS} | {"compute_s": rest} | parts
    return StepPrediction(
        step_s=seconds, low_s=low * seconds, high_s=high * seconds, tokens_per_s=1.0, mfu=0.5,
        **terms,
    )  # fmt: skip


def test_differences_of_all_terms_add_up_to_that_of_the_steps() -> None:
    found = explain_plan(answered())
    assert found.runner_up is not None
    whole = found.runner_up.step.step_s - found.winner.step.step_s
    assert sum(term.difference_s for term in found.terms) == pytest.approx(whole, abs=1e-9)
    assert {term.name for term in found.terms} == set(TERMS)


def test_the_largest_difference_comes_first() -> None:
    terms = compare_steps(step(10, bubble_s=1.0, tp_s=2.0), step(11, bubble_s=3.5, tp_s=1.0))
    assert [term.name for term in terms[:2]] == ["bubble", "tp"]
    assert [term.difference_s for term in terms[:2]] == [2.5, -1.0]


def test_the_reason_names_what_differs_and_what_it_saves() -> None:
    first, second = answered().plans[:2]
    fast = replace(first, step=step(10.0, tp_s=1.0))
    slow = replace(second, step=step(11.0, bubble_s=2.0))
    because = explain_plan(replace(answered(), plans=(fast, slow))).summary
    assert "saves 1 s (9.1%) of a step: 2 s of bubble less against 1 s of" in because
    names = [name for name in ("tp", "pp", "cp", "dp", "microbatch", "schedule", "zero")
             if getattr(first.layout, name) != getattr(second.layout, name)]  # fmt: skip
    assert names
    assert all(f"{name}=" in because for name in names)


def test_one_family_alone_has_nothing_to_be_compared_with() -> None:
    found = explain_plan(find_plans(asked(), most=1, execute=False))
    assert (found.runner_up, found.terms, len(found.overlaps)) == (None, (), 1)
    assert "no other" in found.summary


def test_every_plan_has_its_overlap_and_its_doubts() -> None:
    answer = answered()
    found = explain_plan(answer)
    assert len(found.overlaps) == len(found.extrapolations) == len(answer.plans)
    assert found.overlaps[0].share == 1
    assert all(0 <= one.share <= 1 for one in found.overlaps)


def test_ranges_that_do_not_meet_are_apart() -> None:
    found = compare_intervals(step(10), step(20))
    assert (found.share, found.is_distinguishable) == (0, True)
    assert "ranges do not meet" in found.description


def test_a_range_within_the_winners_overlaps_wholly() -> None:
    assert compare_intervals(step(10, 0.5, 2.0), step(11)).share == 1


def test_half_of_a_range_may_overlap() -> None:
    assert compare_intervals(step(10, 0.9, 1.1), step(11, 10 / 11, 12 / 11)).share == pytest.approx(
        0.5
    )


def test_plans_next_to_each_other_cannot_be_told_apart() -> None:
    found = compare_intervals(step(10), step(10.05))
    assert not found.is_distinguishable
    assert "cannot be told apart" in found.description


def test_the_chance_said_is_that_of_published_pairs() -> None:
    record = get_order_record(0.07)
    said = compare_intervals(step(10), step(10.7)).description
    assert f"of {record.pairs} published pairs predicted 5% to 10% apart" in said
    assert f"{record.right / record.pairs:.0%} were measured in the predicted order" in said


def test_wider_gaps_have_a_better_record() -> None:
    shares = [one.right / one.pairs for one in load_measured_setups().order]
    assert shares == sorted(shares)


def test_an_order_that_the_event_simulation_turns_round_is_said() -> None:
    first, second = answered().plans[:2]
    fast, slow = replace(first, simulated_s=3.0), replace(second, simulated_s=2.0)
    assert "plan 2 is faster" in explain_plan(replace(answered(), plans=(fast, slow))).note
    assert explain_plan(replace(answered(), plans=(slow, fast))).note == ""
    silent = replace(first, simulated_s=None)
    assert explain_plan(replace(answered(), plans=(silent, slow))).note == ""


def test_fields_of_a_layout_are_written_as_one_would_fix_them() -> None:
    layout = Layout(tp=1, dp=8, offload=("activations",), overlap_pp=False)
    names = ("tp", "offload", "overlap_pp", "shard", "recompute_ops")
    assert format_layout_fields(layout, names) == (
        "tp=1 offload=activations overlap_pp=off shard=default recompute_ops=none"
    )


def test_long_splits_are_shortened() -> None:
    layout = Layout(pp=16, stage_layers=(1, *14 * (2,), 3))
    assert format_layout_fields(layout, ("stage_layers",)) == "stage_layers=1+2+…+2+3"
