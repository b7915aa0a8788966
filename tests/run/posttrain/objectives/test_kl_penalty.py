"""Estimators of KL: their expectations and those of their gradients, worked out over all words."""

import pytest

pytest.importorskip("torch", reason="objectives are functions of torch's tensors")

import torch

from meshwright.errors import InputError
from meshwright.run.posttrain.objectives import kl_penalty
from meshwright.run.posttrain.objectives.choices import KLEstimator


def setting() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits of the policy, log-probabilities of the reference and of an older policy."""
    generator = torch.Generator().manual_seed(3)
    logits, ref, old = torch.randn(3, 6, generator=generator, dtype=torch.float64)
    return logits.requires_grad_(), ref.log_softmax(0), old.log_softmax(0)


def gradient(expected: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    (found,) = torch.autograd.grad(expected, logits, retain_graph=True)
    return found


def true_gradients(logits: torch.Tensor, ref: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    logp = logits.log_softmax(0)
    reverse = (logp.exp() * (logp - ref)).sum()
    forward = (ref.exp() * (ref - logp)).sum()
    return gradient(reverse, logits), gradient(forward, logits)


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_value_is_unbiased(kind: KLEstimator) -> None:
    logits, ref, _ = setting()
    logp = logits.log_softmax(0).detach()
    expected = (logp.exp() * kl_penalty.estimate_kl(logp, ref, kind)).sum()
    torch.testing.assert_close(expected, (logp.exp() * (logp - ref)).sum())


def test_values_of_k2_and_k3_are_never_negative() -> None:
    logits, ref, _ = setting()
    logp = logits.log_softmax(0).detach()
    assert (kl_penalty.estimate_kl(logp, ref, "k2") >= 0).all()
    assert (kl_penalty.estimate_kl(logp, ref, "k3") >= 0).all()


def test_gradients_on_policy_are_what_the_module_says() -> None:
    logits, ref, _ = setting()
    reverse, forward = true_gradients(logits, ref)
    logp = logits.log_softmax(0)
    p = logp.detach().exp()
    k1 = gradient((p * kl_penalty.estimate_kl(logp, ref, "k1")).sum(), logits)
    torch.testing.assert_close(k1, torch.zeros_like(k1))
    k2 = gradient((p * kl_penalty.kl_loss(logp, ref, strength=1, kind="k2")).sum(), logits)
    torch.testing.assert_close(k2, reverse)
    k3 = gradient((p * kl_penalty.kl_loss(logp, ref, strength=1, kind="k3")).sum(), logits)
    torch.testing.assert_close(k3, forward)


def test_k1_off_the_reward_is_the_reverse_gradient() -> None:
    logits, ref, _ = setting()
    reverse, _ = true_gradients(logits, ref)
    logp = logits.log_softmax(0)
    reward = kl_penalty.subtract_kl_from_reward(torch.zeros(6), logp, ref, strength=0.5)
    assert not reward.requires_grad
    found = gradient(-(logp.detach().exp() * reward * logp).sum(), logits)
    torch.testing.assert_close(found, 0.5 * reverse)


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_ratio_makes_it_right_for_tokens_of_an_older_policy(kind: KLEstimator) -> None:
    logits, ref, old = setting()
    reverse, _ = true_gradients(logits, ref)
    logp = logits.log_softmax(0)
    ratio = (logp - old).exp()
    losses = kl_penalty.kl_loss(logp, ref, strength=1, kind=kind, ratio=ratio)
    torch.testing.assert_close(gradient((old.exp() * losses).sum(), logits), reverse)


def test_k1_in_the_loss_is_refused() -> None:
    logits, ref, _ = setting()
    with pytest.raises(InputError, match="gradient of k1 is 0 on average"):
        kl_penalty.kl_loss(logits.log_softmax(0), ref, strength=1, kind="k1")
