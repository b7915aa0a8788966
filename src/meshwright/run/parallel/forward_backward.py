"""`PipelineScheduleRunner`: runs a step in the order of a `policy/pipeline` schedule.

The schedule is the value that the simulator times. Actions run one after the other, also those that
a schedule joins: a forward and a backward that DualPipe overlaps are issued in turn, and a device
runs them as it can. Transfers that stand side by side are begun together. Where the mesh has a
recorder, every pass goes into the run's timeline.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from time import perf_counter
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from meshwright.errors import Problem
from meshwright.policy.pipeline import add_transfers, batch_transfers, build_layout_schedule
from meshwright.policy.pipeline.schedule import (
    TRANSFER_OPS,
    PipelineAction,
    PipelineSchedule,
    split_concurrent_groups,
)
from meshwright.run.nn.decoder import BatchLoss
from meshwright.run.parallel.context_parallel.context_parallel import split_microbatches
from meshwright.run.parallel.microbatch import Microbatch
from meshwright.run.parallel.pipeline_parallel.p2p import P2PCommunicator
from meshwright.run.parallel.pipeline_parallel.pipeline_stage import StageExecutor
from meshwright.run.parallel.sharded_model import ShardedModel
from meshwright.run.parallel.timeline_recorder import TimelineRecorder
from meshwright.spec.layout import Layout
from meshwright.spec.layout.pipeline_chunks import list_chunks_by_rank
from meshwright.spec.model import Model

if TYPE_CHECKING:
    pass


FORWARD_OPS = frozenset({"F", "send_forward", "recv_forward"})
"""All there is to do where nothing is trained."""


class ExecutedAction(NamedTuple):
    """Something a rank did, by the host's clock."""

    action: PipelineAction
    start_s: float
    """When all it needs was there; what it waited for lies before."""
    end_s: float


class PipelineScheduleRunner:
    """Runs microbatches through this rank's chunks and exchanges streams with other ranks."""

    def __init__(self, sharded_model: ShardedModel) -> None:
        self.sharded_model = sharded_model
        self.executed_actions: list[ExecutedAction] = []
        """What the last step did, in order."""

    def __call__(
        self,
        microbatches: Sequence[Microbatch],
        share: float | Tensor,
        on_last: "LastBackwardHook | None" = None,
    ) -> tuple[Tensor, Tensor]:
        """Run a step; return this rank's cross-entropy and what training adds, summed.

        Every rank of the pipeline is given the same microbatches.
        """
        return self._run(microbatches, share, on_last)

    @torch.no_grad()
    def evaluate(self, microbatches: Sequence[Microbatch]) -> tuple[Tensor, Tensor]:
        """Run forward alone, in the same order; the sums are those of the ranks with the head."""
        return self._run(microbatches, 1.0, None)

    def _run(
        self,
        microbatches: Sequence[Microbatch],
        share: float | Tensor,
        on_last: "LastBackwardHook | None",
    ) -> tuple[Tensor, Tensor]:
        mesh, stage = self.sharded_model.mesh, self.sharded_model.pipeline_stage
        layout = mesh.layout
        schedule = make_step_schedule(layout, len(microbatches))
        lane = schedule.actions[mesh.coordinate.pp]
        if not torch.is_grad_enabled():
            lane = tuple(action for action in lane if action.op in FORWARD_OPS)
        sequence_ranks = layout.tp if layout.sequence_parallel else 1
        boundary = P2PCommunicator(
            mesh["pp"],
            schedule,
            [stage.get_activation_shape(each, sequence_ranks) for each in microbatches],
            dtype=stage.dtype,
            device=mesh.device,
            overlap=layout.overlap_pp,
        )
        passes = StageExecutor(stage, microbatches, share)
        last, recorder = find_last_gradient_actions(lane), mesh.recorder
        self.executed_actions = []
        for group in split_concurrent_groups(lane):
            if group[0].op in TRANSFER_OPS:
                start = perf_counter()
                boundary.start_transfers(group)
                end = perf_counter()
                self.executed_actions += [ExecutedAction(action, start, end) for action in group]
                continue
            for action in group:
                if on_last is not None and action in last:
                    on_last(action.chunk)
                self._compute(action, passes, boundary, recorder)
        boundary.wait_all()
        return passes.loss_sums()

    def _compute(
        self,
        action: PipelineAction,
        passes: StageExecutor,
        boundary: P2PCommunicator,
        recorder: TimelineRecorder | None,
    ) -> None:
        op, chunk, microbatch, _ = action
        at, given = (chunk, microbatch), None
        if op == "F":
            if chunk > 0:
                given = boundary.pop("forward", chunk, microbatch)
            start = perf_counter()
            found = passes.forward_one_chunk(at, given)
            if found is not None:
                boundary.put("forward", chunk + 1, microbatch, found)
        elif op == "W":
            start = perf_counter()
            passes.backward_weight_one_chunk(at)
        else:
            if chunk + 1 < boundary.pipeline_schedule.chunks:
                given = boundary.pop("backward", chunk, microbatch)
            start = perf_counter()
            found = passes.backward_one_chunk(at, given, weights=op == "B")
            if found is not None:
                boundary.put("backward", chunk - 1, microbatch, found)
        end = perf_counter()
        self.executed_actions.append(ExecutedAction(action, start, end))
        if recorder is not None:
            recorder.record_pass(
                op, self.sharded_model.pipeline_stage.chunks[chunk], microbatch, end - start
            )


