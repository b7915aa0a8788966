"""`Trainer`: everything of one run put together from its `Job`, and its state as one table.

The state of a run is its weights, what the optimizer keeps, what the guard remembers and the
number of steps done: the data is a function of the step, and so is the learning rate.
"""

import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import nn
from torch.nn.utils import get_total_norm

from meshwright.errors import DamagedFile, InputError, MissingPart, Problem
from meshwright.run.kernels.products import fastest_products
from meshwright.run.nn.build import build
from meshwright.run.nn.decoder import Decoder
from meshwright.run.nn.linear import Linear
from meshwright.run.parallel.matrices import WholeMatrices
from meshwright.run.parallel.mesh import Mesh
from meshwright.run.parallel.spread import Spread
from meshwright.run.parallel.sync import Sync, make_sync
from meshwright.run.train.checkpoint import CheckpointFailed, Checkpoints, Staged
from meshwright.run.train.checkpoint.folder import read_record
from meshwright.run.train.checkpoint.record import decode_extra
from meshwright.run.train.graph import choose_graph
from meshwright.run.train.guards import Guard, TrainingStopped
from meshwright.run.train.job import Job
from meshwright.run.train.learner import NextToken
from meshwright.run.train.optimizer.optimizer import make_optimizer
from meshwright.run.train.optimizer.parts import matrices_for_muon, matrix_parts
from meshwright.run.train.placed_state import State, placed_state, whole_state
from meshwright.run.train.replica_step import ReplicaStep
from meshwright.run.train.run_state import (
    BEGIN_ANEW,
    RunState,
    changes,
    kept_of,
    kind_of,
    other_kind,
    state_of,
)
from meshwright.run.train.spread_step import SpreadStep, make_spread
from meshwright.run.train.step import TrainStep, make_decoder
from meshwright.run.train.task import Task, TextTask

MOST_FAILED_SAVES = 3
"""Saves that fail in a row before a run ends: a full disk may be a matter of minutes."""


