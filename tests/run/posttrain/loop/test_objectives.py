"""Every member of the family is reached by its name, and takes its steps."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="runs a model")

import torch

from meshwright.errors import InputError
from meshwright.run.posttrain.loop import run
from meshwright.run.posttrain.loop.critic import Critic
from meshwright.run.posttrain.loop.keeping import Keeping
from meshwright.run.posttrain.loop.running import threads
from meshwright.run.posttrain.loop.settings import (
    CriticSettings,
    LoopSettings,
    NetworkSettings,
    ObjectiveSettings,
)
from meshwright.run.posttrain.objectives import averaging, returns
from meshwright.run.posttrain.objectives.tokens import padded
from meshwright.run.train.optimizer.settings import OptimizerSettings
from meshwright.run.train.step import make_decoder
from meshwright.spec.layout import Layout
from tests.run.posttrain.loop.small import settings
from tests.run.posttrain.loop.test_run import Enough, figures, same

FAMILY: dict[str, dict[str, Any]] = {
    "GRPO": {"averaging": "sequence", "kl": 0.04, "kl_form": "k3"},
    "Dr. GRPO": {"advantage": "centred", "averaging": "constant"},
    "RLOO": {"advantage": "leave-one-out", "loss": "reinforce", "kl": 0.05, "kl_in": "reward"},
    "REINFORCE++": {"advantage": "whitened", "kl": 0.01, "kl_in": "reward", "minibatches": 2},
    "REINFORCE++ with a baseline": {"advantage": "centred-whitened", "kl": 0.01},
    "DAPO": {"high": 0.28, "overlong_margin": 2, "minibatches": 2},
    "GSPO": {"loss": "gspo", "averaging": "sequence", "minibatches": 2},
    "CISPO": {"loss": "cispo", "minibatches": 2},
    "PPO": {"advantage": "gae", "discount": 0.99, "dual_clip": 3.0, "minibatches": 2},
    "PPO with KL in the reward": {"advantage": "gae", "kl": 0.1, "kl_in": "reward"},
    "KL times the ratio": {"kl": 0.1, "kl_form": "k3", "kl_weighted": True},
    "k1 times the ratio": {"kl": 0.1, "kl_form": "k1", "kl_weighted": True},
    "k2 in the loss": {"kl": 0.1},
    "truncated": {"correction": "truncated", "minibatches": 2},
    "truncated by answers": {"correction": "truncated", "correction_span": "sequence"},
    "masked": {"correction": "masked", "minibatches": 2},
    "masked by means of answers": {"correction": "masked", "correction_span": "mean"},
}  # fmt: skip


@pytest.mark.parametrize("name", FAMILY)
def test_every_member_of_the_family_takes_its_steps(name: str) -> None:
    aim = FAMILY[name]
    outcome = run(settings(objective=ObjectiveSettings(**aim), steps=2, placement="disaggregated"))
    assert all(row["grad_norm"] > 0 for row in outcome.rows)
    assert ("kl" in outcome.rows[-1]) == ("kl" in aim)
    assert ("value_loss" in outcome.rows[-1]) == (aim.get("advantage") == "gae")
    assert ("penalty_mean" in outcome.rows[-1]) == ("overlong_margin" in aim)


@pytest.mark.parametrize("name", ["RLOO", "REINFORCE++", "PPO", "PPO with KL in the reward"])
def test_a_step_is_the_same_however_it_is_cut_up(name: str) -> None:
    given = {"objective": ObjectiveSettings(**FAMILY[name]), "steps": 1}
    whole, cut = (run(settings(**given, microbatch_tokens=most)) for most in (4096, 16))
    pairs = zip(whole.decoder.parameters(), cut.decoder.parameters(), strict=True)
    # Adam divides small gradients by themselves, rounding included.
    assert all(torch.allclose(one, other, atol=1e-3) for one, other in pairs)
    (row,), (other,) = whole.rows, cut.rows
    for figure in {"grad_norm", "reward_mean", "value_loss", "kl"}.intersection(row):
        assert other[figure] == pytest.approx(row[figure], rel=1e-4)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"advantage": "gea"}, "advantage: 'gea' is not one of .*gae"),
        ({"loss": "ppo"}, "loss: 'ppo' is not one of clip, gspo"),
        ({"kl_form": "k4"}, "kl_form: 'k4' is not one of k1, k2, k3"),
        ({"kl_in": "rewards"}, "kl_in: 'rewards' is not one of loss, reward"),
        ({"correction": "trunkated"}, "correction: 'trunkated' .*truncated"),
        ({"correction_span": "word"}, "correction_span: 'word' is not one of token"),
        ({"kl": 0.1, "kl_form": "k1"}, "the gradient of k1 is 0 on average"),
        ({"kl": 0.1, "kl_weighted": True}, "k2 times a ratio estimates no KL"),
        ({"kl": 0.1, "kl_weighted": True, "kl_in": "reward"}, "has no ratio"),
        ({"low": 1.0}, "low: 1.0 is not a number from 0 to 0.999"),
        ({"loss": "cispo", "low": 1.5}, "low: 1.5 is not a number from 0 to 1"),
        ({"dual_clip": 1.1}, "1.1 lies within the bound of the ratio, 1.2"),
        ({"loss": "cispo", "dual_clip": 3.0}, "cispo has no such bound"),
        ({"discount": 1.5}, "discount: 1.5"),
        ({"overlong_margin": 0}, "overlong_margin: 0"),
    ],
)
def test_what_names_nothing_is_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        ObjectiveSettings(**given)


def test_what_does_not_go_together_is_refused() -> None:
    with pytest.raises(InputError, match="decay"):
        CriticSettings(decay=1.2)
    with pytest.raises(InputError, match="groups of equal rewards teach something too"):
        LoopSettings(spare_prompts=4, objective=ObjectiveSettings(advantage="gae"))


def test_a_critic_learns_what_answers_come_to() -> None:
    layout = Layout(precision="fp32")
    model = NetworkSettings(layers=1, hidden=16, heads=2, ffn=32).model(14)
    decoder = make_decoder(model, layout, device=torch.device("cpu"), seed=0)
    before = [each.detach().clone() for each in decoder.parameters()]
    rule = OptimizerSettings(lr=1e-2, schedule="constant", warmup_steps=0)
    critic = Critic(decoder, layout, rule, total_steps=60, seed=0)
    drawn = torch.randint(0, 14, (16, 8), generator=torch.Generator().manual_seed(1))
    tokens = padded(torch.ones_like(drawn, dtype=torch.bool))
    # An answer is worth how often a certain word stands in it.
    reward = returns.at_last_token((drawn == 3).float().sum(1), tokens)
    weight, losses = averaging.weights(tokens, averaging.totals([tokens])), []
    with threads(1):
        for update in range(60):
            value = critic(drawn)
            _, wanted = returns.generalised(reward, value, tokens, decay=1.0)
            loss = averaging.weighted_sum(returns.value_loss(value, wanted), weight)
            loss.backward()  # type: ignore[no-untyped-call]
            critic.step(update)
            losses.append(loss.item())
    assert losses[-1] < 0.1 * losses[0]
    pairs = zip(before, decoder.parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs), "the policy is another model"


def test_a_critic_goes_on_with_the_rest_of_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    aim = {"objective": ObjectiveSettings(advantage="gae", minibatches=2), "steps": 4}
    whole = run(settings(**aim))
    assert whole.rows[0]["value_mean"] == 0, "from nought"
    assert all({"value_loss", "explained_variance"} <= set(row) for row in whole.rows)

    def row(self: Keeping, step: int, found: Any) -> None:
        written(self, step, found)
        if step == 3:
            raise Enough

    written = Keeping.row
    given = settings(**aim, folder=str(tmp_path / "run"), checkpoint_steps=2)
    monkeypatch.setattr(Keeping, "row", row)
    with pytest.raises(Enough):
        run(given)
    monkeypatch.undo()
    rest = run(given)
    assert figures(rest.rows) == figures(whole.rows)[2:]
    assert same(whole.decoder, rest.decoder)
