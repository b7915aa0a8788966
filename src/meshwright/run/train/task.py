"""`Task`: where a run's batches come from, what it begins with and who learns from them.

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
from meshwright.run.nn.holding import Holding
from meshwright.run.nn.huggingface import load
from meshwright.run.parallel.spread import Spread
from meshwright.run.train.data.batches import Batches
from meshwright.run.train.data.opening import open_data
from meshwright.run.train.data.sources import source_problems
from meshwright.run.train.job import Job
from meshwright.run.train.learner import Learner, NextToken
from meshwright.spec.workload import Training


class Task(Protocol):
    """What a trainer asks of the kind of run it does."""

    def problems(self, job: Job) -> Sequence[Problem]:
        """Return what keeps a job's data from being opened, or the job from running."""

    def batches(self, job: Job, *, rank: int, world: int) -> Batches:
        """Open what one of several replicas trains on."""

    def held_out(self, job: Job) -> Batches | None:
        """Open what the model is tried on; None where nothing is held out."""

    def spreads(self, job: Job) -> bool:
        """Tell whether ranks hold parts of the model; else each holds a whole replica."""

    def needs_start(self, job: Job, folder: Path) -> bool:
        """Tell whether a run that goes on still needs the weights it began with."""

    def load(
        self, decoder: Decoder, start_from: str, holdings: Mapping[str, Holding] | None = None
    ) -> None:
        """Fill a decoder with the weights that a run begins with."""

    def learner(
        self, decoder: Decoder, job: Job, folder: Path, spread: Spread | None = None
    ) -> Learner:
        """Return who learns, once the decoder has its first weights.

        `spread` says how the decoder lies, where several ranks share a model.
        """


class TextTask:
    """The next token of text, by all weights."""

    def problems(self, job: Job) -> Sequence[Problem]:
        """Return what keeps the sources from being opened."""
        return source_problems(job.data)

    def batches(self, job: Job, *, rank: int, world: int) -> Batches:
        """Open the corpora."""
        return open_data(
            job.data,
            job.workload,
            seed=job.seed,
            rank=rank,
            world=world,
            vocabulary_size=job.model.vocab,
        )

    def held_out(self, job: Job) -> Batches | None:
        """Open held-out text."""
        if not job.data.validation and not job.data.validation_sources:
            if job.evaluation.every_steps:
                warnings.warn("nothing is held out, so nothing is evaluated", stacklevel=3)
            return None
        return open_data(
            job.data,
            held_out_workload(job),
            seed=job.seed,
            split="validation",
            vocabulary_size=job.model.vocab,
        )

    def spreads(self, job: Job) -> bool:  # noqa: ARG002 - always
        """Let ranks hold what the layout gives them."""
        return True

    def needs_start(self, job: Job, folder: Path) -> bool:  # noqa: ARG002 - never
        """Go on from checkpoints alone: what the run began with may be gone."""
        return False

    def load(
        self, decoder: Decoder, start_from: str, holdings: Mapping[str, Holding] | None = None
    ) -> None:
        """Read a Hugging Face checkpoint."""
        load(decoder, start_from, holdings=holdings)

    def learner(
        self,
        decoder: Decoder,
        job: Job,  # noqa: ARG002
        folder: Path,  # noqa: ARG002
        spread: Spread | None = None,  # noqa: ARG002
    ) -> Learner:
        """Train all weights."""
        return NextToken(decoder)


def held_out_workload(job: Job) -> Training:
    """Return the batches of an evaluation: one microbatch, so what fits in training fits here."""
    return msgspec.structs.replace(
        job.workload, global_batch=min(job.layout.microbatch, job.evaluation.sequences)
    )
