"""Policy losses and weights against mismatch, written out token by token."""

import math

import pytest

pytest.importorskip("torch", reason="objectives are functions of torch's tensors")

import torch
from hypothesis import given
from hypothesis import strategies as st

from meshwright.errors import InputError
from meshwright.run.posttrain.objectives import importance_correction, loss_weights, policy_loss
from meshwright.run.posttrain.objectives.masked_tokens import MaskedTokens, padded_tokens

numbers = st.floats(-2, 2, allow_nan=False)
three = st.lists(st.tuples(numbers, numbers, numbers), min_size=1, max_size=6)


def tensors(rows: list[tuple[float, float, float]]) -> tuple[torch.Tensor, ...]:
    logp, old, advantage = torch.tensor(rows, dtype=torch.float64).t().unsqueeze(1)
    return logp.clone().requires_grad_(), old, advantage


def all_of(x: torch.Tensor) -> MaskedTokens:
    return padded_tokens(torch.ones(x.shape, dtype=torch.bool))


@given(three)
def test_clipped_is_the_pessimistic_of_two(rows: list[tuple[float, float, float]]) -> None:
    logp, old, advantage = tensors(rows)
    found = policy_loss.ppo_clip_loss(
        logp, old, advantage, all_of(logp), clip_ratio_low=0.2, clip_ratio_high=0.28
    )
    (slope,) = torch.autograd.grad(found.losses.sum(), logp)
    for i, (new, before, a) in enumerate(rows):
        ratio = math.exp(new - before)
        bounded = min(max(ratio, 0.8), 1.28)
        assert found.losses[0, i].item() == pytest.approx(-min(ratio * a, bounded * a), abs=1e-9)
        still = (a > 0 and ratio > 1.28) or (a < 0 and ratio < 0.8)
        # On a bound itself, or where A is so small that both products are one number, either holds.
        if min(abs(ratio - 1.28), abs(ratio - 0.8), abs(a)) > 1e-9:
            assert bool(found.clipped[0, i]) == still
            assert slope[0, i].item() == pytest.approx(0 if still else -ratio * a, abs=1e-9)


def test_dual_clip_bounds_what_a_bad_token_costs() -> None:
    logp, old, advantage = torch.tensor([[5.0]]), torch.tensor([[0.0]]), torch.tensor([[-2.0]])
    plain = policy_loss.ppo_clip_loss(logp, old, advantage, all_of(logp))
    assert plain.losses.item() == pytest.approx(2 * math.exp(5))
    bound = policy_loss.ppo_clip_loss(logp, old, advantage, all_of(logp), most=3.0)
    assert bound.losses.item() == pytest.approx(6.0)
    assert bound.clipped.item()


def test_sequence_ratio_has_value_and_gradient_of_the_sequence() -> None:
    generator = torch.Generator().manual_seed(1)
    logp, noise = torch.randn(2, 3, 5, generator=generator, dtype=torch.float64) / 99
    old = logp - torch.tensor([[0.1], [0.02], [0.02]]) + noise
    logp.requires_grad_()
    mask = torch.tensor([[1, 1, 0, 1, 0], [1, 0, 0, 0, 0], [1, 1, 1, 1, 1]], dtype=torch.bool)
    advantage = torch.tensor([1.5, -0.5, 0.7], dtype=torch.float64)
    tokens = padded_tokens(mask)
    loss = policy_loss.ppo_clip_loss(
        logp,
        old,
        tokens.broadcast_to_tokens(advantage),
        tokens,
        clip_ratio_low=0.03,
        clip_ratio_high=0.04,
        level="sequence",
    )
    weight = loss_weights.compute_token_weights(
        tokens, loss_weights.sum_step_totals([tokens]), "sequence", dtype=torch.float64
    )
    found = loss_weights.weighted_sum(loss.losses, weight)
    # arXiv 2507.18071 Eq. 5 and 7, with one ratio for each sequence.
    ratio = (((logp - old) * mask).sum(1) / mask.sum(1)).exp()
    want = -torch.minimum(ratio * advantage, ratio.clamp(0.97, 1.04) * advantage).mean()
    torch.testing.assert_close(found, want)
    torch.testing.assert_close(torch.autograd.grad(found, logp), torch.autograd.grad(want, logp))
    assert loss.clipped.any(1).tolist() == [True, False, False]


@given(three)
def test_cispo_weighs_every_token(rows: list[tuple[float, float, float]]) -> None:
    logp, old, advantage = tensors(rows)
    found = policy_loss.cispo_loss(logp, old, advantage, all_of(logp), clip_ratio_high=1.0)
    (slope,) = torch.autograd.grad(found.losses.sum(), logp)
    for i, (new, before, a) in enumerate(rows):
        weight = min(math.exp(new - before), 2.0)
        assert found.losses[0, i].item() == pytest.approx(-weight * a * new, abs=1e-9)
        assert slope[0, i].item() == pytest.approx(-weight * a, abs=1e-9)


