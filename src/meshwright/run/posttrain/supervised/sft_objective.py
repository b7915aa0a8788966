"""`SFTObjective`: answers word for word, with logits of trained tokens alone.

Most tokens of chats are prompts, of which nothing is trained: the output head, a fifth of a small
model, need not see them.
"""

import torch
from torch import Tensor

from meshwright.run.kernels.loss.ignore_index import IGNORE_INDEX
from meshwright.run.kernels.loss.linear_cross_entropy import CrossEntropySums, linear_cross_entropy
from meshwright.run.nn.decoder import BatchLoss, Decoder
from meshwright.run.parallel.microbatch import Microbatch
from meshwright.run.parallel.sharded_model import ShardedModel
from meshwright.run.posttrain.supervised.example_index import ExampleIndex, find_trained_positions
from meshwright.run.posttrain.supervised.recipe_job import RecipeJob
from meshwright.run.posttrain.supervised.recipe_objective import (
    HiddenStateObjective,
    compute_decoder_token_logprobs,
)
from meshwright.run.train.data.batch import TrainBatch
from meshwright.run.train.objective import NextTokenObjective

_MOST = 0.7
"""Share of trained tokens above which ranks that share words do better with all tokens: of chosen
ones they make logits twice."""


class SFTObjective(HiddenStateObjective):
    """All weights of a decoder, or an adapter beside them, trained on answers word for word."""

    def __init__(
        self,
        decoder: Decoder,
        job: RecipeJob,
        example_index: ExampleIndex,
        sharded_model: ShardedModel | None = None,
    ) -> None:
        super().__init__(decoder, job, sharded_model)
        self.example_index = example_index
        if sharded_model is not None and self._reads_all:
            sharded_model.pipeline_stage.head_loss = None

    @property
    def _reads_all(self) -> bool:
        """Whether the loss has parts that read all tokens."""
        return bool(len(self.decoder.multi_token) or self.decoder.moe_aux_loss_coeff)

    def loss(self, part: TrainBatch) -> BatchLoss:
        """Return the cross-entropy of the answers."""
        return NextTokenObjective.loss(self, part) if self._reads_all else super().loss(part)

    def loss_from_hidden(self, x_BTD: Tensor, part: TrainBatch) -> BatchLoss:
        """Return the cross-entropy of the answers from what the output head reads."""
        decoder, model = self.decoder, self.decoder.model
        at = find_trained_positions(self.example_index, part)
        chosen_ND, words_N = (each.flatten(0, 1)[at.positions] for each in (x_BTD, part.labels_BT))
        if decoder.head.vocab_parallel is not None:
            nats = -compute_decoder_token_logprobs(
                decoder, chosen_ND, words_N[:, None]
            ).logprobs.sum()
            return _loss(
                CrossEntropySums(nats, (words_N != IGNORE_INDEX).sum(), torch.zeros_like(nats))
            )

        def read() -> CrossEntropySums:
            return linear_cross_entropy(
                chosen_ND,
                decoder.head_weight,
                words_N,
                bias=decoder.head.bias,
                ignore=IGNORE_INDEX,
                softcap=model.logit_softcap,
                scale=model.logit_scale,
                z_loss=decoder.z_loss_coeff,
            )

        return _loss(decoder.with_head_weight(read))

    def _judge(self, x_BTD: Tensor, microbatch: Microbatch) -> BatchLoss:
        part, decoder = microbatch.source, self.decoder
        assert self.spread is not None
        assert isinstance(part, TrainBatch)
        shared = decoder.head.vocab_parallel is not None
        many = part.num_targets > _MOST * part.tokens_BT.numel() or bool(decoder.z_loss_coeff)
        if self.spread.mesh.layout.cp > 1 or (shared and many):
            return _loss(decoder.head_loss(x_BTD, microbatch.labels_BT))
        return super()._judge(x_BTD, microbatch)


def _loss(sums: CrossEntropySums) -> BatchLoss:
    return BatchLoss(sums.loss_sum, sums.count, torch.zeros((), device=sums.loss_sum.device))
