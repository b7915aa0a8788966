"""Advantages of groups, against the formulas written out."""

import statistics

import pytest

pytest.importorskip("torch", reason="objectives are functions of torch's tensors")

import torch
from hypothesis import given
from hypothesis import strategies as st

from meshwright.errors import InputError
from meshwright.run.posttrain.objectives import group_advantages

Pairs = list[tuple[int, float]]
answers = st.lists(
    st.tuples(st.integers(0, 4), st.sampled_from([0.0, 0.1, 0.5, 1.0, -2.0])), min_size=1
)


def tensors(pairs: Pairs) -> tuple[torch.Tensor, torch.Tensor]:
    group = torch.tensor([each for each, _ in pairs])
    return torch.tensor([each for _, each in pairs], dtype=torch.float64), group


def others(pairs: Pairs, at: int, *, itself: bool) -> list[float]:
    group = pairs[at][0]
    return [r for i, (g, r) in enumerate(pairs) if g == group and (itself or i != at)]


@given(answers)
def test_centred_is_reward_less_mean_of_group(pairs: Pairs) -> None:
    want = [r - statistics.fmean(others(pairs, i, itself=True)) for i, (_, r) in enumerate(pairs)]
    torch.testing.assert_close(
        group_advantages.centered_advantages(*tensors(pairs)),
        torch.tensor(want, dtype=torch.float64),
    )


@given(answers)
def test_z_scored_divides_by_spread_of_group(pairs: Pairs) -> None:
    found = group_advantages.normalized_advantages(*tensors(pairs), epsilon=1e-6).tolist()
    for i, (_, reward) in enumerate(pairs):
        group = others(pairs, i, itself=True)
        if len(set(group)) == 1:
            assert found[i] == 0.0
        else:
            want = (reward - statistics.fmean(group)) / (statistics.stdev(group) + 1e-6)
            assert found[i] == pytest.approx(want, abs=1e-9)


@given(answers)
def test_leave_one_out_compares_with_the_others(pairs: Pairs) -> None:
    found = group_advantages.rloo_advantages(*tensors(pairs)).tolist()
    for i, (_, reward) in enumerate(pairs):
        rest = others(pairs, i, itself=False)
        assert found[i] == pytest.approx(reward - statistics.fmean(rest) if rest else 0, abs=1e-9)


def test_equal_rewards_give_exactly_nothing() -> None:
    reward = torch.full((7,), 0.1)  # whose mean of seven is not 0.1
    group = torch.zeros(7, dtype=torch.int64)
    for each in (
        group_advantages.centered_advantages,
        group_advantages.normalized_advantages,
        group_advantages.rloo_advantages,
    ):
        assert each(reward, group).eq(0).all()
    assert not group_advantages.has_signal(reward, group).any()


@pytest.mark.parametrize("scale", [3e30, 1.5e38, 1e-25])
def test_rewards_of_any_size_have_the_scores_of_their_order(scale: float) -> None:
    group = torch.tensor([0, 0, 0, 1, 1])
    reward = torch.tensor([1.0, -1.0, 2.0, 1.0, 0.0])
    wanted = group_advantages.normalized_advantages(reward.double(), group, epsilon=0.0).float()
    found = group_advantages.normalized_advantages(reward * scale, group, epsilon=0.0)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, wanted)


def test_filter_keeps_whole_groups_that_differ() -> None:
    reward = torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0, 0.0])
    group = torch.tensor([5, 9, 5, 9, 7, 7])
    kept = group_advantages.has_signal(reward, group)
    assert kept.tolist() == [False, True, False, True, False, False]


def test_overlong_penalty_falls_over_the_margin() -> None:
    length = torch.tensor([10, 80, 85, 90, 100, 130])
    found = group_advantages.overlong_penalty(length, longest=100, margin=20)
    torch.testing.assert_close(found, torch.tensor([0.0, 0.0, -0.25, -0.5, -1.0, -1.0]))


def test_margin_must_fit() -> None:
    with pytest.raises(InputError, match="margin is 0"):
        group_advantages.overlong_penalty(torch.tensor([1]), longest=4, margin=0)


def test_reward_that_is_no_number_is_named() -> None:
    with pytest.raises(InputError, match=r"rewards\[1\]: is nan"):
        group_advantages.centered_advantages(
            torch.tensor([1.0, float("nan")]), torch.tensor([0, 0])
        )
