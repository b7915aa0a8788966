"""DPO, IPO and KTO: answers that are liked become likelier than under the model at the start."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from meshwright.run.nn.decoder import Decoder, Loss
from meshwright.run.parallel.spread import Spread
from meshwright.run.posttrain.objectives.preference import dpo, ipo, kto
from meshwright.run.posttrain.supervised.examples import Examples, numbers_of
from meshwright.run.posttrain.supervised.job import RecipeJob
from meshwright.run.posttrain.supervised.learner import JudgingLearner, per_pair, summed
from meshwright.run.posttrain.supervised.reference import (
    Replicas,
    answer_logprobs,
    logprobs_of_runs,
    reference_logprobs,
)
from meshwright.run.posttrain.supervised.settings import Dpo, Ipo, Kto
from meshwright.run.train.data.batch import Batch
from meshwright.run.train.data.fingerprint import fingerprint
from meshwright.run.train.learner import Together


def reference_name(job: RecipeJob, examples: Examples) -> str:
    """Name the weights that a run began with, and the examples."""
    return fingerprint(examples.fingerprint, job.start_from or "", job.seed, job.layout.precision)


class AgainstReference(JudgingLearner):
    """A learner that knows how likely answers were before it learnt."""

    def __init__(
        self,
        decoder: Decoder,
        job: RecipeJob,
        examples: Examples,
        folder: Path,
        spread: Spread | None = None,
    ) -> None:
        super().__init__(decoder, job, spread)
        self.examples, self._folder = examples, folder
        self.device = next(decoder.parameters()).device
        self.reference = torch.zeros(0, device=self.device)
        """Log-probabilities of all answers before anything was learnt."""
        if job.layout.dp == 1:  # else other replicas help
            self._refer(None)

    def join(self, together: Together, replica: int) -> None:
        """Know of other replicas, and find the reference together."""
        super().join(together, replica)
        if self.job.layout.dp > 1:
            self._refer(Replicas(replica, self.job.layout.dp, together))

    def _refer(self, replicas: Replicas | None) -> None:
        job = self.job
        self.reference = reference_logprobs(
            self.decoder,
            self.examples,
            self._folder,
            reference_name(job, self.examples),
            adapter=self.adapter,
            most_tokens=job.workload.sequence_length * job.layout.microbatch,
            spread=self.spread,
            replicas=replicas,
        )

    def gains(self, x_BTD: Tensor, part: Batch) -> Tensor:
        """Return log π - log ref of each answer, summed over its tokens, [S]."""
        found = answer_logprobs(self.decoder, self.examples, x_BTD, part)
        return found - self.reference[numbers_of(part)]


class PairLearner(AgainstReference):
    """Pairs of answers, of which one is liked better (DPO, IPO)."""

    SEEN = ("pairs", "margin", "accuracy", "chosen_gain", "rejected_gain")

    def __init__(
        self,
        decoder: Decoder,
        job: RecipeJob,
        examples: Examples,
        folder: Path,
        spread: Spread | None = None,
    ) -> None:
        super().__init__(decoder, job, examples, folder, spread)
        assert isinstance(job.recipe, Dpo | Ipo)
        self.recipe = job.recipe
        self.targets = torch.tensor(
            np.array([examples[number].targets for number in range(len(examples))])
        )

    def count(self, batch: Batch) -> int:
        """Return the pairs."""
        return len(numbers_of(batch)) // 2

    def judged(self, x_BTD: Tensor, part: Batch) -> Loss:
        """Return the summed loss of the pairs; the even answers are chosen, odd ones rejected."""
        gains = self.gains(x_BTD, part)
        if isinstance(self.recipe, Ipo) and self.recipe.gains == "mean":
            gains = gains / self.targets[numbers_of(part)].to(gains.device)
        chosen, rejected = gains[0::2], gains[1::2]
        if isinstance(self.recipe, Dpo):
            losses = dpo(chosen, rejected, beta=self.recipe.beta, flips=self.recipe.flips)
        else:
            losses = ipo(chosen, rejected, beta=self.recipe.beta)
        margin = self.recipe.beta * (chosen - rejected)
        self.see(
            pairs=torch.tensor(len(chosen), device=gains.device),
            margin=margin.sum(),
            accuracy=(margin > 0).sum(),
            chosen_gain=chosen.sum(),
            rejected_gain=rejected.sum(),
        )
        return summed(losses)

    def means(self, seen: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return figures per pair."""
        return per_pair(seen)


