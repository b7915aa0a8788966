"""Every member of the family is reached by its name, and takes its steps."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="runs a model")

import torch

from meshwright.errors import InputError
from meshwright.run.posttrain.objectives import loss_weights, token_advantages
from meshwright.run.posttrain.objectives.masked_tokens import padded_tokens
from meshwright.run.posttrain.rl import run_rl
from meshwright.run.posttrain.rl.config.rl_config import (
    CriticConfig,
    ObjectiveConfig,
    RLConfig,
    TinyModelConfig,
)
from meshwright.run.posttrain.rl.rl_run import limit_torch_threads
from meshwright.run.posttrain.rl.run_state import RLRunState
from meshwright.run.posttrain.rl.trainer.critic import Critic
from meshwright.run.train.decoder_factory import make_decoder
from meshwright.run.train.optimizer.optimizer_config import OptimizerConfig
from meshwright.spec.layout import Layout
from tests.run.posttrain.rl.small import settings
from tests.run.posttrain.rl.test_run import Enough, figures, same

FAMILY: dict[str, dict[str, Any]] = {
    "GRPO": {"loss_agg_mode": "sequence", "kl_coef": 0.04, "kl_estimator": "k3"},
    "Dr. GRPO": {"adv_estimator": "centred", "loss_agg_mode": "constant"},
    "RLOO": {"adv_estimator": "leave-one-out", "loss": "reinforce", "kl_coef": 0.05,
    "kl_in": "reward"},
    "REINFORCE++": {"adv_estimator": "whitened", "kl_coef": 0.01, "kl_in": "reward",
    "minibatches": 2},
    "REINFORCE++ with a baseline": {"adv_estimator": "centred-whitened", "kl_coef": 0.01},
    "DAPO": {"clip_ratio_high": 0.28, "overlong_buffer": 2, "minibatches": 2},
    "GSPO": {"loss": "gspo", "loss_agg_mode": "sequence", "minibatches": 2},
    "CISPO": {"loss": "cispo", "minibatches": 2},
    "PPO": {"adv_estimator": "gae", "gamma": 0.99, "dual_clip": 3.0, "minibatches": 2},
    "PPO with KL in the reward": {"adv_estimator": "gae", "kl_coef": 0.1, "kl_in": "reward"},
    "KL times the ratio": {"kl_coef": 0.1, "kl_estimator": "k3", "kl_weighted": True},
    "k1 times the ratio": {"kl_coef": 0.1, "kl_estimator": "k1", "kl_weighted": True},
    "k2 in the loss": {"kl_coef": 0.1},
    "truncated": {"importance_correction": "truncated", "minibatches": 2},
    "truncated by answers": {"importance_correction": "truncated", "correction_level": "sequence"},
    "masked": {"importance_correction": "masked", "minibatches": 2},
    "masked by means of answers": {"importance_correction": "masked", "correction_level": "mean"},
}  # fmt: skip


@pytest.mark.parametrize("name", FAMILY)
def test_every_member_of_the_family_takes_its_steps(name: str) -> None:
    aim = FAMILY[name]
    outcome = run_rl(settings(objective=ObjectiveConfig(**aim), steps=2, placement="disaggregated"))
    assert all(row["grad_norm"] > 0 for row in outcome.step_metrics)
    assert ("kl" in outcome.step_metrics[-1]) == ("kl_coef" in aim)
    assert ("value_loss" in outcome.step_metrics[-1]) == (aim.get("adv_estimator") == "gae")
    assert ("penalty_mean" in outcome.step_metrics[-1]) == ("overlong_buffer" in aim)


@pytest.mark.parametrize("name", ["RLOO", "REINFORCE++", "PPO", "PPO with KL in the reward"])
def test_a_step_is_the_same_however_it_is_cut_up(name: str) -> None:
    given = {"objective": ObjectiveConfig(**FAMILY[name]), "steps": 1}
    whole, cut = (run_rl(settings(**given, microbatch_tokens=most)) for most in (4096, 16))
    pairs = zip(whole.decoder.parameters(), cut.decoder.parameters(), strict=True)
    # Adam divides small gradients by themselves, rounding included.
    assert all(torch.allclose(one, other, atol=1e-3) for one, other in pairs)
    (row,), (other,) = whole.step_metrics, cut.step_metrics
    for figure in {"grad_norm", "reward_mean", "value_loss", "kl"}.intersection(row):
        assert other[figure] == pytest.approx(row[figure], rel=1e-4)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"adv_estimator": "gea"}, "adv_estimator: 'gea' is not one of .*gae"),
        ({"loss": "ppo"}, "loss: 'ppo' is not one of clip, gspo"),
        ({"kl_estimator": "k4"}, "kl_estimator: 'k4' is not one of k1, k2, k3"),
        ({"kl_in": "rewards"}, "kl_in: 'rewards' is not one of loss, reward"),
        ({"importance_correction": "trunkated"}, "importance_correction: 'trunkated' .*truncated"),
        ({"correction_level": "word"}, "correction_level: 'word' is not one of token"),
        ({"kl_coef": 0.1, "kl_estimator": "k1"}, "the gradient of k1 is 0 on average"),
        ({"kl_coef": 0.1, "kl_weighted": True}, "k2 times a ratio estimates no KL"),
        ({"kl_coef": 0.1, "kl_weighted": True, "kl_in": "reward"}, "has no ratio"),
        ({"clip_ratio_low": 1.0}, "clip_ratio_low: 1.0 is not a number from 0 to 0.999"),
        (
            {"loss": "cispo", "clip_ratio_low": 1.5},
            "clip_ratio_low: 1.5 is not a number from 0 to 1",
        ),
        ({"dual_clip": 1.1}, "1.1 is within the bound of the ratio, 1.2"),
        ({"loss": "cispo", "dual_clip": 3.0}, "cispo has no such bound"),
        ({"gamma": 1.5}, "gamma: 1.5"),
        ({"overlong_buffer": 0}, "overlong_buffer: 0"),
    ],
)
def test_what_names_nothing_is_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        ObjectiveConfig(**given)


def test_what_does_not_go_together_is_refused() -> None:
    with pytest.raises(InputError, match="gae_lambda"):
        CriticConfig(gae_lambda=1.2)
    with pytest.raises(InputError, match="groups of equal rewards teach something too"):
        RLConfig(extra_prompts=4, objective=ObjectiveConfig(adv_estimator="gae"))


def test_a_critic_learns_what_answers_come_to() -> None:
    layout = Layout(precision="fp32")
    model = TinyModelConfig(layers=1, hidden=16, heads=2, ffn=32).model(14)
    decoder = make_decoder(model, layout, device=torch.device("cpu"), seed=0)
    before = [each.detach().clone() for each in decoder.parameters()]
    rule = OptimizerConfig(lr=1e-2, schedule="constant", warmup_steps=0)
    critic = Critic(decoder, layout, rule, total_steps=60, seed=0)
    drawn = torch.randint(0, 14, (16, 8), generator=torch.Generator().manual_seed(1))
    tokens = padded_tokens(torch.ones_like(drawn, dtype=torch.bool))
    # An answer is worth how often a certain word stands in it.
    reward = token_advantages.terminal_rewards((drawn == 3).float().sum(1), tokens)
    weight, losses = (
        loss_weights.compute_token_weights(tokens, loss_weights.sum_step_totals([tokens])),
        [],
    )
    with limit_torch_threads(1):
        for update in range(60):
            value = critic(drawn)
            _, wanted = token_advantages.gae_advantages(reward, value, tokens, gae_lambda=1.0)
            loss = loss_weights.weighted_sum(token_advantages.value_loss(value, wanted), weight)
            loss.backward()  # type: ignore[no-untyped-call]
            critic.step(update)
            losses.append(loss.item())
    assert losses[-1] < 0.1 * losses[0]
    pairs = zip(before, decoder.parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs), "the policy is another model"


def test_a_critic_goes_on_with_the_rest_of_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    aim = {"objective": ObjectiveConfig(adv_estimator="gae", minibatches=2), "steps": 4}
    whole = run_rl(settings(**aim))
    assert whole.step_metrics[0]["value_mean"] == 0, "from nought"
    assert all({"value_loss", "explained_variance"} <= set(row) for row in whole.step_metrics)

    def row(self: RLRunState, step: int, found: Any) -> None:
        written(self, step, found)
        if step == 3:
            raise Enough

    written = RLRunState.write_metrics
    given = settings(**aim, folder=str(tmp_path / "run"), checkpoint_every_steps=2)
    monkeypatch.setattr(RLRunState, "write_metrics", row)
    with pytest.raises(Enough):
        run_rl(given)
    monkeypatch.undo()
    rest = run_rl(given)
    assert figures(rest.step_metrics) == figures(whole.step_metrics)[2:]
    assert same(whole.decoder, rest.decoder)
