"""Distillation: a student learns what a teacher thought likely at every token of its answers."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from meshwright.run.kernels.loss.ignore_index import IGNORE_INDEX
from meshwright.run.nn.decoder import BatchLoss, Decoder
from meshwright.run.parallel.sharded_model import ShardedModel
from meshwright.run.posttrain.objectives.distillation_loss import top_k_divergence
from meshwright.run.posttrain.supervised.example_index import ExampleIndex, find_trained_positions
from meshwright.run.posttrain.supervised.recipe_config import DistillationRecipe
from meshwright.run.posttrain.supervised.recipe_job import RecipeJob
from meshwright.run.posttrain.supervised.recipe_objective import (
    HiddenStateObjective,
    as_summed_loss,
    compute_decoder_token_logprobs,
)
from meshwright.run.posttrain.supervised.teacher_logprobs import TeacherDataset
from meshwright.run.train.data.batch import TrainBatch


class DistillationObjective(HiddenStateObjective):
    """A student of recorded answers."""

    METRIC_NAMES = ("tokens", "agreed")

    def __init__(
        self,
        decoder: Decoder,
        job: RecipeJob,
        example_index: ExampleIndex,
        sets: Sequence[TeacherDataset],
        sharded_model: ShardedModel | None = None,
    ) -> None:
        super().__init__(decoder, job, sharded_model)
        assert isinstance(job.recipe, DistillationRecipe)
        self.recipe, self.example_index = job.recipe, example_index
        most = max(one.top_token_ids.shape[1] for one in sets)
        device = next(decoder.parameters()).device
        words = np.concatenate([_wide(one.top_token_ids, most, 0) for one in sets])
        logprobs = np.concatenate([_wide(one.top_logprobs, most, -np.inf) for one in sets])
        # What fills up shorter lists is no word: it is among those that the teacher left out.
        words[~np.isfinite(logprobs)] = IGNORE_INDEX
        # Of every token of all sets, on the device: a step picks its own.
        self.top_token_ids = torch.from_numpy(words.astype(np.int32)).to(device)
        self.teacher_logprobs = torch.from_numpy(logprobs).to(device)

    def loss_from_hidden(self, x_BTD: Tensor, part: TrainBatch) -> BatchLoss:
        """Return the divergence from the teacher, summed over the trained tokens."""
        at = find_trained_positions(self.example_index, part)
        hidden = x_BTD.flatten(0, 1)[at.positions]
        words, teacher = (
            self.top_token_ids[at.target_indices].long(),
            self.teacher_logprobs[at.target_indices],
        )
        student, _, rest = compute_decoder_token_logprobs(self.decoder, hidden, words, rest=True)
        assert rest is not None
        losses = top_k_divergence(student, rest, teacher, self.recipe.direction)
        told = student.masked_fill(words == IGNORE_INDEX, -torch.inf)
        agreed = told.argmax(-1) == teacher.argmax(-1)
        self.accumulate_metrics(
            tokens=torch.tensor(len(losses), device=losses.device), agreed=agreed.sum()
        )
        return as_summed_loss(losses)

    def average_metrics(self, seen: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return how often student and teacher like the same of the teacher's words best."""
        return {"agreed": seen["agreed"] / seen["tokens"].clamp(min=1)} if seen else {}


def _wide(rows: np.ndarray, most: int, otherwise: float) -> np.ndarray:
    return np.pad(rows, ((0, 0), (0, most - rows.shape[1])), constant_values=otherwise)