class VerdictLearner(AgainstReference):
    """Answers that were judged one by one (KTO)."""

    SEEN = ("wanted", "unwanted", "wanted_gain", "unwanted_gain", "moved")

    def __init__(
        self,
        decoder: Decoder,
        job: RecipeJob,
        examples: Examples,
        folder: Path,
        spread: Spread | None = None,
        *,
        strange: Mapping[int, int],
        held_from: int,
    ) -> None:
        """Make it.

        `strange` gives an example's prompt under the answer of another, by number; those from
        `held_from` on are held out.
        """
        super().__init__(decoder, job, examples, folder, spread)
        assert isinstance(job.recipe, Kto)
        self.recipe, self.strange, self.held_from = job.recipe, strange, held_from
        self.liked = torch.tensor(examples.liked).to(self.device)
        self.baseline = torch.zeros((), device=self.device)
        """How far the policy has moved, estimated for each step as a whole."""

    def train(self, mode: bool) -> None:
        """Train from here on, or only evaluate, with one estimate for all that is held out."""
        super().train(mode)
        if not mode:
            held = sorted(one for one in self.strange if one >= self.held_from)
            # The same whatever the size of a batch, and whoever evaluates which.
            self._estimate(held[: self.job.evaluation.sequences])

    def begin(self, batch: Batch) -> None:
        """Estimate how far the policy has moved in this step."""
        super().begin(batch)
        if self.decoder.training:
            self._estimate(numbers_of(batch), self.together)

    @torch.no_grad()
    def _estimate(self, answers: Sequence[int], together: Together | None = None) -> None:
        """Estimate how far the policy has moved, from these prompts under answers to others."""
        numbers = [self.strange[one] for one in answers if one in self.strange]
        most = self.job.workload.sequence_length * self.job.layout.microbatch
        runs = list(self.examples.rows(numbers, most))
        training = self.decoder.training
        # Nothing is trained on these answers: experts do not count them, no input is left out.
        super().train(False)
        found = logprobs_of_runs(self.decoder, self.examples, runs, self.spread, size=most)
        super().train(training)
        sums = torch.tensor([0.0, len(numbers)], device=self.device)
        for run, each in zip(runs, found, strict=True):
            sums[0] += (each - self.reference[run]).sum()
        if together is not None:
            sums = together(sums)
        # z₀, an estimate of KL(π ‖ ref), is never below 0 (arXiv 2402.01306 §4.1).
        self.baseline = (sums[0] / sums[1].clamp(min=1)).clamp(min=0)

    def count(self, batch: Batch) -> int:
        """Return the answers."""
        return len(numbers_of(batch))

    def judged(self, x_BTD: Tensor, part: Batch) -> Loss:
        """Return the summed loss of the answers."""
        gains = self.gains(x_BTD, part)
        wanted = self.liked[numbers_of(part)]
        losses = kto(
            gains,
            wanted,
            baseline=self.baseline,
            beta=self.recipe.beta,
            of_wanted=self.recipe.wanted,
            of_unwanted=self.recipe.unwanted,
        )
        self.see(
            wanted=wanted.sum(),
            unwanted=(~wanted).sum(),
            wanted_gain=(gains * wanted).sum(),
            unwanted_gain=(gains * ~wanted).sum(),
            moved=self.baseline * len(gains),
        )
        return summed(losses)

    def means(self, seen: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return figures per answer that is wanted, or is not; no number where there is none."""
        if not seen:
            return {}
        wanted = seen["wanted_gain"] / seen["wanted"]
        unwanted = seen["unwanted_gain"] / seen["unwanted"]
        return {
            "margin": self.recipe.beta * (wanted - unwanted),
            "wanted_gain": wanted,
            "unwanted_gain": unwanted,
            "moved": seen["moved"] / (seen["wanted"] + seen["unwanted"]).clamp(min=1),
        }
