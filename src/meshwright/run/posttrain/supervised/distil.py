"""Distillation: a student learns what a teacher thought likely at every token of its answers."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from meshwright.run.kernels.labels import IGNORED
from meshwright.run.nn.decoder import Decoder, Loss
from meshwright.run.posttrain.objectives.chosen import word_logprobs
from meshwright.run.posttrain.objectives.distillation import distillation
from meshwright.run.posttrain.supervised.job import RecipeJob
from meshwright.run.posttrain.supervised.learner import RecipeLearner, summed
from meshwright.run.posttrain.supervised.settings import Distil
from meshwright.run.posttrain.supervised.teacher import TeacherSet
from meshwright.run.train.data.batch import Batch
from meshwright.run.train.data.corpus import Ints


class DistilLearner(RecipeLearner):
    """A student of recorded answers."""

    def __init__(self, decoder: Decoder, job: RecipeJob, sets: Sequence[TeacherSet]) -> None:
        super().__init__(decoder, job)
        assert isinstance(job.recipe, Distil)
        self.recipe = job.recipe
        most = max(one.words.shape[1] for one in sets)
        self.words = np.concatenate([_wide(one.words, most, 0) for one in sets])
        self.logprobs = np.concatenate([_wide(one.logprobs, most, -np.inf) for one in sets])
        before, starts = 0, list[Ints]()
        for one in sets:
            starts.append(one.prepared.starts[:-1] + before)
            before += len(one.prepared.tokens)
        self.starts: Ints = np.concatenate([*starts, [before]])
        """First token of every example among those of all sets, and last their number."""

    def loss(self, part: Batch) -> Loss:
        """Return the divergence from the teacher, summed over the trained tokens."""
        device = part.tokens_BT.device
        rows = torch.from_numpy(self._rows(part)).to(device)
        counted = (part.labels_BT != IGNORED).flatten()
        where = rows.flatten()[counted].cpu()
        words = torch.from_numpy(self.words[where.numpy()]).to(device)
        teacher = torch.from_numpy(self.logprobs[where.numpy()]).to(device)
        decoder, model = self.decoder, self.decoder.model
        student = word_logprobs(
            self.hidden(part).flatten(0, 1)[counted],
            decoder.head_weight,
            words,
            bias=decoder.head.bias,
            softcap=model.logit_softcap,
            scale=model.logit_scale,
            products=decoder.head.products,
        ).logprobs
        losses = distillation(student, teacher, self.recipe.direction)
        agreed = student.argmax(-1) == teacher.argmax(-1)
        self.see(tokens=torch.tensor(len(losses), device=device), agreed=agreed.sum())
        return summed(losses)

    def _rows(self, part: Batch) -> Ints:
        """Return, for each position, the token that comes after it among those of all sets."""
        rows = np.zeros(part.tokens_BT.shape, np.int64)
        for row, note in enumerate(part.sequences):
            at = 0
            for number in note.examples:
                first, after = int(self.starts[number]), int(self.starts[number + 1])
                rows[row, at : at + after - first - 1] = np.arange(first + 1, after)
                at += after - first
        return rows

    def means(self, seen: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return how often student and teacher like the same of the teacher's words best."""
        return {"agreed": seen["agreed"] / seen["tokens"].clamp(min=1)} if seen else {}


def _wide(rows: np.ndarray, most: int, otherwise: float) -> np.ndarray:
    return np.pad(rows, ((0, 0), (0, most - rows.shape[1])), constant_values=otherwise)