@lru_cache(maxsize=64)
def make_step_schedule(layout: Layout, microbatches: int) -> PipelineSchedule:
    """Return what all pipeline ranks do in a step, transfers included."""
    return batch_transfers(add_transfers(build_layout_schedule(layout, microbatches)))


def find_last_gradient_actions(lane: Sequence[PipelineAction]) -> frozenset[PipelineAction]:
    """Return for every chunk of a rank the action after which its gradients are complete."""
    last = {action.chunk: action for action in lane if action.op in ("B", "W")}
    return frozenset(last.values())


def find_pipeline_problems(model: Model, layout: Layout) -> list[Problem]:
    """Say what keeps a pipeline from running."""
    found: list[Problem] = []
    if layout.pp == 1:
        return found
    for rank, held in enumerate(list_chunks_by_rank(layout, model.layers)):
        if not any(one.last > one.first or one.has_embedding or one.has_head for one in held):
            what = f"pipeline rank {rank} holds no layer of {model.layers}"
            found.append(Problem("layout.stage_layers", what, "give every rank a layer"))
    return found


class LocalLossSums(NamedTuple):
    """What this rank's share of the tokens costs; noughts on ranks that see no loss."""

    loss_sum: Tensor
    """fp32 scalar: cross-entropy, summed."""
    auxiliary_loss: Tensor
    """fp32 scalar: what training adds to it, summed."""


LastBackwardHook = Callable[[int], None]
"""Told the position of a chunk whose gradients are complete after the backward that follows."""


class ForwardBackwardRunner:
    """Runs microbatches forward and backward; gradients are left at the parameters."""

    def __init__(self, sharded_model: ShardedModel) -> None:
        self.sharded_model = sharded_model
        self.schedule_runner = (
            PipelineScheduleRunner(sharded_model) if sharded_model.mesh.layout.pp > 1 else None
        )
        """Runs the schedule where there are several stages."""

    def __call__(
        self,
        microbatches: Sequence[Microbatch],
        share: float | Tensor,
        on_last: LastBackwardHook | None = None,
    ) -> LocalLossSums:
        """Run all microbatches of a step, each loss multiplied by `share` before backward."""
        microbatches = split_microbatches(microbatches, self.sharded_model)
        if self.schedule_runner is not None:
            return LocalLossSums(*self.schedule_runner(microbatches, share, on_last))
        losses, recorder = [], self.sharded_model.mesh.recorder
        for number, microbatch in enumerate(microbatches):
            loss = self._forward(microbatch, number)
            if on_last is not None and number == len(microbatches) - 1:
                on_last(0)
            start = perf_counter()
            (loss.total * share).backward()  # type: ignore[no-untyped-call]
            if recorder is not None:
                recorder.record_pass(
                    "B", self.sharded_model.pipeline_stage.chunks[0], number, perf_counter() - start
                )
            losses.append((loss.loss_sum.detach(), loss.auxiliary_loss.detach()))
        nats, auxiliary = (torch.stack(column).sum() for column in zip(*losses, strict=True))
        return LocalLossSums(nats, auxiliary)

    @torch.no_grad()
    def evaluate(self, microbatch: Microbatch) -> LocalLossSums:
        """Run a microbatch forward alone."""
        (microbatch,) = split_microbatches([microbatch], self.sharded_model)
        if self.schedule_runner is not None:
            return LocalLossSums(*self.schedule_runner.evaluate([microbatch]))
        loss = self._forward(microbatch, 0)
        return LocalLossSums(loss.loss_sum, loss.auxiliary_loss)

    def _forward(self, microbatch: Microbatch, number: int) -> BatchLoss:
        """Run a microbatch through the one stage there is."""
        start, recorder = perf_counter(), self.sharded_model.mesh.recorder
        loss = self.sharded_model.pipeline_stage.forward_one_chunk(0, microbatch, None)
        assert isinstance(loss, BatchLoss), "one stage has the head"
        if recorder is not None:
            recorder.record_pass(
                "F", self.sharded_model.pipeline_stage.chunks[0], number, perf_counter() - start
            )
        return loss
