"""`TrainTask`: where a run's batches come from, what it begins with and who learns from them.

`TextTask` trains all of a model on text. Post-training brings tasks of its own, and the trainer
needs to know of none.
"""

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from meshwright.errors import Problem
from meshwright.run.nn.decoder import Decoder
from meshwright.run.nn.huggingface import load_hf_checkpoint
from meshwright.run.nn.sharding.shard_spec import ShardSpec
from meshwright.run.parallel.sharded_model import ShardedModel
from meshwright.run.train.data.batch_dataset import BatchDataset
from meshwright.run.train.data.corpus_loader import find_source_problems
from meshwright.run.train.data.dataset_builder import build_dataset
from meshwright.run.train.job.train_job import TrainJob
from meshwright.run.train.objective import NextTokenObjective, Objective
from meshwright.spec.workload import TrainingWorkload


class TrainTask(Protocol):
    """What a trainer asks of the kind of run it does."""

    def problems(self, job: TrainJob) -> Sequence[Problem]:
        """Return what keeps a job's data from being opened, or the job from running."""

    def train_dataset(self, job: TrainJob, *, rank: int, world: int) -> BatchDataset:
        """Open what one of several replicas trains on."""

    def eval_dataset(self, job: TrainJob) -> BatchDataset | None:
        """Open the validation data; None where there is none."""

    def shards_model(self, job: TrainJob) -> bool:
        """Tell whether ranks hold parts of the model; else each holds a whole replica."""

    def needs_initial_weights(self, job: TrainJob, folder: Path) -> bool:
        """Tell whether a run that goes on still needs the weights it began with."""

    def load_initial_weights(
        self,
        decoder: Decoder,
        initial_load_path: str,
        shard_specs: Mapping[str, ShardSpec] | None = None,
    ) -> None:
        """Fill a decoder with the weights that a run begins with."""

    def make_objective(
        self,
        decoder: Decoder,
        job: TrainJob,
        folder: Path,
        sharded_model: ShardedModel | None = None,
    ) -> Objective:
        """Return who learns, once the decoder has its first weights.

        `sharded_model` says how the decoder lies, where several ranks share a model.
        """


class TextTask:
    """The next token of text, by all weights."""

    def problems(self, job: TrainJob) -> Sequence[Problem]:
        """Return what keeps the sources from being opened."""
        return find_source_problems(job.data)

    def train_dataset(self, job: TrainJob, *, rank: int, world: int) -> BatchDataset:
        """Open the corpora."""
        return build_dataset(
            job.data,
            job.workload,
            seed=job.seed,
            rank=rank,
            world=world,
            vocabulary_size=job.model.vocab,
        )

    def eval_dataset(self, job: TrainJob) -> BatchDataset | None:
        """Open the validation text."""
        if not job.data.validation_fraction and not job.data.validation_sources:
            if job.eval.every_steps:
                warnings.warn("no validation data: evaluation is disabled", stacklevel=3)
            return None
        return build_dataset(
            job.data,
            make_eval_workload(job),
            seed=job.seed,
            split="validation",
            vocabulary_size=job.model.vocab,
        )

    def shards_model(self, job: TrainJob) -> bool:  # noqa: ARG002 - always
        """Let ranks hold what the layout gives them."""
        return True

    def needs_initial_weights(self, job: TrainJob, folder: Path) -> bool:  # noqa: ARG002 - never
        """Go on from checkpoints alone: what the run began with may be gone."""
        return False

    def load_initial_weights(
        self,
        decoder: Decoder,
        initial_load_path: str,
        shard_specs: Mapping[str, ShardSpec] | None = None,
    ) -> None:
        """Read a Hugging Face checkpoint."""
        load_hf_checkpoint(decoder, initial_load_path, shard_specs=shard_specs)

    def make_objective(
        self,
        decoder: Decoder,
        job: TrainJob,  # noqa: ARG002
        folder: Path,  # noqa: ARG002
        sharded_model: ShardedModel | None = None,  # noqa: ARG002
    ) -> Objective:
        """Train all weights."""
        return NextTokenObjective(decoder)


def make_eval_workload(job: TrainJob) -> TrainingWorkload:
    """Return the batches of an evaluation: one microbatch, so what fits in training fits here."""
    return msgspec.structs.replace(
        job.workload, global_batch=min(job.layout.microbatch, job.eval.sequences)
    )
