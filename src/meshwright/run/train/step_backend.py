"""`ReplicaStep` and `MeshStepBackend`: one training step over several ranks.

Replicas of a `ReplicaStep` each hold a whole model; ranks of a `MeshStepBackend` hold its shards.
Losses, counts and gradients of any objective are sums, so ranks add theirs up and compute the same
update. Replicas reduce their gradients in buckets after backward, a mesh while it still runs.
"""

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.profiler import record_function

from meshwright.run.kernels.gemm.gemm import GemmBackend
from meshwright.run.kernels.optimizer.grad_norm import GradNorm
from meshwright.run.nn.decoder import Decoder
from meshwright.run.nn.decoder_builder import DEFAULT_BUILD_OPTIONS, BuildOptions
from meshwright.run.nn.linear.fp8_conversion import apply_precision, cache_fp8_weights
from meshwright.run.nn.linear.linear import set_gemm_backend
from meshwright.run.parallel.context_parallel.context_parallel import get_ulysses_degree
from meshwright.run.parallel.expert_parallel.token_dispatcher import all_reduce_expert_load
from meshwright.run.parallel.forward_backward import (
    ForwardBackwardRunner,
    LocalLossSums,
)
from meshwright.run.parallel.group_coordinator import GroupCoordinator
from meshwright.run.parallel.health.collective_order import CollectiveOrderCheck
from meshwright.run.parallel.mesh import Mesh
from meshwright.run.parallel.microbatch import Microbatch
from meshwright.run.parallel.sharded_model import ShardedModel, shard_model
from meshwright.run.parallel.timeline_recorder import record_span_if_enabled
from meshwright.run.parallel.zero.gradient_sync import Sync
from meshwright.run.train.data.batch import TrainBatch
from meshwright.run.train.objective import NextTokenObjective, Objective
from meshwright.run.train.optimizer.ema import WeightEMA
from meshwright.run.train.optimizer.optimizer import Optimizer
from meshwright.run.train.train_step import (
    StepLosses,
    StepMetrics,
    TrainStep,
    get_weight_dtype,
    pop_dropped_counts,
)
from meshwright.spec.model import Model, MoESpec

BUCKET_BYTES = 1 << 28
"""Gradients that travel together: enough for a link, and little beside them."""


class ReplicaStep(TrainStep):
    """Runs the steps of one replica among others."""

    def __init__(
        self,
        decoder: Decoder,
        optimizer: Optimizer,
        mesh: Mesh,
        objective: Objective,
        *,
        microbatch: int,
    ) -> None:
        """Make the steps; every replica does so at the same point."""
        super().__init__(decoder, optimizer, microbatch=microbatch, objective=objective)
        self.mesh, self.is_stop_requested = mesh, False
        self.replica = (mesh.coordinate.dp, mesh.layout.dp)
        self._began_ns = 0
        mesh.connect_groups((mesh["dp"], mesh.world))

    def forward_backward(self, batch: TrainBatch) -> StepLosses:
        """Run every microbatch forward and backward; the gradients of all replicas are added up."""
        mesh = self.mesh
        self._began_ns = 0 if mesh.recorder is None else time.time_ns()
        self.objective.begin_step(batch)
        # Replicas have different numbers of tokens, pairs or answers.
        mine = [self.objective.loss_divisor(batch), batch.num_targets]
        counts = torch.tensor(mine, dtype=torch.float64, device=mesh.device)
        counts = mesh["dp"].all_reduce(counts).clamp(min=1)
        share = (1 / counts[0]).float()
        losses = [self._backward(part, share) for part in batch.split_microbatches(self.microbatch)]
        with record_function("grad reduce"), record_span_if_enabled(mesh.recorder, "grad reduce"):
            self._add_up(self.optimizer.gradients().values())
        stop = torch.full(
            (), float(self.is_stop_requested), dtype=torch.float64, device=mesh.device
        )
        sums = [torch.stack([getattr(one, name).detach() for one in losses]).sum().double()
                for name in ("loss_sum", "auxiliary_loss")]  # fmt: skip
        dropped = pop_dropped_counts(self.decoder, mesh.device)
        total = mesh["dp"].all_reduce(torch.cat([torch.stack([*sums, stop]), dropped]))
        return StepLosses(
            total[0],
            total[1],
            counts[1],
            total[2],
            total[3:],
            divisor_override=counts[0],
            metrics=self.objective.pop_metrics(),
        )

    def _add_up(self, gradients: Iterable[Tensor]) -> None:
        """Add the gradients of all replicas, some at a time."""
        alike: dict[torch.dtype, list[Tensor]] = {}
        for one in gradients:
            alike.setdefault(one.dtype, []).append(one)
        for group in alike.values():
            for some in _filled(group):
                flat = self.mesh["dp"].all_reduce(torch.cat([one.flatten() for one in some]))
                sizes = [one.numel() for one in some]
                for one, added in zip(some, torch.split(flat, sizes), strict=True):
                    one.copy_(added.view_as(one))

    def update(self, losses: StepLosses, step: int) -> StepMetrics:
        """Update the weights as every replica does."""
        with record_span_if_enabled(self.mesh.recorder, "optimizer"):
            found = super().update(losses, step)
        self._record(f"step {step + 1}")
        return found

    def discard(self) -> None:
        """Drop the gradients of a step that shall not happen."""
        super().discard()
        self._record("step skipped")

    def _record(self, name: str) -> None:
        if self.mesh.recorder is not None and self._began_ns:
            self.mesh.recorder.record_step(name, self._began_ns)

    def reduce_eval(self, nats: Tensor, tokens: int) -> Tensor:  # type: ignore[override]
        """Return what all replicas evaluated: nats, and what they are divided by."""
        return self.mesh["dp"].all_reduce(TrainStep.reduce_eval(nats, tokens))


