"""`AnswerLearner`: answers word for word, with logits of trained tokens alone.

Most tokens of chats are prompts, of which nothing is trained: the output head, a fifth of a small
model, need not see them.
"""

import torch
from torch import Tensor

from meshwright.run.kernels.labels import IGNORED
from meshwright.run.kernels.linear_cross_entropy import LossSums, linear_cross_entropy
from meshwright.run.nn.decoder import Decoder, Loss
from meshwright.run.parallel.spread import Spread
from meshwright.run.parallel.stage import Microbatch
from meshwright.run.posttrain.supervised.examples import Examples, trained_at
from meshwright.run.posttrain.supervised.job import RecipeJob
from meshwright.run.posttrain.supervised.learner import JudgingLearner, decoder_words
from meshwright.run.train.data.batch import Batch
from meshwright.run.train.learner import NextToken

_MOST = 0.7
"""Share of trained tokens above which ranks that share words do better with all tokens: of chosen
ones they make logits twice."""


class AnswerLearner(JudgingLearner):
    """All weights of a decoder, or an adapter beside them, trained on answers word for word."""

    def __init__(
        self, decoder: Decoder, job: RecipeJob, examples: Examples, spread: Spread | None = None
    ) -> None:
        super().__init__(decoder, job, spread)
        self.examples = examples
        if spread is not None and self._reads_all:
            spread.stage.judge = None

    @property
    def _reads_all(self) -> bool:
        """Whether the loss has parts that read all tokens."""
        return bool(len(self.decoder.multi_token) or self.decoder.balance_weight)

    def loss(self, part: Batch) -> Loss:
        """Return the cross-entropy of the answers."""
        return NextToken.loss(self, part) if self._reads_all else super().loss(part)

    def judged(self, x_BTD: Tensor, part: Batch) -> Loss:
        """Return the cross-entropy of the answers from what the output head reads."""
        decoder, model = self.decoder, self.decoder.model
        at = trained_at(self.examples, part)
        chosen_ND, words_N = (each.flatten(0, 1)[at.positions] for each in (x_BTD, part.labels_BT))
        if decoder.head.shared is not None:
            nats = -decoder_words(decoder, chosen_ND, words_N[:, None]).logprobs.sum()
            return _loss(LossSums(nats, (words_N != IGNORED).sum(), torch.zeros_like(nats)))

        def read() -> LossSums:
            return linear_cross_entropy(
                chosen_ND,
                decoder.head_weight,
                words_N,
                bias=decoder.head.bias,
                ignore=IGNORED,
                softcap=model.logit_softcap,
                scale=model.logit_scale,
                z_loss=decoder.z_loss,
            )

        return _loss(decoder.read_head(read))

    def _judge(self, x_BTD: Tensor, microbatch: Microbatch) -> Loss:
        part, decoder = microbatch.source, self.decoder
        assert self.spread is not None
        assert isinstance(part, Batch)
        shared = decoder.head.shared is not None
        many = part.targets > _MOST * part.tokens_BT.numel() or bool(decoder.z_loss)
        if self.spread.mesh.layout.cp > 1 or (shared and many):
            return _loss(decoder.head_loss(x_BTD, microbatch.labels_BT))
        return super()._judge(x_BTD, microbatch)


def _loss(sums: LossSums) -> Loss:
    return Loss(sums.nats, sums.count, torch.zeros((), device=sums.nats.device))
