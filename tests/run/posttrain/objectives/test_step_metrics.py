"""Signals add up over microbatches, and say in words when a step is silent."""

import pytest

pytest.importorskip("torch", reason="objectives are functions of torch's tensors")

import torch

from meshwright.errors import InputError
from meshwright.run.posttrain.objectives import policy_loss, step_metrics
from meshwright.run.posttrain.objectives.masked_tokens import (
    MaskedTokens,
    packed_tokens,
    padded_tokens,
)


def measured(rows: slice) -> step_metrics.PolicyMetrics:
    logp = torch.tensor([[0.5, 0.0, 9.0], [-0.4, 0.1, 0.0], [0.0, 9.0, 9.0]])[rows]
    mask = torch.tensor([[1, 1, 0], [1, 1, 1], [0, 0, 0]], dtype=torch.bool)[rows]
    old, advantage = torch.zeros_like(logp), torch.ones_like(logp)
    tokens = padded_tokens(mask)
    loss = policy_loss.ppo_clip_loss(logp, old, advantage, tokens)
    return step_metrics.compute_policy_metrics(
        loss, tokens, old=logp, sampled=old, entropy=logp.abs(), mismatch=(logp > 0).float()
    )


def test_figures_written_out() -> None:
    found = measured(slice(None)).to_dict()
    assert found == pytest.approx(
        {
            "clip_fraction": 1 / 5,  # only the first is above 1.2 with an advantage above 0
            "dropped_fraction": 3 / 5,
            "ratio_min": 2.718281828**-0.4,
            "ratio_max": 2.718281828**0.5,
            "logprob_gap_mean": 1.0 / 5,
            "logprob_gap_max": 0.5,
            "entropy": 1.0 / 5,
        },
        rel=1e-6,
    )


def test_parts_add_up_to_the_whole() -> None:
    parts = [measured(slice(i, i + 1)) for i in range(3)]
    assert parts[2] == step_metrics.PolicyMetrics()
    whole = parts[0] + parts[1] + parts[2]
    assert whole.to_dict() == pytest.approx(measured(slice(None)).to_dict())


def test_rewards_of_a_step() -> None:
    reward = torch.tensor([1.0, 0.0, 1.0, 1.0])
    found = step_metrics.compute_reward_metrics(reward, torch.tensor([3, 3, 8, 8]))
    assert (found.mean, found.std) == (0.75, 0.5)
    assert (found.groups, found.groups_without_signal) == (2, 1)
    assert found.signal_warning().startswith("1 of 2 groups carry no signal")


def test_silent_step_is_said_so() -> None:
    group = torch.tensor([0, 0, 1, 1])
    nothing = step_metrics.compute_reward_metrics(torch.zeros(4), group).signal_warning()
    assert "carries no signal" in nothing
    assert "all are 0" in nothing
    unequal = step_metrics.compute_reward_metrics(
        torch.tensor([0.0, 0.0, 1.0, 1.0]), group
    ).signal_warning()
    assert "more answers" in unequal
    assert (
        step_metrics.compute_reward_metrics(
            torch.tensor([0.0, 1.0, 1.0, 0.0]), group
        ).signal_warning()
        == ""
    )


def test_tokens_that_do_not_fit_are_refused() -> None:
    mask = torch.ones(4, dtype=torch.bool)
    with pytest.raises(InputError, match="add up to 3"):
        packed_tokens(mask, [1, 2])
    with pytest.raises(InputError, match=r"mask is torch\.int64"):
        padded_tokens(torch.ones(2, 2, dtype=torch.int64))
    with pytest.raises(InputError, match="one value for every token"):
        packed_tokens(mask, [4]).sum_per_sequence(torch.ones(3))
    with pytest.raises(InputError, match="on several ranks"):
        MaskedTokens(mask, torch.zeros(4, dtype=torch.int64), 1, lambda x: x).pad_to_rows(
            torch.ones(4)
        )
