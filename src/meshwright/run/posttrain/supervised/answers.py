"""`AnswerLearner`: answers word for word, with logits of trained tokens alone.

Most tokens of chats are prompts, of which nothing is trained: the output head, a fifth of a small
model, need not see them.
"""

import torch

from meshwright.run.kernels.labels import IGNORED
from meshwright.run.kernels.linear_cross_entropy import linear_cross_entropy
from meshwright.run.nn.decoder import Decoder, Loss
from meshwright.run.parallel.spread import Spread
from meshwright.run.posttrain.supervised.examples import Examples, trained_at
from meshwright.run.posttrain.supervised.job import RecipeJob
from meshwright.run.posttrain.supervised.learner import RecipeLearner
from meshwright.run.train.data.batch import Batch


class AnswerLearner(RecipeLearner):
    """All weights of a decoder, or an adapter beside them, trained on answers word for word."""

    def __init__(
        self, decoder: Decoder, job: RecipeJob, examples: Examples, spread: Spread | None = None
    ) -> None:
        super().__init__(decoder, job, spread)
        self.examples = examples

    def loss(self, part: Batch) -> Loss:
        """Return the cross-entropy of the answers."""
        decoder, model = self.decoder, self.decoder.model
        if len(decoder.multi_token) or decoder.balance_weight:
            return super().loss(part)  # these read all tokens
        at = trained_at(self.examples, part)
        sums = linear_cross_entropy(
            self.hidden(part).flatten(0, 1)[at.positions],
            decoder.head_weight,
            part.labels_BT.flatten()[at.positions],
            bias=decoder.head.bias,
            ignore=IGNORED,
            softcap=model.logit_softcap,
            scale=model.logit_scale,
            z_loss=decoder.z_loss,
        )
        nothing = torch.zeros((), device=sums.nats.device)
        return Loss(sums.nats, sums.count, nothing)
