"""Distillation: a student learns what a teacher thought likely at every token of its answers."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from meshwright.run.kernels.labels import IGNORED
from meshwright.run.nn.decoder import Decoder, Loss
from meshwright.run.parallel.spread import Spread
from meshwright.run.posttrain.objectives.distillation import distillation
from meshwright.run.posttrain.supervised.examples import Examples, trained_at
from meshwright.run.posttrain.supervised.job import RecipeJob
from meshwright.run.posttrain.supervised.learner import JudgingLearner, decoder_words, summed
from meshwright.run.posttrain.supervised.settings import Distil
from meshwright.run.posttrain.supervised.teacher import TeacherSet
from meshwright.run.train.data.batch import Batch


class DistilLearner(JudgingLearner):
    """A student of recorded answers."""

    SEEN = ("tokens", "agreed")

    def __init__(
        self,
        decoder: Decoder,
        job: RecipeJob,
        examples: Examples,
        sets: Sequence[TeacherSet],
        spread: Spread | None = None,
    ) -> None:
        super().__init__(decoder, job, spread)
        assert isinstance(job.recipe, Distil)
        self.recipe, self.examples = job.recipe, examples
        most = max(one.words.shape[1] for one in sets)
        device = next(decoder.parameters()).device
        words = np.concatenate([_wide(one.words, most, 0) for one in sets])
        logprobs = np.concatenate([_wide(one.logprobs, most, -np.inf) for one in sets])
        # What fills up shorter lists is no word: it is among those that the teacher left out.
        words[~np.isfinite(logprobs)] = IGNORED
        # Of every token of all sets, on the device: a step picks its own.
        self.words = torch.from_numpy(words.astype(np.int32)).to(device)
        self.logprobs = torch.from_numpy(logprobs).to(device)

    def judged(self, x_BTD: Tensor, part: Batch) -> Loss:
        """Return the divergence from the teacher, summed over the trained tokens."""
        at = trained_at(self.examples, part)
        hidden = x_BTD.flatten(0, 1)[at.positions]
        words, teacher = self.words[at.tokens].long(), self.logprobs[at.tokens]
        student, _, rest = decoder_words(self.decoder, hidden, words, rest=True)
        assert rest is not None
        losses = distillation(student, rest, teacher, self.recipe.direction)
        told = student.masked_fill(words == IGNORED, -torch.inf)
        agreed = told.argmax(-1) == teacher.argmax(-1)
        self.see(tokens=torch.tensor(len(losses), device=losses.device), agreed=agreed.sum())
        return summed(losses)

    def means(self, seen: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return how often student and teacher like the same of the teacher's words best."""
        return {"agreed": seen["agreed"] / seen["tokens"].clamp(min=1)} if seen else {}


def _wide(rows: np.ndarray, most: int, otherwise: float) -> np.ndarray:
    return np.pad(rows, ((0, 0), (0, most - rows.shape[1])), constant_values=otherwise)
