"""`RecipeObjective`: the objective of a recipe; the base class is SFT."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from meshwright.run.nn.decoder import BatchLoss, Decoder
from meshwright.run.parallel.autograd_collectives import (
    gather_from_region,
    gather_from_sequence_region,
)
from meshwright.run.parallel.context_parallel.context_parallel import (
    SEQUENCE_DIM,
    make_token_partition,
)
from meshwright.run.parallel.microbatch import Microbatch
from meshwright.run.parallel.sharded_model import ShardedModel
from meshwright.run.parallel.tensor_parallel.vocab_parallel import VocabParallel
from meshwright.run.posttrain.lora import DecoderAdapter, attach_adapter, save_adapter
from meshwright.run.posttrain.lora.adapter_sharding import gather_adapter
from meshwright.run.posttrain.objectives.token_logprobs import TokenLogprobs, compute_token_logprobs
from meshwright.run.posttrain.objectives.vocab_parallel_logprobs import (
    compute_vocab_parallel_logprobs,
)
from meshwright.run.posttrain.supervised.recipe_job import RecipeJob
from meshwright.run.train.data.batch import TrainBatch
from meshwright.run.train.data.fingerprint import compute_fingerprint
from meshwright.run.train.objective import AllReduceFn, NextTokenObjective

ADAPTER = "adapter"
"""Folder of a finished run in which its adapter lies, as PEFT has it."""


class RecipeObjective(NextTokenObjective):
    """All weights of a decoder, or an adapter beside them, trained on answers word for word.

    Other recipes are made from it by another `loss` and `count`.
    """

    METRIC_NAMES: ClassVar[tuple[str, ...]] = ()
    """What `accumulate_metrics` adds to, in order: ranks without the head see none of it."""

    def __init__(
        self, decoder: Decoder, job: RecipeJob, sharded_model: ShardedModel | None = None
    ) -> None:
        """Make it; `sharded_model` says how the decoder lies where several ranks share a model."""
        super().__init__(decoder)
        self.job, self.spread = job, sharded_model
        self.adapter: DecoderAdapter | None = None
        if job.adapter is not None:
            self.adapter = attach_adapter(
                decoder, job.adapter.to_lora_config(), seed=job.seed, sharded_model=sharded_model
            )
        self.all_reduce: AllReduceFn | None = None
        """Adds up over replicas, where there are several."""
        self.metric_sums: dict[str, Tensor] = {}
        """What was seen since figures were last asked for."""
        self._before: dict[str, Tensor] = {}

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Go through the parameters that are trained."""
        return (self.adapter or self.decoder).named_parameters()

    def select_trainable(self, sharded_model: ShardedModel) -> ShardedModel:
        """Return a model with the adapter to train, where there is one."""
        if self.adapter is None:
            return sharded_model
        held, used_with = self.adapter.parameter_shards(sharded_model)
        return sharded_model.with_trainable(dict(self.adapter.named_parameters()), held, used_with)

    def checkpoint_name(self, name: str) -> str:
        """Name a parameter of the adapter, or a weight of the model."""
        return super().checkpoint_name(name) if self.adapter is None else f"adapter.{name}"

    def tensors(self) -> dict[str, Tensor]:
        """Return what a run that goes on needs: of an adapted model the adapter alone."""
        if self.adapter is not None:
            return {f"adapter.{name}": one.data for name, one in self.adapter.named_parameters()}
        return super().tensors()

    def train(self, mode: bool) -> None:
        """Train from here on, or only evaluate."""
        super().train(mode)
        if self.adapter is not None:
            self.adapter.train(mode)

    def set_replicas(self, together: AllReduceFn, replica: int) -> None:  # noqa: ARG002
        """Know of other replicas."""
        self.all_reduce = together

    def begin_step(self, batch: TrainBatch) -> None:
        """Let what dropout leaves out follow from the seed and the step alone."""
        if self.adapter is not None and self.adapter.training and self.adapter.config.dropout:
            torch.manual_seed(
                int(compute_fingerprint("dropout", self.job.seed, batch.step)[:15], 16)
            )

    def hidden(self, part: TrainBatch) -> Tensor:
        """Return what the output head reads, (B, T, D)."""
        return self.decoder.compute_hidden_states(
            part.tokens_BT, positions=part.positions_BT, documents=part.documents
        )

    def discard_metrics(self) -> None:
        """Let what the last microbatch told count for nothing."""
        for name, value in self.metric_sums.items():
            self.metric_sums[name] = self._before.get(name, torch.zeros_like(value))

    def accumulate_metrics(self, **sums: Tensor) -> None:
        """Add to what was seen."""
        self._before = dict(self.metric_sums)
        for name, value in sums.items():
            more = value.detach().double()
            self.metric_sums[name] = (
                self.metric_sums[name] + more if name in self.metric_sums else more
            )

    def pop_metrics(self) -> Mapping[str, Tensor]:
        """Return what was seen since this was last asked, as means."""
        seen, self.metric_sums = self.metric_sums, {}
        if (self.all_reduce is None and self.spread is None) or not self.METRIC_NAMES:
            return self.average_metrics(seen)
        # Replicas saw the same kinds of things, and of a pipeline's stages one alone.
        device = next(self.decoder.parameters()).device
        nothing = torch.zeros((), dtype=torch.float64, device=device)
        sums = torch.stack([seen.get(name, nothing) for name in self.METRIC_NAMES])
        if self.spread is not None:
            sums = self.spread.mesh["pp"].all_reduce(sums)
        if self.all_reduce is not None:
            sums = self.all_reduce(sums)
        return self.average_metrics(dict(zip(self.METRIC_NAMES, sums, strict=True)))

    def average_metrics(self, seen: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Turn sums into figures; plain answers have none beside the loss."""
        return dict(seen)

    def save_final(self, folder: Path, *, speaks: bool = True) -> None:
        """Write the adapter where there is one."""
        if self.adapter is None:
            return
        tensors = None
        if self.spread is not None:
            mine = dict(self.adapter.named_parameters())
            lying = self.select_trainable(self.spread)
            tensors = gather_adapter(lying, mine, self.adapter.global_shapes(), keep=speaks)
        if speaks:
            base = self.job.initial_load_path
            save_adapter(self.adapter, folder / ADAPTER, base=base, tensors=tensors)


class HiddenStateObjective(RecipeObjective):
    """A learner whose loss is its own, made of what the output head reads."""

    def __init__(
        self, decoder: Decoder, job: RecipeJob, sharded_model: ShardedModel | None = None
    ) -> None:
        super().__init__(decoder, job, sharded_model)
        if sharded_model is not None:
            sharded_model.pipeline_stage.head_loss = self._judge

    def loss(self, part: TrainBatch) -> BatchLoss:
        """Return the summed loss of a microbatch, by a decoder that is whole."""
        return self.loss_from_hidden(self.hidden(part), part)

    def loss_from_hidden(self, x_BTD: Tensor, part: TrainBatch) -> BatchLoss:
        """Return the summed loss of a microbatch from what the output head reads of it."""
        raise NotImplementedError

    def _judge(self, x_BTD: Tensor, microbatch: Microbatch) -> BatchLoss:
        assert self.spread is not None
        assert isinstance(microbatch.source, TrainBatch)
        found = self.loss_from_hidden(
            gather_sequence_outputs(self.spread, x_BTD), microbatch.source
        )
        # Ranks that share the tokens all judge all of them, and add up what they find.
        ranks = self.spread.mesh.layout.cp
        return BatchLoss(found.loss_sum / ranks, found.count, found.auxiliary_loss / ranks)


def compute_decoder_token_logprobs(
    decoder: Decoder, x_ND: Tensor, words_NK: Tensor, *, rest: bool = False
) -> TokenLogprobs:
    """Return log p of given words, and if asked of all others, for some of a decoder's vectors.

    Their number differs from step to step, so no product is timed for it: torch's own are used.
    """
    model, shared = decoder.model, decoder.head.vocab_parallel
    rule: dict[str, Any] = {"softcap": model.logit_softcap, "scale": model.logit_scale}
    rule["rest"] = rest

    def read() -> TokenLogprobs:
        weights = (decoder.head_weight, decoder.head.bias)
        if isinstance(shared, VocabParallel):
            return compute_vocab_parallel_logprobs(shared, x_ND, *weights, words_NK, **rule)
        return compute_token_logprobs(x_ND, weights[0], words_NK, bias=weights[1], **rule)

    return decoder.with_head_weight(read)


def gather_sequence_outputs(sharded_model: ShardedModel, x_BTD: Tensor) -> Tensor:
    """Return the vectors of all tokens, where ranks have a share of them behind the last layer.

    Tensor-parallel ranks find the same gradient for them, context-parallel ones parts of a sum.
    """
    mesh = sharded_model.mesh
    if mesh.layout.sequence_parallel:
        x_BTD = gather_from_region(x_BTD, mesh["tp"], SEQUENCE_DIM)
    if mesh.layout.cp == 1:
        return x_BTD
    gathered = gather_from_sequence_region(x_BTD, mesh["cp"], SEQUENCE_DIM)
    return make_token_partition(mesh.layout, gathered.shape[SEQUENCE_DIM]).to_full_sequence(
        gathered, SEQUENCE_DIM
    )


def as_summed_loss(losses: Tensor) -> BatchLoss:
    """Return losses as the trainer adds them up."""
    total = losses.float().sum()
    count = torch.tensor(losses.numel(), device=losses.device)
    return BatchLoss(total, count, torch.zeros((), device=losses.device))


def average_per_pair(seen: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return sums as means over pairs, whose number is among them."""
    if not seen:
        return {}
    return {name: one / seen["pairs"].clamp(min=1) for name, one in seen.items() if name != "pairs"}
