"""`Trainer`: everything of one run put together from its `TrainJob`, and its state as one table.

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

from meshwright.errors import DamagedFile, InputError, MissingDependency, Problem
from meshwright.run.kernels.gemm.gemm import select_gemm_backend
from meshwright.run.nn.decoder import Decoder
from meshwright.run.nn.decoder_builder import build_decoder
from meshwright.run.nn.linear.linear import Linear
from meshwright.run.parallel.mesh import Mesh
from meshwright.run.parallel.sharded_model import ShardedModel
from meshwright.run.parallel.zero.gradient_sync import Sync, make_gradient_sync
from meshwright.run.parallel.zero.matrix_gather import MatrixGatherer
from meshwright.run.train.checkpoint import CheckpointManager, CheckpointSaveError, SaveTiming
from meshwright.run.train.checkpoint.checkpoint_folder import read_metadata
from meshwright.run.train.checkpoint.metadata import decode_extra
from meshwright.run.train.cuda_graph import select_cuda_graph
from meshwright.run.train.decoder_factory import make_decoder
from meshwright.run.train.job.train_job import TrainJob
from meshwright.run.train.loss_guard import LossGuard, TrainingStoppedError
from meshwright.run.train.objective import NextTokenObjective
from meshwright.run.train.optimizer.optimizer import make_optimizer
from meshwright.run.train.optimizer.stacked_matrices import (
    list_stacked_matrix_rows,
    make_matrix_gatherer,
)
from meshwright.run.train.run_folder.run_state import (
    RESTART_FIX,
    RunState,
    describe_kind,
    find_run_kind_problem,
    list_changed_invariants,
    list_job_invariants,
    parse_run_state,
)
from meshwright.run.train.run_folder.state_tensors import (
    StateTensor,
    make_sharded_state,
    make_unsharded_state,
)
from meshwright.run.train.step_backend import MeshStepBackend, ReplicaStep, make_sharded_model
from meshwright.run.train.train_step import TrainStep
from meshwright.run.train.train_task import TextTask, TrainTask

MAX_FAILED_SAVES = 3
"""Saves that fail in a row before a run ends: a full disk may be a matter of minutes."""


class Trainer:
    """A run's decoder, optimizer, data, guard and checkpoints."""

    def __init__(
        self,
        job: TrainJob,
        folder: Path,
        mesh: Mesh | None = None,
        *,
        task: TrainTask | None = None,
    ) -> None:
        """Put a run together; nothing of an earlier one is loaded yet.

        With a `mesh` this is one rank of several that train together. `task` says what is trained
        on what; None trains all weights on text.
        """
        self.job, self.folder, self.mesh = job, folder, mesh
        self.task: TrainTask = TextTask() if task is None else task
        for remark in job.list_warnings() if self.is_rank_zero else ():
            warnings.warn(remark, stacklevel=2)
        self.device = select_device(job) if mesh is None else mesh.device
        self.total_steps = job.workload.num_steps
        self.step_number = 0
        self.tokens_seen = 0
        self._saved_at: int | None = None
        self._failed_saves = 0
        self.checkpoints = CheckpointManager(folder / "checkpoints", job.checkpoint, mesh=mesh)
        self.train_dataset = self.task.train_dataset(
            job, rank=0 if mesh is None else mesh.coordinate.dp, world=job.layout.dp
        )
        self.eval_dataset = self.task.eval_dataset(job)
        self.decoder, self.sharded_model = self._first_weights()
        self.objective = self.task.make_objective(self.decoder, job, folder, self.sharded_model)
        if mesh is not None:  # before weights are cut over replicas
            self.objective.set_replicas(mesh["dp"].all_reduce, mesh.coordinate.dp)
        self.gradient_sync: Sync | None = None
        if self.sharded_model is not None:
            self.sharded_model = self.objective.select_trainable(self.sharded_model)
            self.gradient_sync = make_gradient_sync(self.sharded_model)
        self.optimizer = make_optimizer(
            self.named_optimized_parameters(),
            job.layout,
            job.optimizer,
            total_steps=self.total_steps,
            seed=job.seed,
            parts=list_stacked_matrix_rows(
                self.decoder if self.gradient_sync is None else build_decoder(job.model)
            ),
            matrices=self._whole_matrices(),
        )
        self.train_step: TrainStep | MeshStepBackend = self._steps()
        self.loss_guard = LossGuard(job.loss_guard)

    @property
    def is_rank_zero(self) -> bool:
        """Whether this process speaks for the run: writes its figures, configuration and page."""
        return self.mesh is None or self.mesh.rank == 0

    def named_optimized_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Go through what this rank updates."""
        return (
            self.objective if self.gradient_sync is None else self.gradient_sync
        ).named_parameters()

    def _first_weights(self) -> tuple[Decoder, ShardedModel | None]:
        """Return the modules that are here, and how they lie where there are several ranks."""
        job, made = self.job, None
        given: dict[str, Any] = {
            "seed": job.seed,
            "gemm": select_gemm_backend(self.device) if job.device.tuned_gemm else None,
            "options": job.make_build_options(),
        }
        if self.mesh is None or not self.task.shards_model(job):
            decoder = make_decoder(job.model, job.layout, device=self.device, **given)
        else:
            made = make_sharded_model(job.model, self.mesh, **given)
            decoder = made.decoder
        # A run that goes on has no more need of what it began with, which may be gone.
        begins = not self.checkpoints.list_saved() or self.task.needs_initial_weights(
            job, self.folder
        )
        if job.initial_load_path is not None and begins:
            self.task.load_initial_weights(
                decoder, job.initial_load_path, None if made is None else made.shard_specs
            )
        if self.is_rank_zero and job.layout.precision.startswith("fp8") and not _uses_fp8(decoder):
            what = "no GEMM of this model runs in fp8: all are too small, or of odd sizes"
            warnings.warn(f"{what}; they are computed in bf16", stacklevel=3)
        return decoder, made

    def _whole_matrices(self) -> MatrixGatherer | None:
        """Return what Muon works on, where ranks hold parts of it."""
        if (
            self.sharded_model is None
            or self.gradient_sync is None
            or self.job.layout.optimizer != "muon"
        ):
            return None
        return make_matrix_gatherer(self.sharded_model, self.gradient_sync)

    def _steps(self) -> TrainStep | MeshStepBackend:
        job = self.job
        balanced = any(part.balance is not None for part in self.decoder.iter_moe_layers())
        rate = job.loss.moe_router_bias_update_rate if balanced else 0.0
        size = job.layout.microbatch
        if self.sharded_model is not None and self.gradient_sync is not None:
            return MeshStepBackend(
                self.sharded_model,
                self.gradient_sync,
                self.optimizer,
                microbatch=size,
                expert_bias_update_rate=rate,
                objective=self.objective,
            )
        if self.mesh is not None:
            return ReplicaStep(
                self.decoder, self.optimizer, self.mesh, self.objective, microbatch=size
            )
        graph = select_cuda_graph(
            job.device.cuda_graph,
            job.model,
            job.layout,
            length=job.workload.sequence_length,
            device=self.device,
        )
        return TrainStep(
            self.decoder,
            self.optimizer,
            microbatch=size,
            expert_bias_update_rate=rate,
            # What other learners see of a step is no part of a recording.
            graph=graph.capture and isinstance(self.objective, NextTokenObjective),
            objective=self.objective,
        )

    def tensors(self) -> Mapping[str, StateTensor]:
        """Return every tensor that a resumed run needs: the run's own, not copies."""
        if self.gradient_sync is not None:
            return make_sharded_state(
                self.gradient_sync, self.optimizer, self.objective.checkpoint_name
            )
        return make_unsharded_state(self.objective.tensors(), self.optimizer)

    @property
    def is_finished(self) -> bool:
        """Whether every step of the job is done."""
        return self.step_number >= self.total_steps

    @property
    def is_saved(self) -> bool:
        """Whether the state after the steps done so far is the last that was saved."""
        return self._saved_at == self.step_number

    def save(self) -> SaveTiming:
        """Save the state after the steps done so far; weights with NaN or Inf are refused.

        Files of tokens are read to their end before: what damaged ones taught is not kept.
        """
        if self.train_dataset.verification is not None:
            self.train_dataset.verification.wait()
        weights = [value.detach() for _, value in self.named_optimized_parameters()]
        # The largest of them: unlike a sum of squares it overflows only where one of them did.
        finite = torch.isfinite(get_total_norm(weights, norm_type=torch.inf))
        if self.mesh is not None:
            finite = self.mesh.world.all_reduce(finite.to(torch.float32), "min")
        if not finite:
            raise TrainingStoppedError(
                f"stopped after step {self.step_number}: the weights contain NaN or Inf; the last "
                f"good checkpoint is {self.find_latest_checkpoint() or 'none'}. Resume from it "
                "with a lower learning rate"
            )
        self._settle()
        state = RunState(
            tokens_seen=self.tokens_seen,
            guard=self.loss_guard.state_dict(),
            data=self.train_dataset.fingerprint,
            invariants=list_job_invariants(self.job),
        )
        staged = self.checkpoints.save(self.step_number, self.tensors(), msgspec.to_builtins(state))
        self._saved_at = self.step_number
        return staged

    def _settle(self) -> None:
        """Wait for the save before; a failed one is warned of, several in a row end the run."""
        try:
            self.checkpoints.wait()
        except CheckpointSaveError as error:
            self._failed_saves += 1
            if self._failed_saves >= MAX_FAILED_SAVES:
                raise
            left = MAX_FAILED_SAVES - self._failed_saves
            what = "that checkpoint is lost, training goes on, and the next one is tried now"
            ends = f"the run ends where {left} more in a row fail"
            warnings.warn(f"{error}; {what}; {ends}", stacklevel=4)
        else:
            self._failed_saves = 0

    def find_latest_checkpoint(self) -> Path | None:
        """Return the newest checkpoint, once what is being written is on the disk."""
        self.checkpoints.wait()
        newest = self.checkpoints.find_latest()
        return None if newest is None else newest.path

    def resume(self) -> bool:
        """Go on from the newest checkpoint that is whole; False where there never was one.

        Where all of them are damaged, that is an error: to start from step 0 is for the user to
        say.
        """
        if not self.checkpoints.list_saved():
            return False
        newest = self.checkpoints.find_latest()
        if newest is not None:  # another job is told apart before any tensor is compared
            extra = decode_extra(read_metadata(newest.path))
            kind, fix = describe_kind(self.job.resume_invariants()), ", or pass --no-resume"
            if (problem := find_run_kind_problem(kind, extra, self.folder, fix)) is not None:
                raise InputError([problem])
            self._compare(parse_run_state(extra, newest.path))
        try:
            loaded = self.checkpoints.load(self.tensors())
        except DamagedFile as error:
            if self.job.checkpoint.on_damaged != "previous":
                raise
            raise DamagedFile([*error.problems, self._all_damaged()]) from None
        state = parse_run_state(loaded.extra, loaded.checkpoint.path)
        if self.gradient_sync is not None:
            self.gradient_sync.zero_grads_and_unshard()
        self.step_number = self._saved_at = loaded.step
        self.tokens_seen = state.tokens_seen
        self.loss_guard = LossGuard(self.job.loss_guard, state.guard)
        return True

    def _compare(self, state: RunState) -> None:
        """Refuse to go on with a job that would not be the same run."""
        problems = list_changed_invariants(self.job, state)
        if state.data != self.train_dataset.fingerprint and not problems:
            what = "tokens, their order or their blend are not those the run began with"
            problems.append(Problem("data", what, RESTART_FIX))
        if problems:
            raise InputError(problems)

    def _all_damaged(self) -> Problem:
        what = "none of its checkpoints is whole, so the run cannot go on"
        return Problem(str(self.folder), what, "pass --no-resume, which keeps this folder")

    def close(self) -> None:
        """Wait for what is being written, and let go."""
        if self.train_dataset.verification is not None:
            self.train_dataset.verification.close()
        self.checkpoints.close()


def _uses_fp8(decoder: Decoder) -> bool:
    linears = (part for part in decoder.modules() if isinstance(part, Linear))
    return any(part.linear_method is not None for part in linears)


def select_device(job: TrainJob) -> torch.device:
    """Return the device a job trains on."""
    asked = job.device.type
    if asked == "cuda" and not torch.cuda.is_available():
        hint = 'set device.type = "cpu", or leave it out'
        raise MissingDependency("the job asks for a CUDA device, and torch sees none", hint)
    if asked == "auto":
        asked = "cuda" if torch.cuda.is_available() else "cpu"
    if job.device.threads is not None:
        torch.set_num_threads(job.device.threads)
    return (
        torch.device(asked, torch.cuda.current_device()) if asked == "cuda" else torch.device(asked)
    )
