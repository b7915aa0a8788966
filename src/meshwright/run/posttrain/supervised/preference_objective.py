"""DPO, IPO and KTO: answers that are liked become likelier than under the model at the start."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from meshwright.run.nn.decoder import BatchLoss, Decoder
from meshwright.run.parallel.sharded_model import ShardedModel
from meshwright.run.posttrain.objectives.preference_loss import dpo_loss, ipo_loss, kto_loss
from meshwright.run.posttrain.supervised.example_index import ExampleIndex, list_example_ids
from meshwright.run.posttrain.supervised.recipe_config import DPORecipe, IPORecipe, KTORecipe
from meshwright.run.posttrain.supervised.recipe_job import RecipeJob
from meshwright.run.posttrain.supervised.recipe_objective import (
    HiddenStateObjective,
    as_summed_loss,
    average_per_pair,
)
from meshwright.run.posttrain.supervised.reference_logprobs import (
    ReplicaGroupInfo,
    compute_completion_logprobs,
    compute_packed_logprobs,
    compute_reference_logprobs,
)
from meshwright.run.train.data.batch import TrainBatch
from meshwright.run.train.data.fingerprint import compute_fingerprint
from meshwright.run.train.objective import AllReduceFn


def make_reference_cache_key(job: RecipeJob, examples: ExampleIndex) -> str:
    """Name the weights that a run began with, and the examples."""
    return compute_fingerprint(
        examples.fingerprint, job.initial_load_path or "", job.seed, job.layout.precision
    )


class ReferenceObjective(HiddenStateObjective):
    """A learner that knows how likely answers were before it learnt."""

    def __init__(
        self,
        decoder: Decoder,
        job: RecipeJob,
        example_index: ExampleIndex,
        folder: Path,
        sharded_model: ShardedModel | None = None,
    ) -> None:
        super().__init__(decoder, job, sharded_model)
        self.example_index, self._folder = example_index, folder
        self.device = next(decoder.parameters()).device
        self.reference_logprobs = torch.zeros(0, device=self.device)
        """Log-probabilities of all answers before anything was learnt."""
        if job.layout.dp == 1:  # else other replicas help
            self._refer(None)

    def set_replicas(self, together: AllReduceFn, replica: int) -> None:
        """Know of other replicas, and find the reference together."""
        super().set_replicas(together, replica)
        if self.job.layout.dp > 1:
            self._refer(ReplicaGroupInfo(replica, self.job.layout.dp, together))

    def _refer(self, replicas: ReplicaGroupInfo | None) -> None:
        job = self.job
        self.reference_logprobs = compute_reference_logprobs(
            self.decoder,
            self.example_index,
            self._folder,
            make_reference_cache_key(job, self.example_index),
            adapter=self.adapter,
            most_tokens=job.workload.sequence_length * job.layout.microbatch,
            sharded_model=self.spread,
            replicas=replicas,
        )

    def compute_log_ratios(self, x_BTD: Tensor, part: TrainBatch) -> Tensor:
        """Return log π - log ref of each answer, summed over its tokens, [S]."""
        found = compute_completion_logprobs(self.decoder, self.example_index, x_BTD, part)
        return found - self.reference_logprobs[list_example_ids(part)]


class PairPreferenceObjective(ReferenceObjective):
    """Pairs of answers, of which one is liked better (DPO, IPO)."""

    METRIC_NAMES = ("pairs", "margin", "accuracy", "chosen_log_ratio", "rejected_log_ratio")

    def __init__(
        self,
        decoder: Decoder,
        job: RecipeJob,
        example_index: ExampleIndex,
        folder: Path,
        sharded_model: ShardedModel | None = None,
    ) -> None:
        super().__init__(decoder, job, example_index, folder, sharded_model)
        assert isinstance(job.recipe, DPORecipe | IPORecipe)
        self.recipe = job.recipe
        self.num_targets = torch.tensor(
            np.array([example_index[number].num_targets for number in range(len(example_index))])
        )

    def loss_divisor(self, batch: TrainBatch) -> int:
        """Return the pairs."""
        return len(list_example_ids(batch)) // 2

    def loss_from_hidden(self, x_BTD: Tensor, part: TrainBatch) -> BatchLoss:
        """Return the summed loss of the pairs; the even answers are chosen, odd ones rejected."""
        log_ratios = self.compute_log_ratios(x_BTD, part)
        if isinstance(self.recipe, IPORecipe) and self.recipe.log_ratio_reduction == "mean":
            log_ratios = log_ratios / self.num_targets[list_example_ids(part)].to(log_ratios.device)
        chosen, rejected = log_ratios[0::2], log_ratios[1::2]
        if isinstance(self.recipe, DPORecipe):
            losses = dpo_loss(
                chosen, rejected, beta=self.recipe.beta, label_smoothing=self.recipe.label_smoothing
            )
        else:
            losses = ipo_loss(chosen, rejected, beta=self.recipe.beta)
        margin = self.recipe.beta * (chosen - rejected)
        self.accumulate_metrics(
            pairs=torch.tensor(len(chosen), device=log_ratios.device),
            margin=margin.sum(),
            accuracy=(margin > 0).sum(),
            chosen_log_ratio=chosen.sum(),
            rejected_log_ratio=rejected.sum(),
        )
        return as_summed_loss(losses)

    def average_metrics(self, seen: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return figures per pair."""
        return average_per_pair(seen)


