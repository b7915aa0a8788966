"""Advantages of tokens, against loops over single tokens."""

import pytest

pytest.importorskip("torch", reason="objectives are functions of torch's tensors")

import torch
from hypothesis import given
from hypothesis import strategies as st

from meshwright.errors import InputError
from meshwright.run.posttrain.objectives import token_advantages
from meshwright.run.posttrain.objectives.masked_tokens import packed_tokens, padded_tokens

rows = st.lists(st.lists(st.booleans(), min_size=1, max_size=9), min_size=1, max_size=4)
factors = st.sampled_from([0.0, 0.5, 0.97, 1.0])


def drawn(masks: list[list[bool]], seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    flat = torch.tensor([each for row in masks for each in row])
    reward, value = torch.randn(2, len(flat), generator=generator, dtype=torch.float64)
    return flat, reward, value


@given(rows, factors, factors, st.integers(0, 99))
def test_generalised_is_the_backward_loop(
    masks: list[list[bool]], gamma: float, gae_lambda: float, seed: int
) -> None:
    flat, reward, value = drawn(masks, seed)
    tokens = packed_tokens(flat, [len(row) for row in masks])
    found, wanted = token_advantages.gae_advantages(
        reward, value, tokens, gamma=gamma, gae_lambda=gae_lambda
    )
    at = len(flat)
    for row in reversed(masks):
        after = later = 0.0
        for counts in reversed(row):
            at -= 1
            if not counts:  # neither a step of the policy nor a state of the critic
                assert found[at] == wanted[at] == 0
                continue
            later = (
                float(reward[at]) + gamma * after - float(value[at]) + (gamma * gae_lambda * later)
            )
            after = float(value[at])
            assert float(found[at]) == pytest.approx(later, abs=1e-9)
            assert float(wanted[at]) == pytest.approx(later + after, abs=1e-9)


@given(rows, factors, st.integers(0, 99))
def test_discounted_is_the_backward_loop(masks: list[list[bool]], gamma: float, seed: int) -> None:
    flat, reward, _ = drawn(masks, seed)
    found = token_advantages.discounted_returns(
        reward, packed_tokens(flat, [len(row) for row in masks]), gamma=gamma
    )
    at = len(flat)
    for row in reversed(masks):
        later = 0.0
        for counts in reversed(row):
            at -= 1
            later = float(reward[at]) + gamma * later if counts else later
            assert float(found[at]) == pytest.approx(later if counts else 0.0, abs=1e-9)


def test_reward_of_an_answer_stands_at_its_last_token() -> None:
    mask = torch.tensor([[True, True, False, True, False], [False] * 5, [True] + [False] * 4])
    found = token_advantages.terminal_rewards(torch.tensor([2.0, 3.0, 4.0]), padded_tokens(mask))
    want = torch.zeros(3, 5)
    want[0, 3], want[2, 0] = 2.0, 4.0
    assert torch.equal(found, want)


def test_whitened_tokens_have_mean_nought_and_variance_one_over_all_parts() -> None:
    value = torch.randn(3, 8, dtype=torch.float64) * 5 + 2
    mask = torch.rand(3, 8) < 0.7
    mask[:, 0] = True
    whole = token_advantages.whiten(
        value,
        padded_tokens(mask),
        token_advantages.compute_whitening_stats(value, padded_tokens(mask)),
    )
    counted = whole[mask]
    assert abs(float(counted.mean())) < 1e-9
    assert float(counted.var()) == pytest.approx(1, abs=1e-6)
    parts = [padded_tokens(mask[:1]), padded_tokens(mask[1:])]
    of = token_advantages.compute_whitening_stats(
        value[:1], parts[0]
    ) + token_advantages.compute_whitening_stats(value[1:], parts[1])
    pieces = [
        token_advantages.whiten(v, p, of)
        for v, p in zip((value[:1], value[1:]), parts, strict=True)
    ]
    torch.testing.assert_close(torch.cat(pieces), whole)


def test_reinforce_plus_plus_whitens_what_is_left_to_come() -> None:
    tokens = padded_tokens(torch.tensor([[True, True], [True, False]]))
    reward = torch.tensor([[1.0, 2.0], [5.0, 99.0]], dtype=torch.float64)
    found = token_advantages.reinforce_plus_plus_advantages(reward, tokens, gamma=0.5)
    value = torch.tensor([2.0, 2.0, 5.0], dtype=torch.float64)
    want = (value - value.mean()) / value.std()
    torch.testing.assert_close(found[tokens.mask], want, atol=1e-6, rtol=1e-6)
    assert found[1, 1] == 0


def test_one_token_cannot_be_whitened() -> None:
    tokens = padded_tokens(torch.tensor([[True, False]]))
    with pytest.raises(InputError, match="1 tokens have no variance"):
        token_advantages.reinforce_plus_plus_advantages(torch.ones(1, 2), tokens)


def test_value_loss_takes_the_larger_error() -> None:
    value, wanted = torch.tensor([2.0, 0.05, -1.0]), torch.tensor([1.0, 1.0, 1.0])
    before = torch.zeros(3)
    torch.testing.assert_close(
        token_advantages.value_loss(value, wanted), 0.5 * torch.tensor([1.0, 0.9025, 4.0])
    )
    found = token_advantages.value_loss(value, wanted, before=before, clip=0.1)
    torch.testing.assert_close(found, 0.5 * torch.tensor([1.0, 0.9025, 4.0]))
    far = token_advantages.value_loss(
        torch.tensor([0.9]), torch.tensor([1.0]), before=before[:1], clip=0.1
    )
    torch.testing.assert_close(far, 0.5 * torch.tensor([0.81]))
    with pytest.raises(InputError, match="before the step are missing"):
        token_advantages.value_loss(value, wanted, clip=0.1)