def test_first_step_on_policy_has_the_same_gradient_in_all_of_them() -> None:
    logp = torch.randn(2, 4, dtype=torch.float64).requires_grad_()
    advantage = torch.randn(2, 4, dtype=torch.float64)
    tokens, old = all_of(logp), logp.detach()
    losses = (
        policy_loss.ppo_clip_loss(logp, old, advantage, tokens),
        policy_loss.cispo_loss(logp, old, advantage, tokens),
        policy_loss.reinforce_loss(logp, advantage, tokens),
    )
    for each in losses:
        (slope,) = torch.autograd.grad(each.losses.sum(), logp)
        torch.testing.assert_close(slope, -advantage)
        assert not each.clipped.any()


def test_padding_may_hold_anything() -> None:
    logp = torch.tensor([[-1.0, float("nan")], [-2.0, -math.inf]], requires_grad=True)
    tokens = padded_tokens(torch.tensor([[True, False], [True, False]]))
    bad = torch.tensor([[-1.1, math.inf], [-2.0, float("nan")]])
    for level in ("token", "sequence"):
        loss = policy_loss.ppo_clip_loss(logp, bad, bad, tokens, level=level)
        weight = loss_weights.compute_token_weights(
            tokens, loss_weights.sum_step_totals([tokens]), "sequence"
        )
        weight = weight * importance_correction.truncated_importance_weights(bad, bad, tokens)
        (slope,) = torch.autograd.grad(loss_weights.weighted_sum(loss.losses, weight), logp)
        assert torch.isfinite(slope).all()
        assert slope[:, 1].eq(0).all()
        assert slope[:, 0].ne(0).all()


def test_absurd_ratio_stays_finite_and_moves_nothing() -> None:
    logp = torch.tensor([[0.0]], requires_grad=True)
    loss = policy_loss.ppo_clip_loss(
        logp, torch.tensor([[-300.0]]), torch.tensor([[-1.0]]), all_of(logp)
    )
    (slope,) = torch.autograd.grad(loss.losses.sum(), logp)
    assert math.isfinite(loss.losses.item())
    assert slope.item() == 0


def test_mismatch_weights_written_out() -> None:
    old = torch.tensor([[0.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
    ratio = torch.tensor([[0.25, 1.5, 8.0], [1.0, 1.0, 77.0]])
    sampled = -ratio.log()
    tokens = padded_tokens(torch.tensor([[True, True, True], [True, True, False]]))
    found = importance_correction.truncated_importance_weights(old, sampled, tokens, most=2.0)
    torch.testing.assert_close(found, torch.tensor([[0.25, 1.5, 2.0], [1.0, 1.0, 0.0]]))
    found = importance_correction.masked_importance_weights(
        old, sampled, tokens, least=0.5, most=5.0
    )
    torch.testing.assert_close(found, torch.tensor([[0.0, 1.5, 0.0], [1.0, 1.0, 0.0]]))
    # The product over the first sequence is 3, its geometric mean the cube root of that.
    found = importance_correction.masked_importance_weights(
        old, sampled, tokens, most=2.5, span="sequence"
    )
    torch.testing.assert_close(found, torch.tensor([[0.0] * 3, [1.0, 1.0, 0.0]]))
    found = importance_correction.truncated_importance_weights(old, sampled, tokens, span="mean")
    torch.testing.assert_close(found, torch.tensor([[3 ** (1 / 3)] * 3, [1.0, 1.0, 0.0]]))
    found = importance_correction.masked_importance_weights(
        old, sampled, tokens, span="mean", weighted=False
    )
    torch.testing.assert_close(found, torch.tensor([[1.0] * 3, [1.0, 1.0, 0.0]]))


def test_equal_log_probabilities_weigh_exactly_one() -> None:
    logp = torch.randn(3, 7)
    assert (
        importance_correction.truncated_importance_weights(
            logp, logp, all_of(logp), span="sequence"
        )
        .eq(1)
        .all()
    )
    assert importance_correction.masked_importance_weights(logp, logp, all_of(logp)).eq(1).all()


def test_bounds_that_make_no_sense_are_refused() -> None:
    x = torch.zeros(1, 1)
    with pytest.raises(InputError, match="low"):
        policy_loss.ppo_clip_loss(x, x, x, all_of(x), clip_ratio_low=1.2)
    with pytest.raises(InputError, match="most is 1"):
        policy_loss.ppo_clip_loss(x, x, x, all_of(x), most=1.0)
    with pytest.raises(InputError, match="least <= 1 <= most"):
        importance_correction.masked_importance_weights(x, x, all_of(x), least=2.0)
    with pytest.raises(InputError, match="at least 1"):
        importance_correction.truncated_importance_weights(x, x, all_of(x), most=0.5)