class Trainer:
    """A run's decoder, optimizer, data, guard and checkpoints."""

    def __init__(
        self, job: Job, folder: Path, mesh: Mesh | None = None, *, task: Task | None = None
    ) -> None:
        """Put a run together; nothing of an earlier one is loaded yet.

        With a `mesh` this is one rank of several that train together. `task` says what is trained
        on what; None trains all weights on text.
        """
        self.job, self.folder, self.mesh = job, folder, mesh
        self.task: Task = TextTask() if task is None else task
        for remark in job.remarks() if self.first else ():
            warnings.warn(remark, stacklevel=2)
        self.device = pick_device(job) if mesh is None else mesh.device
        self.steps = job.workload.steps
        self.step_number = 0
        self.tokens_seen = 0
        self._saved_at: int | None = None
        self._failed_saves = 0
        self.checkpoints = Checkpoints(folder / "checkpoints", job.checkpoint, mesh=mesh)
        self.batches = self.task.batches(
            job, rank=0 if mesh is None else mesh.place.dp, world=job.layout.dp
        )
        self.held_out = self.task.held_out(job)
        self.decoder, self.spread = self._first_weights()
        self.learner = self.task.learner(self.decoder, job, folder, self.spread)
        if mesh is not None:  # before weights are cut over replicas
            self.learner.join(mesh["dp"].all_reduce, mesh.place.dp)
        self.sync: Sync | None = None
        if self.spread is not None:
            self.spread = self.learner.trained(self.spread)
            self.sync = make_sync(self.spread)
        self.optimizer = make_optimizer(
            self.updated(),
            job.layout,
            job.optimizer,
            total_steps=self.steps,
            seed=job.seed,
            parts=matrix_parts(self.decoder if self.sync is None else build(job.model)),
            matrices=self._whole_matrices(),
        )
        self.step: TrainStep | SpreadStep = self._steps()
        self.guard = Guard(job.guards)

    @property
    def first(self) -> bool:
        """Whether this process speaks for the run: writes its figures, configuration and page."""
        return self.mesh is None or self.mesh.rank == 0

    def updated(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Go through what this rank updates."""
        return (self.learner if self.sync is None else self.sync).named_parameters()

    def _first_weights(self) -> tuple[Decoder, Spread | None]:
        """Return the modules that are here, and how they lie where there are several ranks."""
        job, made = self.job, None
        given: dict[str, Any] = {
            "seed": job.seed,
            "products": fastest_products(self.device) if job.machine.tuned_products else None,
            "options": job.options(),
        }
        if self.mesh is None or not self.task.spreads(job):
            decoder = make_decoder(job.model, job.layout, device=self.device, **given)
        else:
            made = make_spread(job.model, self.mesh, **given)
            decoder = made.decoder
        # A run that goes on has no more need of what it began with, which may be gone.
        begins = not self.checkpoints.list() or self.task.needs_start(job, self.folder)
        if job.start_from is not None and begins:
            self.task.load(decoder, job.start_from, None if made is None else made.holdings)
        if self.first and job.layout.precision.startswith("fp8") and not _uses_fp8(decoder):
            what = "no product of this model is in fp8: all are too small for it, or of odd sizes"
            warnings.warn(f"{what}; they are computed in bf16", stacklevel=3)
        return decoder, made

    def _whole_matrices(self) -> WholeMatrices | None:
        """Return what Muon works on, where ranks hold parts of it."""
        if self.spread is None or self.sync is None or self.job.layout.optimizer != "muon":
            return None
        return matrices_for_muon(self.spread, self.sync)

    def _steps(self) -> TrainStep | SpreadStep:
        job = self.job
        balanced = any(part.balance is not None for part in self.decoder.experts())
        rate = job.loss.balance_rate if balanced else 0.0
        size = job.layout.microbatch
        if self.spread is not None and self.sync is not None:
            return SpreadStep(
                self.spread,
                self.sync,
                self.optimizer,
                microbatch=size,
                balance_rate=rate,
                learner=self.learner,
            )
        if self.mesh is not None:
            return ReplicaStep(
                self.decoder, self.optimizer, self.mesh, self.learner, microbatch=size
            )
        graph = choose_graph(
            job.machine.graph,
            job.model,
            job.layout,
            length=job.workload.sequence_length,
            device=self.device,
        )
        return TrainStep(
            self.decoder,
            self.optimizer,
            microbatch=size,
            balance_rate=rate,
            # What other learners see of a step is no part of a recording.
            graph=graph.record and isinstance(self.learner, NextToken),
            learner=self.learner,
        )

    def tensors(self) -> Mapping[str, State]:
        """Return every tensor that a resumed run needs: the run's own, not copies."""
        if self.sync is not None:
            return placed_state(self.sync, self.optimizer, self.learner.saved_as)
        return whole_state(self.learner.tensors(), self.optimizer)

    @property
    def finished(self) -> bool:
        """Whether every step of the job is done."""
        return self.step_number >= self.steps

    @property
    def saved(self) -> bool:
        """Whether the state after the steps done so far is the last that was saved."""
        return self._saved_at == self.step_number

    def save(self) -> Staged:
        """Save the state after the steps done so far; weights that are no numbers are refused."""
        weights = [value.detach() for _, value in self.updated()]
        # The largest of them: unlike a sum of squares it overflows only where one of them did.
        finite = torch.isfinite(get_total_norm(weights, norm_type=torch.inf))
        if self.mesh is not None:
            finite = self.mesh.world.all_reduce(finite.to(torch.float32), "min")
        if not finite:
            raise TrainingStopped(
                f"stopped after step {self.step_number}: the weights are not finite any more; the "
                f"last good checkpoint is {self.last_good() or 'none'}. Go back to it with a lower "
                "learning rate"
            )
        self._settle()
        state = RunState(
            tokens_seen=self.tokens_seen,
            guard=self.guard.to_save(),
            data=self.batches.fingerprint,
            kept=kept_of(self.job),
        )
        staged = self.checkpoints.save(self.step_number, self.tensors(), msgspec.to_builtins(state))
        self._saved_at = self.step_number
        return staged

    def _settle(self) -> None:
        """Wait for the save before; a failed one is warned of, several in a row end the run."""
        try:
            self.checkpoints.wait()
        except CheckpointFailed as error:
            self._failed_saves += 1
            if self._failed_saves >= MOST_FAILED_SAVES:
                raise
            warnings.warn(f"{error}; training goes on, and this checkpoint is next", stacklevel=4)
        else:
            self._failed_saves = 0

    def last_good(self) -> Path | None:
        """Return the newest checkpoint, once what is being written is on the disk."""
        self.checkpoints.wait()
        newest = self.checkpoints.latest()
        return None if newest is None else newest.path

    def resume(self) -> bool:
        """Go on from the newest checkpoint that is whole; False where there never was one.

        Where all of them are damaged, that is an error: to begin anew is for the user to say.
        """
        if not self.checkpoints.list():
            return False
        newest = self.checkpoints.latest()
        if newest is not None:  # another job is told apart before any tensor is compared
            extra = decode_extra(read_record(newest.path))
            kind, fix = kind_of(self.job.kept()), ", or begin anew with --fresh"
            if (problem := other_kind(kind, extra, self.folder, fix)) is not None:
                raise InputError([problem])
            self._compare(state_of(extra, newest.path))
        try:
            loaded = self.checkpoints.load(self.tensors())
        except DamagedFile as error:
            if self.job.checkpoint.damaged != "fall-back":
                raise
            raise DamagedFile([*error.problems, self._all_damaged()]) from None
        state = state_of(loaded.extra, loaded.found.path)
        if self.sync is not None:
            self.sync.finish()
        self.step_number = self._saved_at = loaded.step
        self.tokens_seen = state.tokens_seen
        self.guard = Guard(self.job.guards, state.guard)
        return True

    def _compare(self, state: RunState) -> None:
        """Refuse to go on with a job that would not be the same run."""
        problems = changes(self.job, state)
        if state.data != self.batches.fingerprint and not problems:
            what = "tokens, their order or their blend are not those the run began with"
            problems.append(Problem("data", what, BEGIN_ANEW))
        if problems:
            raise InputError(problems)

    def _all_damaged(self) -> Problem:
        what = "none of its checkpoints is whole, so the run cannot go on"
        return Problem(str(self.folder), what, "begin anew with --fresh, which keeps this folder")

    def close(self) -> None:
        """Wait for what is being written, and let go."""
        self.checkpoints.close()


def _uses_fp8(decoder: Decoder) -> bool:
    linears = (part for part in decoder.modules() if isinstance(part, Linear))
    return any(part.low_precision is not None for part in linears)


def pick_device(job: Job) -> torch.device:
    """Return the device a job trains on."""
    asked = job.machine.device
    if asked == "cuda" and not torch.cuda.is_available():
        hint = 'set machine.device = "cpu", or leave it out'
        raise MissingPart("the job asks for a CUDA device, and torch sees none", hint)
    if asked == "auto":
        asked = "cuda" if torch.cuda.is_available() else "cpu"
    if job.machine.threads is not None:
        torch.set_num_threads(job.machine.threads)
    return (
        torch.device(asked, torch.cuda.current_device()) if asked == "cuda" else torch.device(asked)
    )
