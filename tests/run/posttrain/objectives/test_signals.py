"""Signals add up over microbatches, and say in words when a step is silent."""

import pytest

pytest.importorskip("torch", reason="objectives are functions of torch's tensors")

import torch

from meshwright.errors import InputError
from meshwright.run.posttrain.objectives import policy, signals
from meshwright.run.posttrain.objectives.tokens import Tokens, packed, padded


def measured(rows: slice) -> signals.PolicySignals:
    logp = torch.tensor([[0.5, 0.0, 9.0], [-0.4, 0.1, 0.0], [0.0, 9.0, 9.0]])[rows]
    mask = torch.tensor([[1, 1, 0], [1, 1, 1], [0, 0, 0]], dtype=torch.bool)[rows]
    old, advantage = torch.zeros_like(logp), torch.ones_like(logp)
    tokens = padded(mask)
    loss = policy.clipped(logp, old, advantage, tokens)
    return signals.policy_signals(
        loss, tokens, old=logp, sampled=old, entropy=logp.abs(), mismatch=(logp > 0).float()
    )


def test_figures_written_out() -> None:
    found = measured(slice(None)).figures()
    assert found == pytest.approx(
        {
            "clip_share": 1 / 5,  # only the first is above 1.2 with an advantage above 0
            "dropped_share": 3 / 5,
            "ratio_min": 2.718281828**-0.4,
            "ratio_max": 2.718281828**0.5,
            "logp_gap_mean": 1.0 / 5,
            "logp_gap_max": 0.5,
            "entropy": 1.0 / 5,
        },
        rel=1e-6,
    )


def test_parts_add_up_to_the_whole() -> None:
    parts = [measured(slice(i, i + 1)) for i in range(3)]
    assert parts[2] == signals.PolicySignals()
    whole = parts[0] + parts[1] + parts[2]
    assert whole.figures() == pytest.approx(measured(slice(None)).figures())


def test_rewards_of_a_step() -> None:
    reward = torch.tensor([1.0, 0.0, 1.0, 1.0])
    found = signals.reward_signals(reward, torch.tensor([3, 3, 8, 8]))
    assert (found.mean, found.std) == (0.75, 0.5)
    assert (found.groups, found.silent) == (2, 1)
    assert found.sentence().startswith("1 of 2 groups carry no signal")


def test_silent_step_is_said_so() -> None:
    group = torch.tensor([0, 0, 1, 1])
    nothing = signals.reward_signals(torch.zeros(4), group).sentence()
    assert "carries no signal" in nothing
    assert "all are 0" in nothing
    unequal = signals.reward_signals(torch.tensor([0.0, 0.0, 1.0, 1.0]), group).sentence()
    assert "more answers" in unequal
    assert signals.reward_signals(torch.tensor([0.0, 1.0, 1.0, 0.0]), group).sentence() == ""


def test_tokens_that_do_not_fit_are_refused() -> None:
    mask = torch.ones(4, dtype=torch.bool)
    with pytest.raises(InputError, match="add up to 3"):
        packed(mask, [1, 2])
    with pytest.raises(InputError, match=r"mask is torch\.int64"):
        padded(torch.ones(2, 2, dtype=torch.int64))
    with pytest.raises(InputError, match="one value for every token"):
        packed(mask, [4]).sums(torch.ones(3))
    with pytest.raises(InputError, match="on several ranks"):
        Tokens(mask, torch.zeros(4, dtype=torch.int64), 1, lambda x: x).rows(torch.ones(4))
