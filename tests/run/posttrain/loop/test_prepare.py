"""What a step knows beforehand: advantages by their formulas, however answers are dealt out."""

from typing import Any

import pytest

pytest.importorskip("torch", reason="runs a model")

import torch
from torch import Tensor

from meshwright.run.kernels.labels import IGNORED
from meshwright.run.nn.decoder import Decoder
from meshwright.run.posttrain.loop.answers import Rows
from meshwright.run.posttrain.loop.critic import Critic
from meshwright.run.posttrain.loop.prepare import Models, logprobs, prepared
from meshwright.run.posttrain.loop.settings import (
    CriticSettings,
    LoopSettings,
    NetworkSettings,
    ObjectiveSettings,
)
from meshwright.run.posttrain.objectives import advantages, returns
from meshwright.run.posttrain.objectives.tokens import padded
from meshwright.run.train.optimizer.settings import OptimizerSettings
from meshwright.run.train.step import make_decoder
from meshwright.spec.layout import Layout

LAYOUT = Layout(precision="fp32")
REWARD = torch.tensor([1.0, 0.0, 0.5, 0.25, 0.0, 1.0])
GROUP = torch.tensor([0, 0, 0, 1, 1, 1])
KL = 0.3


def decoder(seed: int) -> Decoder:
    model = NetworkSettings(layers=1, hidden=16, heads=2, ffn=32).model(14)
    return make_decoder(model, LAYOUT, device=torch.device("cpu"), seed=seed)


def rows_of(own: list[int]) -> Rows:
    """Answers of which the third token is not the model's, and odd ones end early."""
    chance = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 14, (6, 7), generator=chance)
    mask = torch.ones(6, 7, dtype=torch.bool)
    mask[:, 2], mask[1::2, 5:] = False, False
    targets = torch.randint(0, 14, (6, 7), generator=chance).masked_fill(~mask, IGNORED)
    kept = torch.tensor(own)
    sampled = torch.zeros(len(own), 7)
    return Rows(kept, tokens[kept], targets[kept], sampled, padded(mask[kept]))


WHOLE = rows_of([0, 1, 2, 3, 4, 5])
DEALT = [[rows_of([4, 0]), rows_of([2])], [rows_of([5, 1, 3])]]


def of_parts(settings: LoopSettings, models: Models) -> Tensor:
    """Return the advantages of all answers, in their order."""
    found = torch.zeros(6, 7)
    for part in (
        each for update in prepared(settings, models, DEALT, REWARD, GROUP)[0] for each in update
    ):
        found[part.rows.own] = part.advantage
    return WHOLE.counted.clean(found)


def gaps(policy: Decoder, reference: Decoder) -> Tensor:
    return WHOLE.counted.clean(KL * (logprobs(policy, WHOLE) - logprobs(reference, WHOLE)))


@pytest.mark.parametrize("pulled", [False, True])
@pytest.mark.parametrize("kind", ["whitened", "leave-one-out", "centred-whitened", "gae"])
def test_advantages_are_those_of_the_formulas(kind: Any, pulled: bool) -> None:
    policy, reference = decoder(0), decoder(1)
    off = gaps(policy, reference) if pulled else torch.zeros(6, 7)
    aim = ObjectiveSettings(advantage=kind, kl=KL * pulled, kl_in="reward", discount=0.9)
    settings = LoopSettings(objective=aim, critic=CriticSettings(decay=0.8))
    tokens, critic = WHOLE.counted, None
    reward = returns.at_last_token(REWARD, tokens) - off
    whole = REWARD - tokens.sums(off)
    if kind == "whitened":
        wanted = returns.reinforce_plus_plus(reward, tokens, discount=0.9)
    elif kind == "leave-one-out":
        wanted = tokens.clean(tokens.spread(advantages.leave_one_out(whole, GROUP)))
    elif kind == "centred-whitened":
        wide = tokens.spread(advantages.centred(whole, GROUP))
        wanted = returns.whiten(wide, tokens, returns.moments(wide, tokens))
    else:
        rule = OptimizerSettings(lr=1e-2)
        critic = Critic(policy, LAYOUT, rule, total_steps=1, seed=0)
        with torch.no_grad():
            for name, parameter in critic.named_parameters():
                if name.startswith("value."):
                    parameter.fill_(0.1)
            value = critic(WHOLE.tokens)
        plain, _ = returns.generalised(reward, value, tokens, discount=0.9, decay=0.8)
        wanted = returns.whiten(plain, tokens, returns.moments(plain, tokens))
    models = Models(policy, reference if pulled else None, critic)
    assert torch.allclose(of_parts(settings, models), wanted, atol=1e-4)


def test_a_critic_is_held_against_what_answers_came_to() -> None:
    settings = LoopSettings(objective=ObjectiveSettings(advantage="gae"))
    policy = decoder(0)
    critic = Critic(policy, LAYOUT, OptimizerSettings(), total_steps=1, seed=0)
    models = Models(policy, None, critic)
    _, figures = prepared(settings, models, DEALT, REWARD, GROUP)
    assert figures == {"value_mean": 0.0, "explained_variance": 0.0}
    _, equal = prepared(settings, models, DEALT, torch.ones(6), GROUP)
    assert equal == {"value_mean": 0.0}, "there is nothing to explain"
