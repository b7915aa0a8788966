"""Losses of packed batches are those that the papers give for each answer by itself."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="trains a model")
pytest.importorskip("tokenizers", reason="reads a tokenizer")

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, softplus

from meshwright.run.nn.decoder import Decoder
from meshwright.run.nn.huggingface import load_hf_checkpoint
from meshwright.run.posttrain.data.encoding import TokenizedExample
from meshwright.run.posttrain.supervised import RecipeTask, open_recipe
from meshwright.run.posttrain.supervised.example_index import list_example_ids
from meshwright.run.posttrain.supervised.preference_objective import KTOObjective
from meshwright.run.posttrain.supervised.reward_model import RewardObjective
from meshwright.run.train.data.batch import TrainBatch
from meshwright.run.train.objective import Objective
from tests.run.posttrain.supervised.tiny import model_folder, recipe_job

Parts = tuple[RecipeTask, Objective, Decoder, Decoder, TrainBatch]


def opened(kind: str, tmp_path: Path, changes: dict[str, Any] | None = None) -> Parts:
    """Return a learner whose weights have moved from those it began with, and a batch."""
    more = {"workload": {"global_batch": 3}, **(changes or {})}
    task, job = open_recipe(recipe_job(kind, tmp_path, more))
    policy = load_hf_checkpoint(None, model_folder(), dtype=torch.float32)
    first = copy.deepcopy(policy)
    learner = task.make_objective(policy, job, tmp_path)
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for _, one in learner.named_parameters():
            one.add_(0.02 * torch.randn(one.shape, generator=generator))
    return task, learner, policy, first, task.train_dataset(job, rank=0, world=1).get_batch(0)


def alone(decoder: Decoder, example: TokenizedExample) -> Tensor:
    """Return log p of the trained tokens of one example, read by itself, [N]."""
    tokens = torch.tensor(example.token_ids, dtype=torch.int64)
    logp = decoder(tokens[None])[0, :-1].log_softmax(-1)
    own: Tensor = logp.gather(1, tokens[1:, None])[:, 0]
    return own[torch.tensor(example.loss_mask[1:])]


def gains(parts: Parts, mean: bool = False) -> Tensor:
    task, _, policy, first, batch = parts
    found = []
    for number in list_example_ids(batch):
        with torch.no_grad():
            before = alone(first, task.example_index[number])
        gain = alone(policy, task.example_index[number]) - before
        found.append(gain.mean() if mean else gain.sum())
    return torch.stack(found)


def sft(parts: Parts) -> Tensor:
    task, _, policy, _, batch = parts
    return -torch.stack(
        [alone(policy, task.example_index[n]).sum() for n in list_example_ids(batch)]
    ).sum()


def dpo(parts: Parts) -> Tensor:
    found = gains(parts)
    return -logsigmoid(0.1 * (found[0::2] - found[1::2])).sum()


def ipo(parts: Parts) -> Tensor:
    found = gains(parts)
    return ((found[0::2] - found[1::2] - 5.0) ** 2).sum()


def ipo_of_means(parts: Parts) -> Tensor:
    found = gains(parts, mean=True)
    return ((found[0::2] - found[1::2] - 5.0) ** 2).sum()


def kto(parts: Parts) -> Tensor:
    task, learner, policy, first, batch = parts
    assert isinstance(learner, KTOObjective)
    learner.begin_step(batch)
    strange = [
        task.example_index[task.mismatched_ids[number]] for number in list_example_ids(batch)
    ]
    with torch.no_grad():
        moved = [alone(policy, one).sum() - alone(first, one).sum() for one in strange]
    baseline = torch.stack(moved).mean().clamp(min=0)
    assert float(learner.kl_baseline) == pytest.approx(float(baseline), abs=1e-4)
    found, total = gains(parts), torch.zeros(())
    for gain, number in zip(found, list_example_ids(batch), strict=True):
        sign = 1.0 if task.example_index.is_preferred[number] else -1.0
        total = total + 1 - torch.sigmoid(sign * 0.1 * (gain - baseline))
    return total


def reward(parts: Parts) -> Tensor:
    task, learner, policy, _, batch = parts
    assert isinstance(learner, RewardObjective)
    scores = []
    for number in list_example_ids(batch):
        tokens = torch.tensor(task.example_index[number].token_ids, dtype=torch.int64)
        scores.append(policy.compute_hidden_states(tokens[None])[0, -1] @ learner.reward_head[0])
    found = torch.stack(scores)
    return softplus(found[1::2] - found[0::2]).sum()


CASES: dict[str, tuple[str, Callable[[Parts], Tensor], dict[str, Any]]] = {
    "sft": ("sft", sft, {}),
    "dpo": ("dpo", dpo, {}),
    "dpo beside an adapter": ("dpo", dpo, {"adapter": {"rank": 4}}),
    "ipo": ("ipo", ipo, {}),
    "ipo of means": ("ipo", ipo_of_means, {"recipe": {"log_ratio_reduction": "mean"}}),
    "kto": ("kto", kto, {}),
    "reward": ("reward", reward, {}),
    "reward beside an adapter": ("reward", reward, {"adapter": {"rank": 4}}),
}


@pytest.mark.parametrize("case", CASES)
def test_packed_losses_and_gradients_are_those_of_answers_by_themselves(
    case: str, tmp_path: Path
) -> None:
    kind, by_hand, changes = CASES[case]
    parts = opened(kind, tmp_path, changes)
    learner, batch = parts[1], parts[4]
    named, weights = zip(*learner.named_parameters(), strict=True)
    wanted = by_hand(parts)
    found = learner.loss(batch).loss_sum
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    theirs = dict(zip(named, torch.autograd.grad(wanted, weights, allow_unused=True), strict=True))
    ours = dict(zip(named, torch.autograd.grad(found, weights, allow_unused=True), strict=True))
    reached = {name: one for name, one in ours.items() if isinstance(one, Tensor)}
    assert len(reached) > 3
    assert reached.keys() == {n for n, one in theirs.items() if isinstance(one, Tensor)}
    for name, one in reached.items():
        torch.testing.assert_close(one, theirs[name], rtol=2e-3, atol=2e-4)
