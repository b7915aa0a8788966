"""`RecipeLearner`: what of a decoder a recipe trains, by the plain recipe: answers as they are."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from meshwright.run.nn.decoder import Decoder, Loss
from meshwright.run.parallel.context import TOKENS, order_of
from meshwright.run.parallel.flow import gather_in, join_parts
from meshwright.run.parallel.spread import Spread
from meshwright.run.parallel.stage import Microbatch
from meshwright.run.parallel.vocabulary import WordsOfRanks
from meshwright.run.posttrain.adapters import DecoderAdapter, adapt, save_adapter
from meshwright.run.posttrain.adapters.shards import gather
from meshwright.run.posttrain.objectives.chosen import WordLogprobs, word_logprobs
from meshwright.run.posttrain.objectives.shared_words import shared_word_logprobs
from meshwright.run.posttrain.supervised.job import RecipeJob
from meshwright.run.train.data.batch import Batch
from meshwright.run.train.data.fingerprint import fingerprint
from meshwright.run.train.learner import NextToken, Together

ADAPTER = "adapter"
"""Folder of a finished run in which its adapter lies, as PEFT has it."""


class RecipeLearner(NextToken):
    """All weights of a decoder, or an adapter beside them, trained on answers word for word.

    Other recipes are made from it by another `loss` and `count`.
    """

    SEEN: ClassVar[tuple[str, ...]] = ()
    """What is added to figures by `see`, in order: ranks without the head see none of it."""

    def __init__(self, decoder: Decoder, job: RecipeJob, spread: Spread | None = None) -> None:
        """Make it; `spread` says how the decoder lies where several ranks share a model."""
        super().__init__(decoder)
        self.job, self.spread = job, spread
        self.adapter: DecoderAdapter | None = None
        if job.adapter is not None:
            self.adapter = adapt(
                decoder, job.adapter.lora(), seed=job.seed, spread=spread, every_target=True
            )
        self.together: Together | None = None
        """Adds up over replicas, where there are several."""
        self.sums: dict[str, Tensor] = {}
        """What was seen since figures were last asked for."""
        self._before: dict[str, Tensor] = {}

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Go through the parameters that are trained."""
        return (self.adapter or self.decoder).named_parameters()

    def trained(self, spread: Spread) -> Spread:
        """Return a model with the adapter to train, where there is one."""
        if self.adapter is None:
            return spread
        held, used_with = self.adapter.lying(spread)
        return spread.training(dict(self.adapter.named_parameters()), held, used_with)

    def saved_as(self, name: str) -> str:
        """Name a parameter of the adapter, or a weight of the model."""
        return super().saved_as(name) if self.adapter is None else f"adapter.{name}"

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

    def join(self, together: Together, replica: int) -> None:  # noqa: ARG002
        """Know of other replicas."""
        self.together = together

    def begin(self, batch: Batch) -> None:
        """Let what dropout leaves out follow from the seed and the step alone."""
        if self.adapter is not None and self.adapter.training and self.adapter.settings.dropout:
            torch.manual_seed(int(fingerprint("dropout", self.job.seed, batch.step)[:15], 16))

    def hidden(self, part: Batch) -> Tensor:
        """Return what the output head reads, (B, T, D)."""
        return self.decoder.hidden(
            part.tokens_BT, positions=part.positions_BT, documents=part.documents
        )

    def unsee(self) -> None:
        """Let what the last microbatch told count for nothing."""
        for name, value in self.sums.items():
            self.sums[name] = self._before.get(name, torch.zeros_like(value))

    def see(self, **sums: Tensor) -> None:
        """Add to what was seen."""
        self._before = dict(self.sums)
        for name, value in sums.items():
            more = value.detach().double()
            self.sums[name] = self.sums[name] + more if name in self.sums else more

    def figures(self) -> Mapping[str, Tensor]:
        """Return what was seen since this was last asked, as means."""
        seen, self.sums = self.sums, {}
        if (self.together is None and self.spread is None) or not self.SEEN:
            return self.means(seen)
        # Replicas saw the same kinds of things, and of a pipeline's stages one alone.
        device = next(self.decoder.parameters()).device
        nothing = torch.zeros((), dtype=torch.float64, device=device)
        sums = torch.stack([seen.get(name, nothing) for name in self.SEEN])
        if self.spread is not None:
            sums = self.spread.mesh["pp"].all_reduce(sums)
        if self.together is not None:
            sums = self.together(sums)
        return self.means(dict(zip(self.SEEN, sums, strict=True)))

    def means(self, seen: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Turn sums into figures; plain answers have none beside the loss."""
        return dict(seen)

    def ended(self, folder: Path, *, speaks: bool = True) -> None:
        """Write the adapter where there is one."""
        if self.adapter is None:
            return
        tensors = None
        if self.spread is not None:
            mine = dict(self.adapter.named_parameters())
            lying = self.trained(self.spread)
            tensors = gather(lying, mine, self.adapter.shapes(), keep=speaks)
        if speaks:
            base = self.job.start_from
            save_adapter(self.adapter, folder / ADAPTER, base=base, tensors=tensors)


class JudgingLearner(RecipeLearner):
    """A learner whose loss is its own, made of what the output head reads."""

    def __init__(self, decoder: Decoder, job: RecipeJob, spread: Spread | None = None) -> None:
        super().__init__(decoder, job, spread)
        if spread is not None:
            spread.stage.judge = self._judge

    def loss(self, part: Batch) -> Loss:
        """Return the summed loss of a microbatch, by a decoder that is whole."""
        return self.judged(self.hidden(part), part)

    def judged(self, x_BTD: Tensor, part: Batch) -> Loss:
        """Return the summed loss of a microbatch from what the output head reads of it."""
        raise NotImplementedError

    def _judge(self, x_BTD: Tensor, microbatch: Microbatch) -> Loss:
        assert self.spread is not None
        assert isinstance(microbatch.source, Batch)
        found = self.judged(whole_tokens(self.spread, x_BTD), microbatch.source)
        # Ranks that share the tokens all judge all of them, and add up what they find.
        ranks = self.spread.mesh.layout.cp
        return Loss(found.nats_sum / ranks, found.count, found.auxiliary / ranks)


def decoder_words(
    decoder: Decoder, x_ND: Tensor, words_NK: Tensor, *, rest: bool = False
) -> WordLogprobs:
    """Return log p of given words, and if asked of all others, for some of a decoder's vectors.

    Their number differs from step to step, so no product is timed for it: torch's own are used.
    """
    model, shared = decoder.model, decoder.head.shared
    rule: dict[str, Any] = {"softcap": model.logit_softcap, "scale": model.logit_scale}
    rule["rest"] = rest

    def read() -> WordLogprobs:
        weights = (decoder.head_weight, decoder.head.bias)
        if isinstance(shared, WordsOfRanks):
            return shared_word_logprobs(shared, x_ND, *weights, words_NK, **rule)
        return word_logprobs(x_ND, weights[0], words_NK, bias=weights[1], **rule)

    return decoder.read_head(read)


def whole_tokens(spread: Spread, x_BTD: Tensor) -> Tensor:
    """Return the vectors of all tokens, where ranks have a share of them behind the last layer.

    Tensor-parallel ranks find the same gradient for them, context-parallel ones parts of a sum.
    """
    mesh = spread.mesh
    if mesh.layout.sequence_parallel:
        x_BTD = join_parts(x_BTD, mesh["tp"], TOKENS)
    if mesh.layout.cp == 1:
        return x_BTD
    gathered = gather_in(x_BTD, mesh["cp"], TOKENS)
    return order_of(mesh.layout, gathered.shape[TOKENS]).join(gathered, TOKENS)


def summed(losses: Tensor) -> Loss:
    """Return losses as the trainer adds them up."""
    total = losses.float().sum()
    count = torch.tensor(losses.numel(), device=losses.device)
    return Loss(total, count, torch.zeros((), device=losses.device))


def per_pair(seen: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return sums as means over pairs, whose number is among them."""
    if not seen:
        return {}
    return {name: one / seen["pairs"].clamp(min=1) for name, one in seen.items() if name != "pairs"}
