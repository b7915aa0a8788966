"""`RecipeLearner`: what of a decoder a recipe trains, by the plain recipe: answers as they are."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from meshwright.run.nn.decoder import Decoder, Loss
from meshwright.run.posttrain.adapters import DecoderAdapter, adapt, save_adapter
from meshwright.run.posttrain.objectives.chosen import word_logprobs
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

    def __init__(self, decoder: Decoder, job: RecipeJob) -> None:
        super().__init__(decoder)
        self.job = job
        self.adapter: DecoderAdapter | None = None
        if job.adapter is not None:
            self.adapter = adapt(decoder, job.adapter.lora(), seed=job.seed)
        self.together: Together | None = None
        """Adds up over replicas, where there are several."""
        self.sums: dict[str, Tensor] = {}
        """What was seen since figures were last asked for."""
        self._before: dict[str, Tensor] = {}

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Go through the parameters that are trained."""
        return (self.adapter or self.decoder).named_parameters()

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

    def join(self, together: Together) -> None:
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
        if self.together is not None and seen:
            # Replicas saw the same kinds of things, in the same order.
            seen = dict(zip(seen, self.together(torch.stack([*seen.values()])), strict=True))
        return self.means(seen)

    def means(self, seen: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Turn sums into figures; plain answers have none beside the loss."""
        return dict(seen)

    def ended(self, folder: Path) -> None:
        """Write the adapter where there is one."""
        if self.adapter is not None:
            save_adapter(self.adapter, folder / ADAPTER, base=self.job.start_from)


def decoder_words(decoder: Decoder, x_ND: Tensor, words_NK: Tensor) -> Tensor:
    """Return log p of given words for some hidden vectors of a decoder, [N, K].

    Their number differs from step to step, so no product is timed for it: torch's own are used.
    """
    return word_logprobs(
        x_ND,
        decoder.head_weight,
        words_NK,
        bias=decoder.head.bias,
        softcap=decoder.model.logit_softcap,
        scale=decoder.model.logit_scale,
    ).logprobs


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