def _filled(tensors: Iterable[Tensor]) -> Iterable[list[Tensor]]:
    some, held = list[Tensor](), 0
    for one in tensors:
        if some and held + one.nbytes > BUCKET_BYTES:
            yield some
            some, held = [], 0
        some.append(one)
        held += one.nbytes
    if some:
        yield some


def make_sharded_model(
    model: Model,
    mesh: Mesh,
    *,
    seed: int = 0,
    gemm: GemmBackend | None = None,
    options: BuildOptions = DEFAULT_BUILD_OPTIONS,
) -> ShardedModel:
    """Return this rank's part of a model with its first weights, computing as the layout says."""
    layout = mesh.layout
    made = shard_model(model, mesh, dtype=get_weight_dtype(layout), seed=seed, options=options)
    if gemm is not None:
        set_gemm_backend(made.decoder, gemm)
    apply_precision(made.decoder, layout.precision)
    return made


class MeshStepBackend:
    """Runs the steps of this rank's part of a model."""

    def __init__(
        self,
        sharded_model: ShardedModel,
        gradient_sync: Sync,
        optimizer: Optimizer,
        *,
        microbatch: int,
        expert_bias_update_rate: float = 0.0,
        objective: Objective | None = None,
    ) -> None:
        """Make the steps; the optimizer has been given `sync.named_parameters()`.

        Every rank does so at the same point: groups that the steps will use are connected.
        `objective` says what is minimized; None is the next token.
        """
        self.sharded_model, self.gradient_sync, self.optimizer = (
            sharded_model,
            gradient_sync,
            optimizer,
        )
        self.objective: Objective = (
            NextTokenObjective(sharded_model.decoder) if objective is None else objective
        )
        self.microbatch, self.expert_bias_update_rate = microbatch, expert_bias_update_rate
        self.runner, self._same_order = (
            ForwardBackwardRunner(sharded_model),
            CollectiveOrderCheck(sharded_model.mesh),
        )
        self.is_stop_requested = False
        """This rank was asked to stop; the next step tells the others."""
        self._gradients: dict[str, Tensor] = {}
        self._began_ns = 0
        groups = (*list_communication_groups(sharded_model), *gradient_sync.list_groups())
        sharded_model.mesh.connect_groups(groups)

    def __call__(self, batch: TrainBatch, step: int) -> StepMetrics:
        """Train on one batch, as step number `step`, counted from 0."""
        return self.update(self.forward_backward(batch), step)

    def forward_backward(self, batch: TrainBatch) -> StepLosses:
        """Run every microbatch forward and backward; the gradients of all ranks are added up."""
        mesh = self.sharded_model.mesh
        recorder = mesh.recorder
        self._began_ns = 0 if recorder is None else time.time_ns()
        self.objective.begin_step(batch)
        # Of replicas alone: others of a replica have the same sequences. Made on the device, as a
        # copy from the host would wait for all that the device still has to do.
        counts = torch.full((2,), float(batch.num_targets), dtype=torch.float64, device=mesh.device)
        counts[:1].fill_(self.objective.loss_divisor(batch))
        over, tokens = mesh["dp"].all_reduce(counts).clamp(min=1)
        share = (1 / over).float()
        if self.optimizer.grad_scaler is not None:
            share = share * self.optimizer.grad_scaler.scale
        parts = [microbatch_of(part) for part in batch.split_microbatches(self.microbatch)]
        # What ZeRO 3 lets go of must not stay as a copy.
        cache_fp8_weights(self.sharded_model.decoder, len(parts) > 1 and mesh.layout.zero < 3)
        self.gradient_sync.begin_step()
        sums = self.runner(parts, share, self.gradient_sync.mark_last_backward)
        with record_function("grad reduce"), record_span_if_enabled(recorder, "grad reduce"):
            self._gradients = self.gradient_sync.reduced_gradients()
        total = self._total(sums, stop=self.is_stop_requested)
        seen = self.objective.pop_metrics()
        return StepLosses(
            total[0], total[1], tokens, total[2], total[3:], divisor_override=over, metrics=seen
        )

    def _total(self, sums: LocalLossSums, *, stop: bool = False) -> Tensor:
        """Add up the ranks' losses, who wants to stop, and what experts had no room for."""
        mesh = self.sharded_model.mesh
        wishes = torch.full((), float(stop), dtype=torch.float64, device=mesh.device)
        mine = torch.stack([sums.loss_sum.double(), sums.auxiliary_loss.double(), wishes])
        # Ranks that share the work on the same tokens have the same loss.
        mine[:2] /= mesh.layout.tp
        return mesh.world.all_reduce(
            torch.cat([mine, pop_dropped_counts(self.decoder, mesh.device)])
        )

    def grad_norm(self) -> GradNorm:
        """Return the norm of all gradients, before loss scaling is undone."""
        return self.gradient_sync.grad_norm()

    def update(self, losses: StepLosses, step: int) -> StepMetrics:
        """Update the weights by the gradients that are there, and drop them."""
        with (
            record_function("optimizer"),
            record_span_if_enabled(self.sharded_model.mesh.recorder, "optimizer"),
        ):
            report = self.optimizer.step(
                self.optimizer.learning_rate(step), norm=self.grad_norm(), gradients=self._gradients
            )
            self._gradients = {}
            self.gradient_sync.zero_grads_and_unshard()
            if self.expert_bias_update_rate:
                self._balance(self.expert_bias_update_rate * ~report.is_skipped)
        self._same_order()
        self._record(f"step {step + 1}")
        return StepMetrics(losses, report)

    def _record(self, name: str) -> None:
        """Write the step that ends here into the timeline, where there is one."""
        recorder = self.sharded_model.mesh.recorder
        if recorder is not None and self._began_ns:
            recorder.record_step(name, self._began_ns)

    def discard(self) -> None:
        """Drop the gradients of a step that shall not happen, and what it counted."""
        self._gradients = {}
        self.gradient_sync.zero_grads_and_unshard()
        self._balance(0.0)
        self._record("step skipped")

    def _balance(self, rate: float | Tensor) -> None:
        """Move the bias of experts by the load over all ranks that share a step's tokens."""
        all_reduce_expert_load(self.sharded_model.decoder, self.sharded_model.mesh)
        for part in self.sharded_model.decoder.iter_moe_layers():
            part.update_expert_bias(rate)

    @property
    def decoder(self) -> Decoder:
        """This rank's part of the model."""
        return self.sharded_model.decoder

    @contextmanager
    def with_ema_weights(self, average: WeightEMA) -> Iterator[None]:
        """Let the averaged weights stand in for the model's own, on every rank."""
        try:
            with average.swap_into(dict(self.gradient_sync.named_parameters())):
                self.gradient_sync.zero_grads_and_unshard()
                yield
        finally:
            self.gradient_sync.zero_grads_and_unshard()

    @property
    def replica(self) -> tuple[int, int]:
        """Which of how many data-parallel replicas this rank belongs to."""
        return self.sharded_model.mesh.coordinate.dp, self.sharded_model.mesh.layout.dp

    @torch.no_grad()
    def evaluate(self, batch: TrainBatch) -> Tensor:
        """Return this rank's share of the summed cross-entropy of its replica's batch, in nats."""
        self.objective.begin_step(batch)
        nats = self.runner.evaluate(microbatch_of(batch)).loss_sum.double()
        # Ranks that share the work on the same tokens have the same loss.
        return nats / self.sharded_model.mesh.layout.tp

    def discard_eval_stats(self) -> None:
        """Discard the last evaluation's statistics."""
        self.objective.discard_metrics()

    def loss_divisor(self, batch: TrainBatch) -> int:
        """Return what the loss of a batch is divided by."""
        return self.objective.loss_divisor(batch)

    @contextmanager
    def eval_mode(self) -> Iterator[None]:
        """Let nothing be left out by chance, and nothing be counted as trained."""
        was_training = self.decoder.training
        self.objective.train(False)
        try:
            yield
        finally:
            self.objective.train(was_training)

    def reduce_eval(self, nats: Tensor, tokens: int) -> Tensor:
        """Return what was evaluated on all ranks: nats and tokens, which each replica counts."""
        mesh = self.sharded_model.mesh
        first = mesh.coordinate.tp == mesh.coordinate.cp == mesh.coordinate.pp == 0
        counted = torch.full_like(nats, tokens if first else 0)
        return mesh.world.all_reduce(torch.stack([nats, counted]))


def list_communication_groups(sharded_model: ShardedModel) -> list[GroupCoordinator]:
    """Return everybody that a rank exchanges with in and around its passes."""
    mesh, layout = sharded_model.mesh, sharded_model.mesh.layout
    found = [mesh[axes] for axes in ("tp", "dp", "pp", "cp")]
    trade = get_ulysses_degree(layout)
    if 1 < trade < layout.cp:
        found[-1:] = [mesh.get_subgroup("cp", trade), mesh.get_cross_group("cp", trade)]
    if any(isinstance(block.mlp, MoESpec) for block in sharded_model.decoder.model.blocks):
        found += [mesh[axes] for axes in ("ep", "expert_tp", "expert_tp-ep", "tp-cp-dp")]
    return found


def microbatch_of(batch: TrainBatch) -> Microbatch:
    """Return what the passes need of a batch."""
    given = (batch.tokens_BT, batch.labels_BT, batch.positions_BT, batch.documents)
    return Microbatch(*given, source=batch)
