"""What a step knows beforehand: advantages by their formulas, however answers are dealt out."""

from typing import Any

import pytest

pytest.importorskip("torch", reason="runs a model")

import torch
from torch import Tensor

from meshwright.run.kernels.loss.ignore_index import IGNORE_INDEX
from meshwright.run.nn.decoder import Decoder
from meshwright.run.posttrain.objectives import group_advantages, token_advantages
from meshwright.run.posttrain.objectives.masked_tokens import padded_tokens
from meshwright.run.posttrain.rl.config.rl_config import (
    CriticConfig,
    ObjectiveConfig,
    RLConfig,
    TinyModelConfig,
)
from meshwright.run.posttrain.rl.trainer.critic import Critic
from meshwright.run.posttrain.rl.trainer.microbatches import RolloutMicrobatch
from meshwright.run.posttrain.rl.trainer.step_preparation import (
    StepModels,
    compute_policy_logprobs,
    prepare_step,
)
from meshwright.run.train.decoder_factory import make_decoder
from meshwright.run.train.optimizer.optimizer_config import OptimizerConfig
from meshwright.spec.layout import Layout

LAYOUT = Layout(precision="fp32")
REWARD = torch.tensor([1.0, 0.0, 0.5, 0.25, 0.0, 1.0])
GROUP = torch.tensor([0, 0, 0, 1, 1, 1])
KL = 0.3


def decoder(seed: int) -> Decoder:
    model = TinyModelConfig(layers=1, hidden=16, heads=2, ffn=32).model(14)
    return make_decoder(model, LAYOUT, device=torch.device("cpu"), seed=seed)


def rows_of(own: list[int]) -> RolloutMicrobatch:
    """Answers of which the third token is not the model's, and odd ones end early."""
    chance = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 14, (6, 7), generator=chance)
    mask = torch.ones(6, 7, dtype=torch.bool)
    mask[:, 2], mask[1::2, 5:] = False, False
    targets = torch.randint(0, 14, (6, 7), generator=chance).masked_fill(~mask, IGNORE_INDEX)
    kept = torch.tensor(own)
    sampled = torch.zeros(len(own), 7)
    return RolloutMicrobatch(kept, tokens[kept], targets[kept], sampled, padded_tokens(mask[kept]))


WHOLE = rows_of([0, 1, 2, 3, 4, 5])
DEALT = [[rows_of([4, 0]), rows_of([2])], [rows_of([5, 1, 3])]]


def of_parts(settings: RLConfig, models: StepModels) -> Tensor:
    """Return the advantages of all answers, in their order."""
    found = torch.zeros(6, 7)
    for part in (
        each
        for update in prepare_step(settings, models, DEALT, REWARD, GROUP)[0]
        for each in update
    ):
        found[part.microbatch.rollout_indices] = part.advantages
    return WHOLE.loss_tokens.zero_masked(found)


def gaps(policy: Decoder, reference: Decoder) -> Tensor:
    return WHOLE.loss_tokens.zero_masked(
        KL * (compute_policy_logprobs(policy, WHOLE) - compute_policy_logprobs(reference, WHOLE))
    )


@pytest.mark.parametrize("pulled", [False, True])
@pytest.mark.parametrize("kind", ["whitened", "leave-one-out", "centred-whitened", "gae"])
def test_advantages_are_those_of_the_formulas(kind: Any, pulled: bool) -> None:
    policy, reference = decoder(0), decoder(1)
    off = gaps(policy, reference) if pulled else torch.zeros(6, 7)
    aim = ObjectiveConfig(adv_estimator=kind, kl_coef=KL * pulled, kl_in="reward", gamma=0.9)
    settings = RLConfig(objective=aim, critic=CriticConfig(gae_lambda=0.8))
    tokens, critic = WHOLE.loss_tokens, None
    reward = token_advantages.terminal_rewards(REWARD, tokens) - off
    whole = REWARD - tokens.sum_per_sequence(off)
    if kind == "whitened":
        wanted = token_advantages.reinforce_plus_plus_advantages(reward, tokens, gamma=0.9)
    elif kind == "leave-one-out":
        wanted = tokens.zero_masked(
            tokens.broadcast_to_tokens(group_advantages.rloo_advantages(whole, GROUP))
        )
    elif kind == "centred-whitened":
        wide = tokens.broadcast_to_tokens(group_advantages.centered_advantages(whole, GROUP))
        wanted = token_advantages.whiten(
            wide, tokens, token_advantages.compute_whitening_stats(wide, tokens)
        )
    else:
        rule = OptimizerConfig(lr=1e-2)
        critic = Critic(policy, LAYOUT, rule, total_steps=1, seed=0)
        with torch.no_grad():
            for name, parameter in critic.named_parameters():
                if name.startswith("value."):
                    parameter.fill_(0.1)
            value = critic(WHOLE.input_ids)
        plain, _ = token_advantages.gae_advantages(reward, value, tokens, gamma=0.9, gae_lambda=0.8)
        wanted = token_advantages.whiten(
            plain, tokens, token_advantages.compute_whitening_stats(plain, tokens)
        )
    models = StepModels(policy, reference if pulled else None, critic)
    assert torch.allclose(of_parts(settings, models), wanted, atol=1e-4)


def test_a_critic_is_held_against_what_answers_came_to() -> None:
    settings = RLConfig(objective=ObjectiveConfig(adv_estimator="gae"))
    policy = decoder(0)
    critic = Critic(policy, LAYOUT, OptimizerConfig(), total_steps=1, seed=0)
    models = StepModels(policy, None, critic)
    _, figures = prepare_step(settings, models, DEALT, REWARD, GROUP)
    assert figures == {"value_mean": 0.0, "explained_variance": 0.0}
    _, equal = prepare_step(settings, models, DEALT, torch.ones(6), GROUP)
    assert equal == {"value_mean": 0.0}, "there is nothing to explain"
