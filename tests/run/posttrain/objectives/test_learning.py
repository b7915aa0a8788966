"""All together: a table of logits learns from a 0/1 reward, and not from a shuffled one."""

import pytest

pytest.importorskip("torch", reason="objectives are functions of torch's tensors")

import torch

from meshwright.run.posttrain.objectives import group_advantages, loss_weights, policy_loss
from meshwright.run.posttrain.objectives.masked_tokens import padded_tokens

PROMPTS, ANSWERS, LENGTH, WORDS = 4, 16, 2, 4


def accuracy(kind: str, *, shuffled: bool, steps: int = 40) -> float:
    """Return how probable right answers are: at every place one word is right, all must be."""
    generator = torch.Generator().manual_seed(7)
    right = torch.randint(WORDS, (PROMPTS, LENGTH), generator=generator)
    table = torch.zeros(PROMPTS, LENGTH, WORDS, requires_grad=True)
    optimizer = torch.optim.Adam([table], lr=0.1)
    group = torch.arange(PROMPTS).repeat_interleave(ANSWERS)
    tokens = padded_tokens(torch.ones(len(group), LENGTH, dtype=torch.bool))
    for _ in range(steps):
        chances = table.detach().softmax(-1)[group].flatten(0, 1)
        words = torch.multinomial(chances, 1, generator=generator).view(len(group), LENGTH)
        reward = (words == right[group]).all(1).float()
        if shuffled:
            reward = reward[torch.randperm(len(reward), generator=generator)]
        advantage = tokens.broadcast_to_tokens(
            group_advantages.normalized_advantages(reward, group)
        )
        old = table.detach().log_softmax(-1)[group].gather(-1, words[..., None])[..., 0]
        weight = loss_weights.compute_token_weights(tokens, loss_weights.sum_step_totals([tokens]))
        for _ in range(4):  # the later updates are off policy: ratios leave their bounds
            logp = table.log_softmax(-1)[group].gather(-1, words[..., None])[..., 0]
            given = (logp, old, advantage, tokens)
            loss = (
                policy_loss.cispo_loss(*given)
                if kind == "cispo"
                else policy_loss.ppo_clip_loss(*given, clip_ratio_high=0.28)
            )
            optimizer.zero_grad()
            loss_weights.weighted_sum(loss.losses, weight).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    chances = table.detach().softmax(-1).gather(-1, right[..., None])[..., 0]
    return float(chances.prod(-1).mean())


@pytest.mark.parametrize("kind", ["clipped", "cispo"])
def test_reward_is_learnt_and_a_shuffled_one_is_not(kind: str) -> None:
    assert accuracy(kind, shuffled=False) > 0.9
    assert accuracy(kind, shuffled=True) < 0.5
