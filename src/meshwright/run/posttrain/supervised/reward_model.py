"""Reward models: a number for each answer, read from the hidden vector of its last token.

    model = RewardModel.load("path/of/model")
    model.rewards(examples)

The head is one row, `score.weight` as transformers calls it, in a file beside the model's weights.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from meshwright.errors import DamagedFile, InputError, Problem
from meshwright.run.kernels.attention.packed_sequences import PackedSequences
from meshwright.run.nn.decoder import BatchLoss, Decoder
from meshwright.run.nn.huggingface.safetensors_header import load_safetensors
from meshwright.run.nn.huggingface.safetensors_writer import write_safetensors
from meshwright.run.nn.sharding.shard_spec import ShardSpec
from meshwright.run.parallel.sharded_model import ShardedModel
from meshwright.run.posttrain.data.prepared_dataset import PreparedDataset
from meshwright.run.posttrain.lora import load_adapter
from meshwright.run.posttrain.lora.adapter_sharding import gather_adapter
from meshwright.run.posttrain.objectives.preference_loss import bradley_terry_loss
from meshwright.run.posttrain.supervised.example_index import (
    ExampleIndex,
    list_example_ids,
    map_example_documents,
)
from meshwright.run.posttrain.supervised.recipe_config import RewardModelRecipe
from meshwright.run.posttrain.supervised.recipe_job import RecipeJob
from meshwright.run.posttrain.supervised.recipe_objective import (
    ADAPTER,
    HiddenStateObjective,
    as_summed_loss,
    average_per_pair,
)
from meshwright.run.serve.model.loader import load_served_model
from meshwright.run.train.data.batch import TrainBatch

HEAD_FILE = "reward_head.safetensors"
HEAD_WEIGHT = "score.weight"


def compute_last_token_rewards(x_BTD: Tensor, head_1D: Tensor, part: TrainBatch) -> Tensor:
    """Return the reward of each answer of a batch from what the output head reads, fp32 [S]."""
    assert part.documents is not None
    last = part.documents.cu_seqlens.long()[map_example_documents(part) + 1] - 1
    return (x_BTD.flatten(0, 1)[last].float() @ head_1D.float().t()).squeeze(-1)


class RewardObjective(HiddenStateObjective):
    """A decoder, or an adapter beside it, with a head that gives rewards."""

    METRIC_NAMES = ("pairs", "accuracy", "margin", "reward")

    def __init__(
        self, decoder: Decoder, job: RecipeJob, sharded_model: ShardedModel | None = None
    ) -> None:
        super().__init__(decoder, job, sharded_model)
        assert isinstance(job.recipe, RewardModelRecipe)
        self.recipe = job.recipe
        device = next(decoder.parameters()).device
        # From nought: all rewards are equal at first, and the first loss is log 2.
        self.reward_head = nn.Parameter(torch.zeros(1, decoder.model.hidden, device=device))

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Go through the parameters that are trained, the head last."""
        # The head of words gets no gradient; it stays as it is.
        yield from super().named_parameters()
        yield HEAD_WEIGHT, self.reward_head

    def select_trainable(self, sharded_model: ShardedModel) -> ShardedModel:
        """Return a model with the head to train too, on the ranks that have its end."""
        found = super().select_trainable(sharded_model)
        if not hasattr(self.decoder, "head"):
            return found
        mirrored = "mirror" if sharded_model.mesh.layout.schedule == "dualpipe" else ""
        # Every rank reads the vectors of all tokens, so that its gradient is whole.
        held = replace(
            ShardSpec.unsharded(tuple(self.reward_head.shape)), shared_stage_group=mirrored
        )
        learning = dict(found.named_parameters()) | {HEAD_WEIGHT: self.reward_head}
        return found.with_trainable(
            learning, {HEAD_WEIGHT: held}, {**found.gathered_with, HEAD_WEIGHT: "head.weight"}
        )

    def checkpoint_name(self, name: str) -> str:
        """Name the head, or what else is trained."""
        return f"reward.{HEAD_WEIGHT}" if name == HEAD_WEIGHT else super().checkpoint_name(name)

    def tensors(self) -> dict[str, Tensor]:
        """Return what a run that goes on needs."""
        return {**super().tensors(), f"reward.{HEAD_WEIGHT}": self.reward_head.data}

    def loss_divisor(self, batch: TrainBatch) -> int:
        """Return the pairs."""
        return len(list_example_ids(batch)) // 2

    def loss_from_hidden(self, x_BTD: Tensor, part: TrainBatch) -> BatchLoss:
        """Return the summed loss of the pairs; the even answers are chosen, odd ones rejected."""
        rewards = self._rewards(x_BTD, part)
        chosen, rejected = rewards[0::2], rewards[1::2]
        self.accumulate_metrics(
            pairs=torch.tensor(len(chosen), device=rewards.device),
            accuracy=(chosen > rejected).sum(),
            margin=(chosen - rejected).sum(),
            reward=rewards.sum() / 2,
        )
        return as_summed_loss(
            bradley_terry_loss(
                chosen, rejected, center_rewards_coefficient=self.recipe.center_rewards_coefficient
            )
        )

    def _rewards(self, x_BTD: Tensor, part: TrainBatch) -> Tensor:
        return self.decoder.with_head_weight(
            lambda: compute_last_token_rewards(x_BTD, self.reward_head, part)
        )

    def average_metrics(self, seen: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return figures per pair."""
        return average_per_pair(seen)

    def save_final(self, folder: Path, *, speaks: bool = True) -> None:
        """Write the adapter with its head, where there is an adapter."""
        super().save_final(folder, speaks=speaks)
        if self.adapter is None:
            return
        head: Tensor = self.reward_head
        if self.spread is not None:
            lying = self.select_trainable(self.spread)
            mine = {name: one for name, one in lying.named_parameters() if name == HEAD_WEIGHT}
            shape = {HEAD_WEIGHT: tuple(self.reward_head.shape)}
            head = gather_adapter(lying, mine, shape, keep=True)[HEAD_WEIGHT]
        if speaks:
            save_reward_head(head, folder / ADAPTER)


def save_reward_head(head: Tensor, folder: Path) -> None:
    """Write a head beside the weights it belongs to."""
    weight = {HEAD_WEIGHT: head.detach().cpu().contiguous()}
    write_safetensors(weight, folder / f".{HEAD_FILE}")
    (folder / f".{HEAD_FILE}").replace(folder / HEAD_FILE)


class RewardModel:
    """A model that gives rewards, in eval mode."""

    def __init__(self, decoder: Decoder, head_1D: Tensor) -> None:
        self.decoder, self.reward_head = decoder, head_1D

    @staticmethod
    def load(
        model: str | Path,
        *,
        adapter: str | Path | None = None,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> "RewardModel":
        """Load a model that `mw convert` wrote, or a model with the adapter of a run."""
        folder = Path(model if adapter is None else adapter)
        if not (folder / HEAD_FILE).is_file():
            what = f"holds no {HEAD_FILE}, so it gives no rewards"
            fix = "export a run of mw train --recipe reward"
            raise InputError([Problem(str(folder), what, fix)])
        decoder = load_served_model(model, device=device, dtype=dtype)
        if adapter is not None:
            load_adapter(decoder, adapter).eval()
        tensors = load_safetensors(folder / HEAD_FILE)
        if HEAD_WEIGHT not in tensors:
            what = f"holds no {HEAD_WEIGHT}"
            raise DamagedFile([Problem(str(folder / HEAD_FILE), what, "export the run again")])
        head = tensors[HEAD_WEIGHT]
        return RewardModel(decoder.eval(), head.to(device))

    @torch.no_grad()
    def score_examples(
        self, examples: PreparedDataset | ExampleIndex, *, most_tokens: int = 8192
    ) -> list[float]:
        """Return the reward of every example in order, so many tokens at a time."""
        all_of = examples if isinstance(examples, ExampleIndex) else ExampleIndex([examples])
        device, found = self.reward_head.device, list[float]()
        numbers: Sequence[int] = range(len(all_of))
        for run in all_of.group_by_tokens(numbers, most_tokens):
            row = all_of.pack_row(run, device)
            x_BTD = self.decoder.compute_hidden_states(
                row.tokens_BT, positions=row.positions_BT, documents=row.documents
            )
            found += compute_last_token_rewards(x_BTD, self.reward_head, row).tolist()
        return found

    @torch.no_grad()
    def score_completions(self, completions: Sequence[Sequence[int]]) -> list[float]:
        """Return the rewards of prompts with their answers, each read by itself.

        The bits are those of `score_examples` with one example at a time, and hang on nothing else.
        """
        device, found = self.reward_head.device, list[Tensor]()
        for tokens in completions:
            documents = PackedSequences.from_lengths([[len(tokens)]], device)
            positions = documents.positions(1, len(tokens))
            tokens_BT = torch.tensor([tokens], dtype=torch.int64, device=device)
            x_BTD = self.decoder.compute_hidden_states(
                tokens_BT, positions=positions, documents=documents
            )
            found.append(x_BTD[0, -1:].float() @ self.reward_head.float().t())
        # One wait for the device, behind all of them.
        return torch.cat(found).flatten().tolist() if found else []