class KTOObjective(ReferenceObjective):
    """Answers that were judged one by one (KTO)."""

    METRIC_NAMES = (
        "desirable",
        "undesirable",
        "desirable_log_ratio",
        "undesirable_log_ratio",
        "kl",
    )

    def __init__(
        self,
        decoder: Decoder,
        job: RecipeJob,
        example_index: ExampleIndex,
        folder: Path,
        sharded_model: ShardedModel | None = None,
        *,
        mismatched_ids: Mapping[int, int],
        first_eval_id: int,
    ) -> None:
        """Make it.

        `mismatched_ids` gives an example's prompt under the answer of another, by number; those
        from `first_eval_id` on are held out.
        """
        super().__init__(decoder, job, example_index, folder, sharded_model)
        assert isinstance(job.recipe, KTORecipe)
        self.recipe, self.mismatched_ids, self.first_eval_id = (
            job.recipe,
            mismatched_ids,
            first_eval_id,
        )
        self.is_desirable = torch.tensor(example_index.is_preferred).to(self.device)
        self.kl_baseline = torch.zeros((), device=self.device)
        """How far the policy has moved, estimated for each step as a whole."""

    def train(self, mode: bool) -> None:
        """Train from here on, or only evaluate, with one estimate for all that is held out."""
        super().train(mode)
        if not mode:
            held = sorted(one for one in self.mismatched_ids if one >= self.first_eval_id)
            # The same whatever the size of a batch, and whoever evaluates which.
            self._estimate(held[: self.job.eval.sequences])

    def begin_step(self, batch: TrainBatch) -> None:
        """Estimate how far the policy has moved in this step."""
        super().begin_step(batch)
        if self.decoder.training:
            self._estimate(list_example_ids(batch), self.all_reduce)

    @torch.no_grad()
    def _estimate(self, answers: Sequence[int], together: AllReduceFn | None = None) -> None:
        """Estimate how far the policy has moved, from these prompts under answers to others."""
        numbers = [self.mismatched_ids[one] for one in answers if one in self.mismatched_ids]
        most = self.job.workload.sequence_length * self.job.layout.microbatch
        runs = list(self.example_index.group_by_tokens(numbers, most))
        training = self.decoder.training
        # Nothing is trained on these answers: experts do not count them, no input is left out.
        super().train(False)
        found = compute_packed_logprobs(
            self.decoder, self.example_index, runs, self.spread, size=most
        )
        super().train(training)
        sums = torch.tensor([0.0, len(numbers)], device=self.device)
        for run, each in zip(runs, found, strict=True):
            sums[0] += (each - self.reference_logprobs[run]).sum()
        if together is not None:
            sums = together(sums)
        # z₀, an estimate of KL(π ‖ ref), is never below 0 (arXiv 2402.01306 §4.1).
        self.kl_baseline = (sums[0] / sums[1].clamp(min=1)).clamp(min=0)

    def loss_divisor(self, batch: TrainBatch) -> int:
        """Return the answers."""
        return len(list_example_ids(batch))

    def loss_from_hidden(self, x_BTD: Tensor, part: TrainBatch) -> BatchLoss:
        """Return the summed loss of the answers."""
        log_ratios = self.compute_log_ratios(x_BTD, part)
        desirable = self.is_desirable[list_example_ids(part)]
        losses = kto_loss(
            log_ratios,
            desirable,
            baseline=self.kl_baseline,
            beta=self.recipe.beta,
            desirable_weight=self.recipe.desirable_weight,
            undesirable_weight=self.recipe.undesirable_weight,
        )
        self.accumulate_metrics(
            desirable=desirable.sum(),
            undesirable=(~desirable).sum(),
            desirable_log_ratio=(log_ratios * desirable).sum(),
            undesirable_log_ratio=(log_ratios * ~desirable).sum(),
            kl=self.kl_baseline * len(log_ratios),
        )
        return as_summed_loss(losses)

    def average_metrics(self, seen: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return figures per desirable or undesirable example; no number where there is none."""
        if not seen:
            return {}
        desirable = seen["desirable_log_ratio"] / seen["desirable"]
        undesirable = seen["undesirable_log_ratio"] / seen["undesirable"]
        return {
            "margin": self.recipe.beta * (desirable - undesirable),
            "desirable_log_ratio": desirable,
            "undesirable_log_ratio": undesirable,
            "kl": seen["kl"] / (seen["desirable"] + seen["undesirable"]).clamp(min=1),
        }
